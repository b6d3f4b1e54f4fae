// The replicas of the model, one row each. GET /fleet has their state and their counters.

import { get } from "./api.js";
import { make } from "./dom.js";
import { count, part } from "./tiles.js";

const OVER = 3000; // milliseconds over which a rate is averaged
const COLUMNS = [
  ["Replica"],
  ["State"],
  ["Role"],
  ["Running", "choices in its batch"],
  ["Waiting", "choices in its queue"],
  ["Backlog", "predicted seconds until it has computed the prompts that it has"],
  ["KV in use", "blocks of requests, of all"],
  ["Cached", "blocks of prefixes that no request uses, of all"],
  ["Hits predicted", "prompt tokens that the router expected in its prefix cache"],
  ["Hits found", "prompt tokens that were in its prefix cache"],
  ["Tokens/s", "generated, over three seconds"],
  ["Restarts"],
];

export class FleetView {
  constructor() {
    this.past = []; // [time, replicas] of the last seconds
    this.body = make("tbody");
    this.wanted = make("p", { class: "small muted", role: "status" });
    const head = make("tr", {}, COLUMNS.map(([name, title]) => make("th", { scope: "col", title }, name)));
    const table = make("table", { class: "requests" }, make("thead", {}, head), this.body);
    this.root = make("div", { class: "fleet" }, make("div", { class: "table", tabindex: 0 }, table), this.wanted);
  }

  /** Requests the replicas and draws them. Throws Refused. */
  async ask() {
    const { replicas, scaling } = await get("/fleet");
    const now = performance.now();
    this.past.push([now, new Map(replicas.map((replica) => [replica.index, replica]))]);
    while (this.past.length > 2 && this.past[1][0] <= now - OVER) this.past.shift();
    this.body.replaceChildren(...replicas.map((replica) => this.row(replica, now)));
    const { target, least, most } = scaling ?? {};
    this.wanted.textContent = scaling ? `The load asks for ${target} replicas (${least} to ${most}).` : "";
  }

  row(replica, now) {
    const { index, status, reason, role, running, waiting, backlog, restarts, lost } = replica;
    const state = make("span", { class: status === "ready" ? "" : "error" }, reason ? `${status}: ${reason}` : status);
    const cells = [
      `${index}`,
      state,
      role || "both",
      count(running),
      count(waiting),
      `${backlog.toFixed(2)} s`,
      part(replica.blocks_used, replica.blocks_total),
      part(replica.blocks_cached, replica.blocks_total),
      count(replica.predicted),
      count(replica.hit),
      this.pace(replica, now),
      lost ? `${restarts} (${count(lost)} requests were there)` : `${restarts}`,
    ];
    return make("tr", {}, cells.map((cell) => make("td", {}, cell)));
  }

  pace({ index, generated_tokens: tokens }, now) {
    const [time, replicas] = this.past[0];
    const before = replicas.get(index);
    if (!before || now <= time || tokens < before.generated_tokens) return "–";
    return `${Math.round((1000 * (tokens - before.generated_tokens)) / (now - time))}`;
  }
}
