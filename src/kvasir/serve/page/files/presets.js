// Named sets of settings: two that are always there, and those that the user saves.

import { find, make } from "./dom.js";
import { presets } from "./store.js";

const OWN = { "Model defaults": {}, "Always the likeliest token": { temperature: "0" } };

export class Presets {
  /** now: returns the settings; apply: replaces them. */
  constructor(now, apply) {
    this.apply = apply;
    this.select = make("select", { "aria-label": "Preset", onchange: () => this.choose() });
    this.name = make("input", { type: "text", maxlength: 40, placeholder: "New preset" });
    this.name.setAttribute("aria-label", "Name of a new preset");
    this.remove = make("button", { type: "button", onclick: () => this.delete() }, "Delete");
    const save = make("button", { type: "button", onclick: () => this.save(now()) }, "Save");
    this.root = make(
      "fieldset",
      { class: "presets" },
      make("legend", {}, "Presets"),
      make("div", { class: "pair" }, this.select, this.remove),
      make("div", { class: "pair" }, this.name, save),
    );
    this.draw("");
  }

  draw(chosen) {
    const names = [...Object.keys(OWN), ...Object.keys(presets.read())];
    const option = (value, label = value) => make("option", { value, selected: value === chosen }, label);
    this.select.replaceChildren(option("", "Choose one"), ...names.map((name) => option(name)));
    this.remove.disabled = !chosen || Object.hasOwn(OWN, chosen);
  }

  choose() {
    const name = this.select.value;
    const values = Object.hasOwn(OWN, name) ? OWN[name] : presets.read()[name];
    if (values) this.apply(values);
    this.remove.disabled = !name || Object.hasOwn(OWN, name);
  }

  save(values) {
    const name = this.name.value.trim();
    if (!name || Object.hasOwn(OWN, name)) return this.name.focus();
    presets.write(name, values);
    this.name.value = "";
    this.draw(name);
    find("status").textContent = `The preset ${name} is saved.`;
  }

  delete() {
    presets.remove(this.select.value);
    this.draw("");
  }
}
