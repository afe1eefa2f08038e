// Shows openapi.json: a section for each group, an entry for each route, a table for each body.

const api = await (await fetch("openapi.json")).json();
const schemas = api.components.schemas;

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function row(...texts) {
  return element("tr", "", ...texts.map((text, n) => element("td", n === 1 ? "" : text, ...(n === 1 ? [element("code", text)] : []))));
}

function resolved(schema) {
  return schema.$ref ? { name: schema.$ref.split("/").at(-1), ...schemas[schema.$ref.split("/").at(-1)] } : schema;
}

function typeOf(schema) {
  if (schema.$ref) {
    const { name, properties } = resolved(schema);
    return properties ? name.replace(/^_/, "") : "any";
  }
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((type) => type !== "null").join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `${schema.items ? typeOf(schema.items) : "any"}[]`;
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "any";
}

function table(head, rows) {
  return element("table", "", element("tr", "", ...head.map((text) => element("th", text))), ...rows);
}

function fieldsOf(schema) {
  const required = new Set(schema.required || []);
  const fields = Object.entries(schema.properties || {});
  fields.sort(([a], [b]) => required.has(b) - required.has(a) || a.localeCompare(b));
  const rows = fields.map(([name, field]) => row(name, typeOf(field), (required.has(name) ? "required. " : "") + (field.description || "")));
  return table(["field", "type", ""], rows);
}

// The schemas with fields that a schema names, and those that these name.
function named(schema, found = new Map()) {
  for (const [, name] of JSON.stringify(schema).matchAll(/#\/components\/schemas\/(\w+)/g))
    if (!found.has(name) && schemas[name].properties) named(schemas[name], found.set(name, schemas[name]));
  return found;
}

function bodyOf(operation) {
  const content = operation.requestBody?.content["application/json"];
  if (!content) return [];
  const schema = resolved(content.schema);
  const parts = [...named(schema)].flatMap(([name, part]) => [element("h3", name.replace(/^_/, "")), fieldsOf(part)]);
  return [element("h3", "Body"), fieldsOf(schema), ...parts];
}

function entry(path, method, operation) {
  const summary = element("summary", "", element("b", method), element("code", path), " ", operation.summary);
  const content = element("div");
  const headers = (operation.parameters || []).map((p) => row(p.name, p.in, p.description || ""));
  if (headers.length) content.append(element("h3", "Parameters"), table(["name", "in", ""], headers));
  content.append(...bodyOf(operation));
  const responses = Object.entries(operation.responses);
  content.append(element("h3", "Responses"), table(["status", "content", ""], responses.map(([status, response]) => row(status, Object.keys(response.content).join(", "), response.description))));
  if (operation.security) content.append(element("p", "Needs the header Authorization: Bearer KEY, or x-api-key: KEY."));
  return element("details", "", summary, content);
}

const groups = new Map();
for (const [path, methods] of Object.entries(api.paths))
  for (const [method, operation] of Object.entries(methods)) {
    const group = operation.tags[0];
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(entry(path, method, operation));
  }
document.getElementById("about").prepend(`Version ${api.info.version}. `);
document.getElementById("routes").replaceChildren(
  ...[...groups].flatMap(([group, entries]) => [element("h2", group), ...entries]),
);
