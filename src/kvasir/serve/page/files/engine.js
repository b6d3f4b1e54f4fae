// The live view of the engine: requests a snapshot every second while it is visible, and draws it.

import { get, Refused } from "./api.js";
import { drawBlocks, drawLines, drawSteps, FIRST_ROW, isCached, ownerOf, PINNED, rowColour, SHARED } from "./charts.js";
import { make } from "./dom.js";
import { FleetView } from "./fleet.js";
import { Loaded } from "./loaded.js";
import { count, drawTiles, part, rate, span } from "./tiles.js";

const EVERY = 1000; // milliseconds between two snapshots
const SPAN = 120; // seconds shown by the chart of rates
const RATE_OVER = 3; // seconds over which a rate is averaged
const COLUMNS = ["Request", "Class", "State", "Prompt", "Cached", "Answer", "Computed", "Age"];
const BLOCKS = [
  ["row-sample", "one answer"],
  ["shared", "several answers"],
  ["pinned", "pinned"],
  ["cached", "cached, idle"],
  ["free", "free"],
  ["held", "dot: also in the prefix cache"],
];

export class EngineView {
  /** models: states which model to show. needKey: called when the server requires a key; resolves to whether one was
   *  entered. */
  constructor(root, models, needKey) {
    this.models = models;
    this.needKey = needKey;
    this.watched = false;
    this.following = false;
    this.past = []; // snapshots of the last seconds
    this.rates = { generated: [], prompt: [] };
    this.steps = [];
    this.build(root);
    document.addEventListener("visibilitychange", () => this.watch(this.watched));
    addEventListener("resize", () => this.watched && this.last && this.draw());
  }

  watch(watched) {
    this.watched = watched;
    if (watched && !this.following) this.follow();
  }

  async follow() {
    this.following = true;
    while (this.watched && document.visibilityState === "visible" && (await this.ask())) {
      await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
    this.following = false;
  }

  /** Requests a snapshot and draws it; resolves to whether to continue. */
  async ask() {
    let { query } = this.models;
    try {
      if (this.models.several) await Promise.all([this.models.refresh(), this.loaded.ask()]);
      query = this.models.query;
      this.replicas.hidden = !this.models.info.has_replicas;
      if (!this.replicas.hidden) await this.fleet.ask(query);
      this.take(await get(`/kvasir/live${query}`), query);
      this.problem.textContent = "";
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.problem.textContent = error.words;
      this.shown.classList.add("stale");
      this.shown.hidden = query !== this.seen;
      if (error.status === 401) return this.needKey();
    }
    this.panel.hidden = this.models.engines.length === 1;
    return true;
  }

  /** Drops the history if the engine was restarted or another model is shown, since the counters are other ones. */
  take(live, query) {
    const { last } = this;
    if (last && (query !== this.seen || live.now < last.now || live.stats.steps < last.stats.steps)) {
      this.past = [];
      this.steps = [];
      this.rates = { generated: [], prompt: [] };
    }
    this.seen = query;
    this.last = live;
    this.past.push(live);
    while (this.past.length > 2 && this.past[1].now <= live.now - RATE_OVER) this.past.shift();
    const [before] = this.past;
    this.now = { generated: rate("generated_tokens", live, before), prompt: rate("prompt_tokens", live, before) };
    for (const name of ["generated", "prompt"]) {
      this.rates[name].push([live.now, this.now[name]]);
      this.rates[name] = this.rates[name].filter(([time]) => time > live.now - SPAN);
    }
    const known = this.steps.at(-1)?.step ?? -1;
    const steps = live.steps.map(([step, ms, decode, prefill]) => ({ step, ms, decode, prefill }));
    this.steps.push(...steps.filter((s) => s.step > known));
    this.steps.splice(0, this.steps.length - 600);
    this.shown.hidden = false;
    this.shown.classList.remove("stale");
    this.draw();
  }

  // -- drawing -----------------------------------------------------------------------------------------------------

  build(root) {
    this.problem = make("p", { class: "error", role: "alert" });
    this.facts = make("p", { class: "small muted" });
    this.loaded = new Loaded(this.models);
    this.panel = panel("Models", this.loaded.root);
    this.panel.hidden = true;
    this.fleet = new FleetView();
    this.replicas = panel("Replicas", this.fleet.root);
    this.replicas.hidden = true;
    this.tiles = make("dl", { class: "tiles" });
    this.lines = make("canvas", { role: "img" });
    this.bars = make("canvas", { role: "img" });
    this.maps = make("div", { class: "maps" });
    const how = "Hover over a block, or use the arrow keys, to see what it holds.";
    this.place = make("p", { class: "small muted place", role: "status" }, how);
    this.body = make("tbody");
    this.more = make("p", { class: "small muted" });
    const head = make("tr", {}, COLUMNS.map((column) => make("th", { scope: "col" }, column)));
    const requests = make("table", { class: "requests" }, make("thead", {}, head), this.body);
    const rates = panel("Tokens per second", legend([["decode", "generated"], ["prefill", "prompt"]]), this.lines);
    const steps = panel("Steps", legend([["decode", "decode"], ["prefill", "prefill"]]), this.bars);
    this.shown = make(
      "div",
      { hidden: true },
      this.facts,
      this.tiles,
      make("div", { class: "charts" }, rates, steps),
      panel("KV memory", legend(BLOCKS), this.maps, this.place),
      panel("Requests", make("div", { class: "table", tabindex: 0 }, requests), this.more),
    );
    root.append(this.panel, this.problem, this.replicas, this.shown);
  }

  draw() {
    const { info } = this.models;
    const facts = [info.model, `context of ${count(info.max_model_len ?? 0)} tokens`, info.executor, info.grade];
    this.facts.textContent = info.model ? facts.join(" · ") : "";
    this.tiles.replaceChildren(...drawTiles(info.tiles ?? {}, this.last, this.past[0]));
    const { now } = this.last;
    const rates = [
      { colour: "prefill", values: this.rates.prompt },
      { colour: "decode", values: this.rates.generated },
    ];
    drawLines(this.lines, rates, now, SPAN, "/s");
    const [generated, prompt] = [this.now.generated.toFixed(0), this.now.prompt.toFixed(0)];
    this.lines.setAttribute("aria-label", `${generated} generated and ${prompt} prompt tokens per second`);
    drawSteps(this.bars, this.steps);
    const last = this.steps.at(-1);
    const took = last && `${last.ms.toFixed(1)} ms for ${last.decode} decoded and ${last.prefill} prompt tokens`;
    this.bars.setAttribute("aria-label", took ? `The last step took ${took}` : "No steps yet");
    this.drawMaps();
    this.drawRequests();
  }

  drawMaps() {
    const { groups } = this.last;
    while (this.maps.children.length > groups.length) this.maps.lastChild.remove();
    groups.forEach((group, g) => {
      if (!this.maps.children[g]) {
        const canvas = make("canvas", { role: "img", class: "map", tabindex: 0 });
        canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
          const { columns, size } = canvas.grid;
          const column = Math.floor(offsetX / size);
          if (column < columns) this.point(g, Math.floor(offsetY / size) * columns + column);
        });
        canvas.addEventListener("keydown", (event) => {
          const { cells, columns, at = -1 } = canvas.grid;
          const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
          if (!move) return;
          event.preventDefault();
          const next = at < 0 ? 0 : at + move;
          if (next in cells) this.point(g, next);
        });
        for (const left of ["pointerleave", "blur"]) canvas.addEventListener(left, () => this.point(g, -1));
        this.maps.append(make("figure", {}, make("figcaption", { class: "small muted" }), canvas));
      }
      const [caption, canvas] = this.maps.children[g].children;
      const cells = unpack(group.cells);
      const each = group.per_cell > 1 ? `, ${group.per_cell} in a cell` : "";
      const kind = group.bound ? `${group.kind} of ${group.bound} tokens` : group.kind;
      caption.textContent = `${kind}: ${count(group.total)} blocks of ${this.last.stats.block_size} tokens${each}`;
      const { at } = canvas.grid ?? {};
      canvas.grid = { cells, at, ...drawBlocks(canvas, cells, at) };
      const of = (kept) => part(cells.filter(kept).length, cells.length);
      const [held, idle, free] = [of((c) => c > 1), of((c) => c === 1), of((c) => c === 0)];
      canvas.setAttribute("aria-label", `Map of blocks: ${held} in use, ${idle} cached and idle, ${free} free`);
    });
  }

  /** Marks and describes a cell of a group's map; -1: none. */
  point(g, i) {
    const { grid } = this.maps.children[g].lastChild;
    const { cells, at } = grid;
    if (i === at || i >= cells.length) return;
    grid.at = i;
    this.drawMaps();
    if (i < 0) return;
    const { per_cell: each } = this.last.groups[g];
    const which = each > 1 ? `Blocks ${1 + i * each} to ${(i + 1) * each}` : `Block ${1 + i}`;
    const cached = isCached(cells[i]) ? ", in the prefix cache" : "";
    this.place.textContent = `${which}: ${this.ownerText(cells[i])}${cached}`;
  }

  ownerText(cell) {
    const owner = ownerOf(cell);
    if (owner === PINNED) return "pinned";
    if (owner === SHARED) return "several answers";
    if (owner < FIRST_ROW) return isCached(cell) ? "idle" : "free";
    const row = owner - FIRST_ROW;
    const answer = this.last.answers.find((a) => a.row === row);
    return answer ? `row ${row} (${name(answer)})` : `row ${row}`;
  }

  drawRequests() {
    const { answers, stats } = this.last;
    this.body.replaceChildren(...answers.map(requestRow));
    if (!answers.length) {
      const nothing = make("td", { colspan: COLUMNS.length, class: "muted" }, "No requests are running or waiting.");
      this.body.append(make("tr", {}, nothing));
    }
    const hidden = stats.running + stats.waiting - answers.length;
    this.more.textContent = hidden > 0 ? `${hidden} more are not shown.` : "";
  }
}

function requestRow(answer) {
  const mark = make("span", { class: "mark" });
  if (answer.row >= 0) mark.style.background = rowColour(answer.row);
  const progress = `${answer.computed} of ${answer.known} tokens computed`;
  const bar = make("progress", { max: Math.max(1, answer.known), value: answer.computed, "aria-label": progress });
  const waits = answer.preemptions ? "waiting, preempted" : "waiting";
  const cells = [
    [mark, name(answer)],
    [answer.class],
    [answer.row >= 0 ? `row ${answer.row}` : waits],
    [String(answer.prompt)],
    [String(answer.cached)],
    [String(answer.known - answer.prompt)],
    [bar],
    [span(answer.age)],
  ];
  return make("tr", {}, cells.map((cell) => make("td", {}, cell)));
}

const panel = (title, ...children) => make("section", { class: "panel" }, make("h2", {}, title), ...children);

function legend(entries) {
  const swatch = (kind) => make("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  return make("ul", { class: "legend" }, entries.map(([kind, label]) => make("li", {}, swatch(kind), label)));
}

/** Expands run lengths `[cell, count, cell, count ...]` to cells. */
function unpack(runs) {
  const cells = [];
  for (let i = 0; i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k++) cells.push(runs[i]);
  return cells;
}

const name = (answer) => `${answer.id || "another key's"}${answer.index ? ` #${answer.index}` : ""}`;
