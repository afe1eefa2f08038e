// Examples with the address under which the page was loaded, and a form that streams an answer.

const root = new URL(".", location.href).href.replace(/\/$/, "");
const [form, key, question, answer, receipt] = ["try", "key", "question", "answer", "receipt"].map((id) =>
  document.getElementById(id),
);
const button = form.querySelector("button");
/** Ends the answer that is being streamed. */
let running = null;

for (const example of document.querySelectorAll("pre code")) {
  example.textContent = example.textContent.replace("http://HOST", root);
  const copy = document.createElement("button");
  copy.textContent = "Copy";
  copy.onclick = () => navigator.clipboard.writeText(example.textContent).then(() => (copy.textContent = "Copied"));
  // Browsers have a clipboard for https and localhost only.
  if (navigator.clipboard) example.parentElement.previousElementSibling.append(" ", copy);
}

/** The JSON of each event of a response. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

function shown(usage) {
  const r = usage.tandem_receipt;
  const seconds = (ns) => (ns / 1e9).toFixed(3);
  return (
    `TTFT ${seconds(r.ttft_ns)} s, end ${seconds(r.e2e_ns)} s; ${usage.prompt_tokens} prompt tokens, ` +
    `${usage.completion_tokens} output tokens in ${r.decode_steps} steps; ${r.decode_pod}; ` +
    `SLO ${r.slo.name}: ${r.slo_met ? "met" : "missed"}`
  );
}

async function ask(signal) {
  const response = await fetch(`${root}/v1/chat/completions`, {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...(key.value && { authorization: `Bearer ${key.value}` }) },
    body: JSON.stringify({
      messages: [{ role: "user", content: question.value }],
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    answer.append(event.choices[0]?.delta.reasoning_content ?? "", event.choices[0]?.delta.content ?? "");
    if (event.usage) receipt.textContent = shown(event.usage);
  }
}

form.onsubmit = async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  running = new AbortController();
  button.textContent = "Stop";
  answer.hidden = false;
  answer.textContent = receipt.textContent = "";
  try {
    await ask(running.signal);
  } catch (error) {
    receipt.textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    running = null;
    button.textContent = "Ask";
  }
};
