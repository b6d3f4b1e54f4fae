// Which model is asked. A server of one is asked without a name; of several, the one that is chosen above.

import { get, Refused } from "./api.js";
import { find, make } from "./dom.js";

/** What the server refuses here, it refuses again where it matters. */
function ignoreRefused(error) {
  if (!(error instanceof Refused)) throw error;
}

export class Models {
  constructor() {
    this.name = null; // null: the only one
    this.select = find("models");
    this.select.addEventListener("change", () => this.choose(this.select.value).catch(ignoreRefused));
  }

  /** Asks what there is; raises Refused. */
  async load() {
    const { models } = await get("/kvasir/info");
    const several = models.length !== 1;
    this.select.hidden = !several;
    find("model").hidden = several;
    this.select.replaceChildren(...models.map((name) => make("option", { value: name }, name)));
    if (several) this.select.value = models.includes(this.name) ? this.name : (models[0] ?? "");
    await this.choose(several ? this.select.value || null : null, models[0]);
  }

  async choose(name, shown = name) {
    this.name = name;
    find("model").textContent = shown ?? "no model yet";
    document.title = shown ? `${shown} – Kvasir` : "Kvasir";
    const { tasks } = await get(`/kvasir/info${this.query}`);
    const chats = !tasks || tasks.includes("generate");
    find("prompt").placeholder = chats ? "Write a message" : "This model makes embeddings; it does not chat";
  }

  /** What a question about the chosen model ends with. */
  get query() {
    return this.name === null ? "" : `?model=${encodeURIComponent(this.name)}`;
  }

  /** What a request for it says. */
  get fields() {
    return this.name === null ? {} : { model: this.name };
  }
}
