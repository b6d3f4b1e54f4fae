// Which model is asked. A server of one is asked without a name; of several, the one that is chosen above.

import { get, Refused } from "./api.js";
import { find, make } from "./dom.js";
import { settings } from "./store.js";

const LOOK = 1000; // milliseconds between looks at a model that is being loaded

export class Models {
  constructor() {
    this.name = null; // null: the only one
    this.names = [];
    this.info = {}; // of the one that is chosen, as far as it is loaded
    this.select = find("models");
    this.select.addEventListener("change", () => this.choose(this.select.value).catch(ignoreRefused));
  }

  /** Asks what there is; raises Refused. */
  async load() {
    const info = await get("/kvasir/info");
    this.names = info.models;
    this.select.hidden = !this.several;
    find("model").hidden = this.several;
    this.select.replaceChildren(...this.names.map((name) => make("option", { value: name }, name)));
    const wanted = [this.name, settings.read().model, this.names[0]].find((name) => this.names.includes(name));
    if (wanted) this.select.value = wanted;
    await this.choose(this.several ? (wanted ?? null) : null, wanted);
  }

  /** Asks again, since models come and go, and those that are loaded have more facts; raises Refused. */
  async refresh() {
    try {
      this.info = await get(`/kvasir/info${this.query}`);
      if (this.info.models.join("\n") !== this.names.join("\n")) await this.load();
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.load(); // the one that was chosen is gone
    }
  }

  /** Reports that the chosen model is being loaded, until it is loaded or the signal is aborted. */
  async whileLoading(signal, report) {
    const { name } = this;
    while (this.several && name !== null && !signal.aborted) {
      const info = await get(`/kvasir/info${this.query}`).catch(ignoreRefused);
      if (signal.aborted || !info || info.model !== undefined || name !== this.name) return;
      report(`${name} is being loaded …`);
      await new Promise((resolve) => setTimeout(resolve, LOOK));
    }
  }

  get several() {
    return this.names.length !== 1;
  }

  async choose(name, shown = name) {
    this.name = name;
    if (name) settings.write("model", name);
    find("model").textContent = shown ?? "no model yet";
    document.title = shown ? `${shown} – Kvasir` : "Kvasir";
    this.info = await get(`/kvasir/info${this.query}`);
    const chats = this.info.tasks?.includes("generate") ?? true;
    find("prompt").placeholder = chats ? "Write a message" : "This model makes embeddings; it does not chat";
  }

  /** What a question about the chosen model ends with. */
  get query() {
    return this.name === null ? "" : `?model=${encodeURIComponent(this.name)}`;
  }

  /** The fields of a request for it. */
  get fields() {
    return this.name === null ? {} : { model: this.name };
  }
}

/** What the server refuses here, it refuses again where it matters. */
function ignoreRefused(error) {
  if (!(error instanceof Refused)) throw error;
}
