// The replicas of the model, one row each. GET /fleet has their state and their counters.

import { get } from "./api.js";
import { announce, make } from "./dom.js";
import { count, part } from "./tiles.js";

const OVER = 3000; // milliseconds over which a rate is averaged
const TEXTS = 2; // columns of texts, before those of numbers
const COLUMNS = [
  ["Replica"],
  ["State"],
  ["Running", "choices in its batch"],
  ["Waiting", "choices in its queue"],
  ["Tokens/s", "generated, over three seconds"],
  ["KV in use", "blocks of requests, of all"],
  ["Cached", "blocks of prefixes that no request uses, of all"],
  ["Backlog", "predicted seconds until it has computed the prompts that it has"],
  ["Hits predicted", "prompt tokens that the router expected in its prefix cache"],
  ["Hits found", "prompt tokens that were in its prefix cache"],
  ["Restarts", "and the requests that were there"],
];

export class FleetView {
  constructor() {
    this.model = ""; // the one shown
    this.past = []; // [time, replicas] of the last seconds
    this.states = new Map(); // of each replica, as last shown
    this.body = make("tbody");
    this.wanted = make("p", { class: "small muted", role: "status" });
    const head = make("tr", {}, COLUMNS.map(([name, title], i) => make("th", { scope: "col", title, ...side(i) }, name)));
    const table = make("table", { class: "requests" }, make("thead", {}, head), this.body);
    this.root = make("div", { class: "fleet" }, make("div", { class: "table", tabindex: 0 }, table), this.wanted);
  }

  /** Requests the replicas of a model and draws them. query: names it, as for all requests about it. Throws Refused. */
  async ask(query) {
    const { model, replicas, scaling } = await get(`/fleet${query}`);
    if (model !== this.model) [this.model, this.past, this.states] = [model, [], new Map()];
    const now = performance.now();
    this.past.push([now, new Map(replicas.map((replica) => [replica.index, replica]))]);
    while (this.past.length > 2 && this.past[1][0] <= now - OVER) this.past.shift();
    for (const replica of replicas) this.tell(replica);
    this.body.replaceChildren(...replicas.map((replica) => this.row(replica, now)));
    const { target, least, most } = scaling ?? {};
    this.wanted.textContent = scaling ? `The load asks for ${target} replicas (${least} to ${most}).` : "";
  }

  /** Tells screen readers of replicas whose state has changed. */
  tell({ index, status }) {
    const before = this.states.get(index);
    this.states.set(index, status);
    if (before && before !== status) announce(`Replica ${index} is ${status}.`);
  }

  row(replica, now) {
    const { index, status, reason, role, running, waiting, backlog, restarts, lost } = replica;
    const state = make("div", { class: status === "ready" ? "" : "error" }, status);
    if (reason) state.append(make("div", { class: "why" }, reason));
    const cells = [
      role ? `${index} (${role})` : `${index}`,
      state,
      count(running),
      count(waiting),
      this.pace(replica, now),
      part(replica.blocks_used, replica.blocks_total),
      part(replica.blocks_cached, replica.blocks_total),
      `${backlog.toFixed(2)} s`,
      count(replica.predicted),
      count(replica.hit),
      lost ? `${restarts} (${count(lost)} ${lost === 1 ? "request" : "requests"})` : `${restarts}`,
    ];
    return make("tr", {}, cells.map((cell, i) => make("td", side(i), cell)));
  }

  pace({ index, generated_tokens: tokens }, now) {
    const [time, replicas] = this.past[0];
    const before = replicas.get(index);
    if (!before || now <= time || tokens < before.generated_tokens) return "–";
    return count(Math.round((1000 * (tokens - before.generated_tokens)) / (now - time)));
  }
}

const side = (column) => (column < TEXTS ? {} : { class: "end" });
