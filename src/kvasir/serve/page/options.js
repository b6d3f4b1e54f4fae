// The settings panel: how answers are sampled, and what is asked beside them.

import { find, make } from "./dom.js";
import { settings } from "./store.js";

// Numbers go to the server under their own names; what is left empty is not sent, and the model's default holds.
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }, "0 always takes the best token"],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }, "only the likeliest that make up this part"],
  ["top_k", "Top k", { min: -1, step: 1 }, "only so many of the likeliest; 0 for all"],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }, "only those this likely beside the best"],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, step: "any" }, "1 for none"],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }, "0 for none"],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }, "0 for none"],
  ["max_tokens", "Longest answer", { min: 1, step: 1 }, "in tokens"],
  ["seed", "Seed", { min: 0, step: 1 }, "the same one gives the same answer"],
];

function field(label, input, hint) {
  const small = hint ? make("small", { class: "muted" }, hint) : null;
  return make("label", { class: "field" }, make("span", {}, label), input, small);
}

export class Options {
  constructor() {
    this.values = { probabilities: true, ...settings.read() };
    this.form = find("settings-form");
    this.form.append(
      field("System message", this.area("system", 3)),
      ...NUMBERS.map(([name, label, limits, hint]) => field(label, this.number(name, limits), hint)),
      field("Stop at", this.area("stop", 2), "one text a line"),
      field("Thinking", this.choice("thinking", [["", "as the model does"], ["on", "on"], ["off", "off"]])),
      field("Tools", this.area("tools", 3), "a JSON list, as the API takes it"),
      field("Other fields", this.area("other", 2), "a JSON object, sent along as it is"),
      make("p", { id: "json-error", class: "error", role: "alert" }),
      this.check("probabilities", "Ask for token probabilities"),
      this.check("shade", "Underline unlikely tokens"),
      make("button", { type: "button", onclick: () => this.reset() }, "Back to the defaults"),
    );
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.take(event.target));
    this.apply();
  }

  number(name, limits) {
    const kind = { type: "number", inputmode: "decimal", placeholder: "default" };
    return make("input", { name, value: this.values[name], ...kind, ...limits });
  }

  area(name, rows) {
    const area = make("textarea", { name, rows, spellcheck: "false" });
    area.value = this.values[name] ?? "";
    return area;
  }

  choice(name, options) {
    const chosen = (value) => value === this.values[name];
    const option = ([value, label]) => make("option", { value, selected: chosen(value) }, label);
    return make("select", { name }, options.map(option));
  }

  check(name, label) {
    const box = make("input", { name, type: "checkbox", checked: Boolean(this.values[name]) });
    return make("label", { class: "check" }, box, ` ${label}`);
  }

  take(input) {
    const value = input.type === "checkbox" ? input.checked : input.value;
    if (input.checkValidity()) this.values[input.name] = value;
    settings.write(this.values);
    this.apply();
  }

  apply() {
    document.documentElement.toggleAttribute("data-shade", Boolean(this.values.shade));
    const wrong = [];
    if (this.tools() === undefined) wrong.push("The tools are no JSON list and are not sent.");
    if (this.other() === undefined) wrong.push("The other fields are no JSON object and are not sent.");
    find("json-error").textContent = wrong.join(" ");
  }

  reset() {
    this.values = { probabilities: true };
    settings.write(this.values);
    for (const input of this.form.elements) {
      if (input.type === "checkbox") input.checked = Boolean(this.values[input.name]);
      else if (input.name) input.value = "";
    }
    this.apply();
  }

  tools() {
    return this.json("tools", Array.isArray);
  }

  other() {
    return this.json("other", (value) => typeof value === "object" && value !== null && !Array.isArray(value));
  }

  /** What a text says as JSON: null for an empty one, undefined for what is none or does not fit. */
  json(name, fits) {
    const text = (this.values[name] ?? "").trim();
    if (!text) return null;
    try {
      const value = JSON.parse(text);
      return fits(value) ? value : undefined;
    } catch {
      return undefined;
    }
  }

  /** The fields of a chat request beside its messages. */
  fields() {
    const fields = {};
    for (const [name] of NUMBERS) {
      const value = this.values[name];
      if (value !== undefined && value !== "") fields[name] = Number(value);
    }
    const stop = (this.values.stop ?? "").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    if (this.values.thinking) fields.chat_template_kwargs = { enable_thinking: this.values.thinking === "on" };
    if (this.values.probabilities) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    const tools = this.tools();
    if (tools?.length) fields.tools = tools;
    return { ...fields, ...this.other() };
  }

  get system() {
    return (this.values.system ?? "").trim();
  }
}
