// The example names the address under which the page was loaded.
const example = document.querySelector("pre code");
const root = new URL(".", location.href).href.replace(/\/$/, "");
example.textContent = example.textContent.replace(" /v1/", ` ${root}/v1/`);
