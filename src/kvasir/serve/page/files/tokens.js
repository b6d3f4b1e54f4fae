// The tokens behind the characters of an answer, and the card that shows a token's alternatives.

import { find, make } from "./dom.js";

/** Collects the text and the tokens of a stream, and for each character of the text the number of its token. */
export class TokenMap {
  constructor() {
    this.tokens = []; // {text, logprob, drafted, top: [{text, logprob}]}
    this.owners = new Map(); // kind -> the token of each character
    this.pending = []; // pieces of text, in order, without a token yet
    this.bytes = [];
    this.group = 0; // the token of the first of these bytes
    this.ready = []; // [token, its text], in order, without a place in the text yet
  }

  /** kind: "content" or "reasoning"; each counts its own positions. */
  addText(kind, text) {
    if (!this.owners.has(kind)) this.owners.set(kind, []);
    const last = this.pending.at(-1);
    if (last?.kind === kind) last.text += text;
    else this.pending.push({ kind, text });
    this.claim();
  }

  addTokens(entries) {
    for (const entry of entries) {
      if (!this.bytes.length) this.group = this.tokens.length;
      this.tokens.push({
        text: entry.token,
        logprob: entry.logprob,
        drafted: entry.drafted === true, // whether a drafter had proposed it
        top: entry.top_logprobs.map((t) => ({ text: t.token, logprob: t.logprob })),
      });
      this.bytes.push(...(entry.bytes ?? new TextEncoder().encode(entry.token)));
      const text = decode(this.bytes);
      if (text !== null) {
        this.ready.push([this.group, text]);
        this.bytes = [];
      }
    }
    this.claim();
  }

  /** Assigns text to the tokens that produced it. A token that is not in the text (as an end of turn) is skipped. */
  claim() {
    while (this.ready.length && this.pending.length) {
      const [number, text] = this.ready[0];
      const piece = this.pending[0];
      const taken = piece.text.startsWith(text) ? text.length : text.startsWith(piece.text) ? piece.text.length : 0;
      const owners = this.owners.get(piece.kind);
      for (let i = 0; i < taken; i++) owners.push(number);
      piece.text = piece.text.slice(taken);
      if (!piece.text) this.pending.shift();
      if (taken && taken < text.length) this.ready[0] = [number, text.slice(taken)];
      else this.ready.shift();
    }
  }

  /** A `leaf` for markdown.js that wraps the characters of each token; undefined if no tokens are known. */
  leaf(kind) {
    const owners = this.owners.get(kind);
    if (!this.tokens.length || !owners) return undefined;
    return (text, positions) => {
      const nodes = [];
      let begin = 0;
      for (let i = 1; i <= text.length; i++) {
        if (i < text.length && owners[positions[i]] === owners[positions[begin]]) continue;
        const number = owners[positions[begin]];
        const part = text.slice(begin, i);
        nodes.push(number === undefined ? part : this.span(number, part));
        begin = i;
      }
      return nodes;
    };
  }

  span(number, text) {
    const { logprob, drafted } = this.tokens[number];
    const p = Math.exp(logprob);
    const shade = p < 0.2 ? " t-low" : p < 0.5 ? " t-mid" : p < 0.8 ? " t-high" : "";
    return make("span", { class: `t${shade}${drafted ? " t-drafted" : ""}`, "data-t": number }, text);
  }
}

/** Decodes bytes; null while they may be an incomplete character, whose tokens then count as one. */
function decode(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return bytes.length < 4 ? null : new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
  }
}

/** A `leaf` for plain text. */
export const plainLeaf = (text) => [text];

const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100 %" : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
};

const SIGNS = { "\n": "⏎", "\t": "⇥", " ": "·" };
const visible = (text) => text.replace(/[\n\t ]/g, (c) => SIGNS[c]) || "(empty)";

function cardRow({ text, logprob }, chosen) {
  const bar = make("span", { class: "bar-fill" });
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  return make(
    "div",
    { class: chosen ? "card-row chosen" : "card-row" },
    make("code", {}, visible(text)),
    make("span", { class: "bar-back" }, bar),
    make("span", {}, percent(logprob)),
  );
}

/** Shows the card of a token next to one of its elements. */
export function showToken(token, element) {
  const card = find("token-card");
  const rows = token.top.some((t) => t.text === token.text) ? token.top : [...token.top, token];
  const note = token.drafted ? [make("div", { class: "card-note" }, "Drafted, and checked in one step with others.")] : [];
  card.replaceChildren(...rows.map((row) => cardRow(row, row.text === token.text)), ...note);
  card.hidden = false;
  const box = element.getBoundingClientRect();
  const size = card.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8));
  const above = box.top - size.height - 6;
  card.style.left = `${left}px`;
  card.style.top = `${above >= 8 ? above : box.bottom + 6}px`;
}

export function hideToken() {
  find("token-card").hidden = true;
}

/** Shows the card of the token under the pointer, or chosen with the arrow keys while the element has the focus. */
export function followTokens(element, tokens) {
  let current = -1;
  const mark = (number, part) => {
    element.querySelectorAll(".t.now").forEach((e) => e.classList.remove("now"));
    current = number;
    part.classList.add("now");
    showToken(tokens[number], part);
  };
  const leave = () => {
    current = -1;
    element.querySelectorAll(".t.now").forEach((e) => e.classList.remove("now"));
    hideToken();
  };
  const over = (event) => {
    const part = event.target.closest?.("[data-t]");
    if (part) mark(Number(part.dataset.t), part);
    else leave();
  };
  element.addEventListener("pointerover", over);
  element.addEventListener("click", over);
  element.addEventListener("pointerleave", leave);
  element.addEventListener("blur", leave);
  element.addEventListener("keydown", (event) => {
    if (event.target !== element) return;
    if (event.key === "Escape") return leave();
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const numbers = [...element.querySelectorAll("[data-t]")].map((e) => Number(e.dataset.t));
    const next = move > 0 ? numbers.find((n) => n > current) : numbers.findLast((n) => n < current);
    if (next === undefined) return;
    const part = element.querySelector(`[data-t="${next}"]`);
    part.scrollIntoView({ block: "nearest" });
    mark(next, part);
  });
}
