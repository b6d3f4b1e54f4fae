// The models of a server with several: which are loaded, and buttons to load and unload them.

import { get, post, Refused } from "./api.js";
import { make } from "./dom.js";

const NEVER = "9999"; // the year of a model without an expiry: it is in use, or kept loaded
const CANNOT = "Unloading needs a key with the scope 'management'; without keys, a connection from this machine.";

export class Loaded {
  constructor(models) {
    this.models = models;
    this.busy = new Set(); // names of models that are being loaded or unloaded
    this.body = make("tbody");
    this.problem = make("p", { class: "error", role: "alert" });
    const head = make("tr", {}, ["Model", "", "State"].map((column) => make("th", { scope: "col" }, column)));
    const table = make("table", { class: "requests" }, make("thead", {}, head), this.body);
    this.root = make("div", {}, make("div", { class: "table", tabindex: 0 }, table), this.problem);
  }

  /** Requests the loaded models and draws the list. Throws Refused. */
  async ask() {
    const { models } = await get("/api/ps");
    this.draw(new Map(models.map((model) => [model.name, model])));
  }

  draw(loaded) {
    const states = this.models.engines.map((name) => [name, loaded.get(name), this.busy.has(name)]);
    const text = JSON.stringify([states, this.models.info.manages]);
    if (text === this.drawn) return; // keeps a button in place that is about to be clicked
    this.drawn = text;
    this.body.replaceChildren(...states.map((state) => this.row(...state)));
  }

  row(name, model, isBusy) {
    const label = model ? "Unload" : "Load";
    const isForbidden = Boolean(model) && !this.models.info.manages;
    const act = () => this.act(name, model ? { keep_alive: 0 } : {});
    const about = { class: "small", "aria-label": `${label} ${name}`, disabled: isBusy || isForbidden };
    const button = make("button", { type: "button", ...about, onclick: act }, label);
    if (isForbidden) button.title = CANNOT;
    const doing = model ? "unloading …" : "loading …";
    const state = isBusy ? doing : model ? `loaded: ${details(model)}` : "not loaded";
    return make("tr", {}, [name, button, state].map((cell) => make("td", {}, cell)));
  }

  /** keep_alive 0 unloads; a request without a prompt loads. */
  async act(name, fields) {
    this.problem.textContent = "";
    this.busy.add(name);
    try {
      await Promise.all([post("/api/generate", { model: name, stream: false, ...fields }), this.ask()]);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.problem.textContent = error.words;
    }
    this.busy.delete(name);
    await this.ask().catch(() => {}); // the next snapshot reports it
  }
}

function details({ size, expires_at: expires }) {
  const until = new Date(expires).toLocaleTimeString([], { timeStyle: "medium" });
  return `${(size / 2 ** 20).toFixed(1)} MiB, ${expires.startsWith(NEVER) ? "in use, or kept loaded" : `until ${until}`}`;
}
