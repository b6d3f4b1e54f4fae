// The selected model. Requests to a server with only one model do not name it.

import { get, Refused } from "./api.js";
import { find, make } from "./dom.js";
import { settings } from "./store.js";

const LOOK = 1000; // milliseconds between checks of a model that is being loaded

export class Models {
  constructor() {
    this.name = null; // null: the only one
    this.names = [];
    this.info = {}; // about the selected model, if it is loaded
    this.select = find("models");
    this.select.addEventListener("change", () => this.choose(this.select.value).catch(ignoreRefused));
  }

  /** Requests the list of models. Throws Refused. */
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

  /** Requests the list and the facts again, since models are added, removed and loaded. Throws Refused. */
  async refresh() {
    try {
      this.info = await get(`/kvasir/info${this.query}`);
      if (this.info.models.join("\n") !== this.names.join("\n")) await this.load();
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.load(); // the selected model was removed
    }
  }

  /** Reports that the selected model is being loaded, until it is loaded or the signal aborts. */
  async whileLoading(signal, report) {
    const { name } = this;
    while (this.several && name !== null && !signal.aborted) {
      const info = await get(`/kvasir/info${this.query}`).catch(ignoreRefused);
      if (signal.aborted || !info || info.model !== undefined || name !== this.name) return;
      report(`${name} is being loaded …`);
      await new Promise((resolve) => setTimeout(resolve, LOOK));
    }
  }

  /** The names of models with engines of their own. */
  get engines() {
    return this.names.filter((name) => !this.info.adapters?.includes(name));
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
    find("prompt").placeholder = chats ? "Write a message" : "This is an embedding model; it does not chat";
    this.changed?.();
  }

  /** The query string of requests about the selected model. */
  get query() {
    return this.name === null ? "" : `?model=${encodeURIComponent(this.name)}`;
  }

  /** The fields of a request that select the model. */
  get fields() {
    return this.name === null ? {} : { model: this.name };
  }
}

/** Ignores a failure here, since a later request reports it. */
function ignoreRefused(error) {
  if (!(error instanceof Refused)) throw error;
}
