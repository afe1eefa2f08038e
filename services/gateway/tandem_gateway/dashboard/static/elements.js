// Makes elements. Texts become text nodes: ids and tenants in them are never read as HTML.

/** `properties`: class, key (a colour's name), and attributes; `children`: elements and texts. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "key") made.style.setProperty("--key", `var(--${value})`);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function swatch(colour, label) {
  return element("span", {}, element("span", { class: "key", key: colour }), label);
}

/** `columns`: [title, class]; `rows`: lists of texts or elements. An empty table shows `empty` instead. */
export function fillTable(table, columns, rows, empty = "") {
  const cell = (tag) => (content, index) => element(tag, { class: columns[index][1] }, content);
  const body = rows.map((row) => element("tr", {}, ...row.map(cell("td"))));
  table.replaceChildren(head(columns), element("tbody", {}, ...body));
  if (!rows.length) table.replaceChildren(element("caption", { class: "empty" }, empty));
}

export function head(columns) {
  return element("thead", {}, element("tr", {}, ...columns.map(([title, kind]) => element("th", { class: kind, scope: "col" }, title))));
}

/** A part of a .track, from and to as shares of its width. */
export function bar(kind, colour, from, to, title = null) {
  const made = element("i", { class: kind, key: colour, title });
  made.style.left = `${100 * from}%`;
  if (to !== null) made.style.width = `${100 * Math.max(to - from, 0)}%`;
  return made;
}

/** Labels below tracks from 0 to `longest` seconds. */
export function axis(longest, format) {
  const made = element("div", { class: "axis" });
  for (const share of [0, 0.5, 1]) {
    const label = made.appendChild(element("span", {}, share ? format(share * longest) : "0"));
    label.style.left = `${100 * share}%`;
  }
  return made;
}
