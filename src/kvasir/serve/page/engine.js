// The live view of the engine: asks for a snapshot every second while it is looked at, and draws what it says.

import { get, Refused } from "./api.js";
import { drawBlocks, drawLines, drawSteps, FIRST_ROW, isCached, ownerOf, PINNED, rowColour, SHARED } from "./charts.js";
import { make } from "./dom.js";

const EVERY = 1000; // milliseconds between two snapshots
const SPAN = 120; // seconds that the chart of rates shows
const RATE_OVER = 3; // seconds over which a rate is taken

export class EngineView {
  /** needKey: called when the server asks for a key. */
  constructor(root, needKey) {
    this.needKey = needKey;
    this.timer = null;
    this.watched = false;
    this.past = []; // snapshots of the last seconds
    this.rates = { generated: [], prompt: [] };
    this.steps = [];
    this.build(root);
    document.addEventListener("visibilitychange", () => this.watch(this.watched));
    addEventListener("resize", () => this.watched && this.last && this.draw());
  }

  watch(watched) {
    this.watched = watched;
    clearTimeout(this.timer);
    if (watched && document.visibilityState === "visible") this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    try {
      this.take(await get("/kvasir/live"));
      this.problem.textContent = "";
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.problem.textContent = error.message;
      if (error.status === 401) return this.needKey();
    }
    if (this.watched) this.timer = setTimeout(() => this.ask(), EVERY);
  }

  /** The engine's counters begin again when it is started again. */
  take(live) {
    const before = this.last;
    if (before && (live.now < before.now || live.stats.steps < before.stats.steps)) {
      this.past = [];
      this.steps = [];
      this.rates = { generated: [], prompt: [] };
    }
    this.last = live;
    this.past.push(live);
    while (this.past.length > 2 && this.past[1].now <= live.now - RATE_OVER) this.past.shift();
    const seconds = live.now - this.past[0].now;
    const rate = (name) => (seconds > 0 ? (live.stats[name] - this.past[0].stats[name]) / seconds : 0);
    this.now = { generated: rate("generated_tokens"), prompt: rate("prompt_tokens") };
    for (const name of ["generated", "prompt"]) {
      this.rates[name].push([live.now, this.now[name]]);
      this.rates[name] = this.rates[name].filter(([time]) => time > live.now - SPAN);
    }
    const known = this.steps.at(-1)?.step ?? -1;
    this.steps.push(...live.steps.map(([step, ms, decode, prefill]) => ({ step, ms, decode, prefill })).filter((s) => s.step > known));
    this.steps.splice(0, this.steps.length - 600);
    this.draw();
  }

  // -- what is on the page -----------------------------------------------------------------------------------------

  build(root) {
    this.problem = make("p", { class: "error", role: "alert" });
    this.tiles = make("dl", { class: "tiles" });
    this.lines = make("canvas", { role: "img" });
    this.bars = make("canvas", { role: "img" });
    this.maps = make("div", { class: "maps" });
    this.place = make("p", { class: "small muted place", role: "status" }, "Point at a block to see whose it is.");
    this.body = make("tbody");
    const head = ["Request", "Class", "State", "Prompt", "Cached", "Answer", "Computed", "Age"];
    root.append(
      this.problem,
      this.tiles,
      make("div", { class: "charts" },
        panel("Tokens per second", legend([["decode", "generated"], ["prefill", "prompt"]]), this.lines),
        panel("Steps", legend([["decode", "decode"], ["prefill", "prefill"]]), this.bars)),
      panel("KV memory", legend([["row-sample", "an answer"], ["shared", "several answers"], ["pinned", "pinned"], ["cached", "cached, idle"], ["free", "free"], ["held", "with a dot: in the prefix cache, too"]]), this.maps, this.place),
      panel("Requests", null, make("div", { class: "table", tabindex: 0 }, make("table", { class: "requests" }, make("thead", {}, make("tr", {}, head.map((h) => make("th", { scope: "col" }, h)))), this.body)), (this.more = make("p", { class: "small muted" }))),
    );
  }

  draw() {
    this.drawTiles();
    const { now } = this.last;
    drawLines(this.lines, [{ colour: "prefill", values: this.rates.prompt }, { colour: "decode", values: this.rates.generated }], now, SPAN, "/s");
    this.lines.setAttribute("aria-label", `${this.now.generated.toFixed(0)} generated and ${this.now.prompt.toFixed(0)} prompt tokens per second`);
    drawSteps(this.bars, this.steps);
    const last = this.steps.at(-1);
    this.bars.setAttribute("aria-label", last ? `The last step took ${last.ms.toFixed(1)} ms for ${last.decode} decoded and ${last.prefill} prompt tokens` : "No steps yet");
    this.drawMaps();
    this.drawRequests();
  }

  drawTiles() {
    const { stats, latency } = this.last;
    const tile = (name, value, detail) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value), make("dd", { class: "small muted" }, detail));
    const looked = stats.looked_up_tokens - this.past[0].stats.looked_up_tokens;
    const found = stats.cached_tokens - this.past[0].stats.cached_tokens;
    const now = looked > 0 ? `${part(found, looked)} in the last seconds` : "";
    const pages = [
      tile("Running", String(stats.running), `${stats.waiting} waiting`),
      tile("Generated", `${this.now.generated.toFixed(0)}/s`, `${count(stats.generated_tokens)} tokens in all`),
      tile("Prompts", `${this.now.prompt.toFixed(0)}/s`, `${count(stats.prompt_tokens)} tokens in all`),
      tile("First token", span(latency.ttft.p50), tail(latency.ttft)),
      tile("Next token", span(latency.tpot.p50), tail(latency.tpot)),
      tile("Prefix hits", part(stats.cached_tokens, stats.looked_up_tokens), now || `${count(stats.cached_tokens)} tokens`),
      tile("KV in use", part(stats.blocks_used, stats.blocks_total), `${part(stats.blocks_cached, stats.blocks_total)} cached, idle`),
      tile("Preemptions", count(stats.preemptions), `${count(stats.evicted_blocks)} blocks evicted`),
    ];
    const reads = stats.tier_loaded_tokens;
    if (stats.tier_bytes || reads) pages.push(tile("Tier", `${(stats.tier_bytes / 2 ** 20).toFixed(0)} MiB`, `${count(reads)} tokens read back`));
    this.tiles.replaceChildren(...pages);
  }

  drawMaps() {
    const { groups } = this.last;
    while (this.maps.children.length > groups.length) this.maps.lastChild.remove();
    groups.forEach((group, g) => {
      if (!this.maps.children[g]) {
        const canvas = make("canvas", { role: "img", class: "map" });
        canvas.addEventListener("pointermove", (event) => this.point(g, event));
        this.maps.append(make("figure", {}, make("figcaption", { class: "small muted" }), canvas));
      }
      const [caption, canvas] = this.maps.children[g].children;
      const cells = unpack(group.cells);
      const each = group.per_cell > 1 ? `, ${group.per_cell} in a cell` : "";
      const kind = group.window ? `${group.kind} of ${group.window} tokens` : group.kind;
      caption.textContent = `${kind}: ${count(group.total)} blocks of ${this.last.stats.block_size} tokens${each}`;
      canvas.grid = { cells, ...drawBlocks(canvas, cells) };
      const idle = cells.filter((c) => c === 1).length;
      const free = cells.filter((c) => c === 0).length;
      const of = (n) => part(n, cells.length);
      canvas.setAttribute("aria-label", `Map of blocks: ${of(cells.length - idle - free)} in use, ${of(idle)} cached and idle, ${of(free)} free`);
    });
  }

  point(g, event) {
    const { cells, columns, size } = event.currentTarget.grid;
    const i = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    if (!columns || cells[i] === undefined) return;
    const { per_cell: each } = this.last.groups[g];
    const owner = ownerOf(cells[i]);
    const cached = isCached(cells[i]);
    const answer = owner >= FIRST_ROW && this.last.answers.find((a) => a.row === owner - FIRST_ROW);
    const whose = owner >= FIRST_ROW ? `row ${owner - FIRST_ROW}${answer ? ` (${name(answer)})` : ""}` : owner === SHARED ? "several answers" : owner === PINNED ? "pinned" : cached ? "idle" : "free";
    const which = each > 1 ? `Blocks ${1 + i * each} to ${(i + 1) * each}` : `Block ${1 + i}`;
    this.place.textContent = `${which}: ${whose}${cached ? ", in the prefix cache" : ""}`;
  }

  drawRequests() {
    const { answers, stats } = this.last;
    this.body.replaceChildren(...answers.map((answer) => {
      const mark = make("span", { class: "mark" });
      if (answer.row >= 0) mark.style.background = rowColour(answer.row);
      const bar = make("progress", { max: Math.max(1, answer.known), value: answer.computed, "aria-label": `${answer.computed} of ${answer.known} tokens computed` });
      const values = [[mark, name(answer)], answer.class, answer.row >= 0 ? `row ${answer.row}` : answer.preemptions ? "waiting again" : "waiting", answer.prompt, answer.cached, answer.known - answer.prompt, bar, span(answer.age)];
      return make("tr", {}, values.map((value) => make("td", {}, ...[value].flat().map((v) => (v instanceof Node ? v : String(v))))));
    }));
    if (!answers.length) this.body.append(make("tr", {}, make("td", { colspan: 8, class: "muted" }, "Nothing runs and nothing waits.")));
    const hidden = stats.running + stats.waiting - answers.length;
    this.more.textContent = hidden > 0 ? `${hidden} more are not shown.` : "";
  }
}

const panel = (title, ...children) => make("section", { class: "panel" }, make("h2", {}, title), ...children);

function legend(entries) {
  return make("ul", { class: "legend" }, entries.map(([kind, label]) => make("li", {}, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), label)));
}

/** Run lengths `[cell, count, cell, count ...]` to cells. */
function unpack(runs) {
  const cells = [];
  for (let i = 0; i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k++) cells.push(runs[i]);
  return cells;
}

const name = (answer) => `${answer.id || "another key's"}${answer.index ? ` #${answer.index}` : ""}`;
const count = (n) => n.toLocaleString("en");
const part = (n, all) => (all ? `${((100 * n) / all).toFixed(n && n < all / 100 ? 1 : 0)} %` : "–");
const tail = (latency) => (latency.count ? `p95 ${span(latency.p95)}, p99 ${span(latency.p99)}` : "nothing measured yet");

function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
}
