// The settings panel: the fields that are added to each request. Empty fields are not sent: the model's default holds.

import { find, make } from "./dom.js";
import { FIELDS } from "./fields.js";
import { Presets } from "./presets.js";
import { settings } from "./store.js";

const DISPLAY = ["theme", "probabilities", "shade", "drafts"]; // no part of a preset
const THEMES = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
const MODES = [["", "as the model expects"], ["chat", "chat"], ["completion", "text completion"]];

function field(label, input, hint) {
  const small = hint ? make("small", { class: "muted" }, hint) : null;
  return make("label", { class: "field" }, make("span", {}, label), input, small);
}

export class Options {
  constructor() {
    this.kept = { probabilities: true, ...settings.read() }; // later, the form holds them
    this.form = find("settings-form");
    this.presets = new Presets(() => this.values(), (values) => this.use(values));
    this.form.append(
      make("p", { id: "settings-error", class: "error", role: "alert" }),
      field("Theme", this.choice("theme", THEMES)),
      this.presets.root,
      field("Mode", this.choice("mode", MODES), "Text completion continues a text, without a chat template."),
      field("System message", this.area("system", 3)),
      ...FIELDS.map(({ label, hint, ...input }) => field(label, this.number(input), hint)),
      field("Stop strings", this.area("stop", 2), "One per line."),
      field("Thinking", this.choice("thinking", [["", "model default"], ["on", "on"], ["off", "off"]])),
      field("Tools", this.area("tools", 3), "A JSON list in the format of the API."),
      field("Other fields", this.area("other", 2), "A JSON object. Its fields are added to the request."),
      this.check("probabilities", "Show token probabilities"),
      this.check("shade", "Underline unlikely tokens"),
      this.check("drafts", "Mark drafted tokens"),
      make("button", { type: "button", onclick: () => this.reset() }, "Reset to defaults"),
    );
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.take(event.target));
    this.apply();
  }

  number(input) {
    const kind = { type: "number", inputmode: "decimal", placeholder: "default" };
    return make("input", { value: this.kept[input.name], ...kind, ...input });
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
    if (!input.name) return;
    settings.write(input.name, input.type === "checkbox" ? input.checked : input.value);
    this.apply();
  }

  /** The settings of requests, without empty ones. */
  values() {
    const inputs = [...this.form.elements].filter(({ name, value }) => name && value && !DISPLAY.includes(name));
    return Object.fromEntries(inputs.map(({ name, value }) => [name, value]));
  }

  /** Replaces the settings of requests. */
  use(values) {
    for (const input of this.form.elements) {
      if (!input.name || DISPLAY.includes(input.name)) continue;
      input.value = typeof values[input.name] === "string" ? values[input.name] : "";
      settings.write(input.name, input.value);
    }
    this.apply();
  }

  apply() {
    showTheme();
    this.changed?.();
    for (const name of ["shade", "drafts"])
      document.documentElement.toggleAttribute(`data-${name}`, this.form.elements[name].checked);
    this.form.elements.tools.setCustomValidity(this.tools() === undefined ? "This is not a JSON list." : "");
    this.form.elements.other.setCustomValidity(this.other() === undefined ? "This is not a JSON object." : "");
    const wrong = [...this.form.elements].filter((input) => !input.validity.valid);
    const words = (input) => `${input.labels[0].firstChild.textContent}: ${input.validationMessage}`;
    find("settings-error").textContent = wrong.map(words).join(" ");
  }

  /** Whether all settings are valid; if not, opens the panel at the first that is not. */
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
    this.presets.draw("");
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

  /** Parses a field as JSON: null if it is empty, undefined if it is not JSON or does not fit. */
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

  /** The fields of a chat request, except its messages. */
  fields() {
    const fields = {};
    for (const { name } of FIELDS) if (this.text(name) !== "") fields[name] = Number(this.text(name));
    const stop = this.text("stop").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    const thinking = this.text("thinking");
    if (thinking) fields.chat_template_kwargs = { enable_thinking: thinking === "on" };
    if (this.form.elements.probabilities.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    const tools = this.tools();
    if (tools?.length) fields.tools = tools;
    return { ...fields, ...this.other() };
  }

  /** "chat", "completion", or "" for what the model expects. */
  get mode() {
    return this.text("mode");
  }

  get system() {
    return this.text("system").trim();
  }
}
