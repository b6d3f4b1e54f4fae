// The settings panel: how answers are sampled, and what is asked beside them.

import { find, make } from "./dom.js";
import { settings } from "./store.js";

// Numbers go to the server under their own names; what is left empty is not sent, and the model's default holds.
// The bounds are the API's; a seed beyond Number.MAX_SAFE_INTEGER goes among the other fields.
const MOST = 2 ** 31 - 1;
const SAFE = Number.MAX_SAFE_INTEGER;
export const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 100, step: "any" }, "0 always takes the best token"],
  ["top_p", "Top p", { min: 1e-6, max: 1, step: "any" }, "only the likeliest that make up this part"],
  ["top_k", "Top k", { min: -1, max: MOST, step: 1 }, "only so many of the likeliest; 0 for all"],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }, "only those this likely beside the best"],
  ["repetition_penalty", "Repetition penalty", { min: 1e-6, max: 10, step: "any" }, "1 for none"],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }, "0 for none"],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }, "0 for none"],
  ["max_tokens", "Longest answer", { min: 1, max: MOST, step: 1 }, "in tokens"],
  ["seed", "Seed", { min: -SAFE, max: SAFE, step: 1 }, "the same one gives the same answer"],
];

function field(label, input, hint) {
  const small = hint ? make("small", { class: "muted" }, hint) : null;
  return make("label", { class: "field" }, make("span", {}, label), input, small);
}

export class Options {
  constructor() {
    this.kept = { probabilities: true, ...settings.read() }; // from then on the form has them
    this.form = find("settings-form");
    this.form.append(
      make("p", { id: "settings-error", class: "error", role: "alert" }),
      field("System message", this.area("system", 3)),
      ...NUMBERS.map(([name, label, limits, hint]) => field(label, this.number(name, limits), hint)),
      field("Stop at", this.area("stop", 2), "one text a line"),
      field("Thinking", this.choice("thinking", [["", "as the model does"], ["on", "on"], ["off", "off"]])),
      field("Tools", this.area("tools", 3), "a JSON list, as the API takes it"),
      field("Other fields", this.area("other", 2), "a JSON object, sent along as it is"),
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
    return make("input", { name, value: this.kept[name], ...kind, ...limits });
  }

  area(name, rows) {
    const area = make("textarea", { name, rows, spellcheck: "false" });
    area.value = this.kept[name] ?? "";
    return area;
  }

  choice(name, options) {
    const chosen = (value) => value === this.kept[name];
    const option = ([value, label]) => make("option", { value, selected: chosen(value) }, label);
    return make("select", { name }, options.map(option));
  }

  check(name, label) {
    const box = make("input", { name, type: "checkbox", checked: Boolean(this.kept[name]) });
    return make("label", { class: "check" }, box, ` ${label}`);
  }

  take(input) {
    settings.write(input.name, input.type === "checkbox" ? input.checked : input.value);
    this.apply();
  }

  apply() {
    document.documentElement.toggleAttribute("data-shade", this.form.elements.shade.checked);
    this.form.elements.tools.setCustomValidity(this.tools() === undefined ? "This is no JSON list." : "");
    this.form.elements.other.setCustomValidity(this.other() === undefined ? "This is no JSON object." : "");
    const wrong = [...this.form.elements].filter((input) => !input.validity.valid);
    const words = (input) => `${input.labels[0].firstChild.textContent}: ${input.validationMessage}`;
    find("settings-error").textContent = wrong.map(words).join(" ");
  }

  /** Whether a request can be made of them; else they are shown where they are wrong. */
  complete() {
    const wrong = [...this.form.elements].find((input) => !input.validity.valid);
    if (!wrong) return true;
    this.show(true);
    wrong.focus();
    return false;
  }

  show(open) {
    find("settings").hidden = !open;
    find("options").setAttribute("aria-expanded", String(open));
  }

  reset() {
    settings.clear();
    for (const input of this.form.elements) {
      if (input.type === "checkbox") input.checked = input.name === "probabilities";
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

  /** The value of a text as JSON: null for an empty one, undefined for what is none or does not fit. */
  json(name, fits) {
    const text = this.text(name).trim();
    if (!text) return null;
    try {
      const value = JSON.parse(text);
      return fits(value) ? value : undefined;
    } catch {
      return undefined;
    }
  }

  text(name) {
    return this.form.elements[name].value;
  }

  /** The fields of a chat request beside its messages. */
  fields() {
    const fields = {};
    for (const [name] of NUMBERS) if (this.text(name) !== "") fields[name] = Number(this.text(name));
    const stop = this.text("stop").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    const thinking = this.text("thinking");
    if (thinking) fields.chat_template_kwargs = { enable_thinking: thinking === "on" };
    if (this.form.elements.probabilities.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    const tools = this.tools();
    if (tools?.length) fields.tools = tools;
    return { ...fields, ...this.other() };
  }

  get system() {
    return this.text("system").trim();
  }
}
