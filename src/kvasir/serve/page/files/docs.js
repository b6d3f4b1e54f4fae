// The API of this server, from its own /openapi.json: routes, fields, types and meanings. Nothing is loaded from elsewhere.

import { Refused, get } from "./api.js";
import { find, make } from "./dom.js";
import { key } from "./store.js";

const METHODS = ["get", "post", "put", "delete"];

/** A type in words. schema: of OpenAPI. */
export function kind(schema, depth = 0) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const several = schema.anyOf ?? schema.oneOf;
  if (several && depth < 3) {
    const kinds = several.filter((one) => one.type !== "null").map((one) => kind(one, depth + 1));
    return [...new Set(kinds)].join(" or ");
  }
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" ");
  if (schema.type === "array") return `list of ${kind(schema.items, depth + 1)}`;
  return schema.type ?? "any";
}

/** The object that a body is, if it is one. */
function object(spec, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? spec.components.schemas[name] : schema?.properties ? schema : null;
}

function fields(schema) {
  const needed = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) =>
    make("tr", {}, make("td", {}, make("code", {}, name), needed.has(name) ? ", required" : ""), make("td", {}, kind(field)), make("td", {}, field.description ?? "")),
  );
  const head = make("tr", {}, ...["field", "type", "meaning"].map((title) => make("th", { scope: "col" }, title)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

function route(spec, method, path, operation) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const whole = object(spec, body);
  const box = make("details", {}, make("summary", {}, make("span", { class: "method" }, method.toUpperCase()), make("code", {}, path)));
  box.addEventListener(
    "toggle",
    () => {
      const parameters = (operation.parameters ?? []).map((one) => one.name).join(", ");
      box.append(
        ...[
          operation.description ? make("p", {}, operation.description) : null,
          parameters ? make("p", {}, "Query, path and headers: ", make("code", {}, parameters)) : null,
          whole ? fields(whole) : body ? make("p", {}, `Body: ${kind(body)}`) : null,
        ].filter(Boolean),
      );
    },
    { once: true },
  );
  const words = Object.entries(whole?.properties ?? {}).flatMap(([name, field]) => [name, field.description ?? ""]);
  return { box, text: [method, path, operation.description ?? "", ...words].join(" ").toLowerCase() };
}

function show(spec) {
  const groups = new Map();
  const all = [];
  for (const [path, operations] of Object.entries(spec.paths))
    for (const method of METHODS.filter((name) => operations[name])) {
      const shown = route(spec, method, path, operations[method]);
      const tag = operations[method].tags?.[0] ?? "server";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(shown.box);
      all.push(shown);
    }
  const sections = [...groups].map(([tag, boxes]) => make("section", {}, make("h2", {}, tag), ...boxes));
  const objects = Object.entries(spec.components.schemas).map(([name, schema]) => make("details", {}, make("summary", {}, make("code", {}, name)), fields(schema)));
  find("routes").replaceChildren(...sections, make("section", {}, make("h2", {}, "Objects"), ...objects));
  const search = () => {
    const wanted = find("search").value.toLowerCase().trim();
    for (const { box, text } of all) box.hidden = wanted !== "" && !text.includes(wanted);
    for (const section of sections) section.hidden = [...section.querySelectorAll("details")].every((box) => box.hidden);
  };
  find("search").addEventListener("input", search);
  search();
}

async function start() {
  find("notice").hidden = find("ask").hidden = true;
  try {
    show(await get("/openapi.json"));
  } catch (error) {
    find("notice").textContent = error instanceof Refused ? error.words : "The page could not be shown.";
    find("notice").hidden = false;
    find("ask").hidden = !(error.status === 401);
  }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(find("secret").value, false);
  start();
});
start();
