// One message on the page: its text, redrawn as it grows, and its buttons.

import { copyButton, make } from "./dom.js";
import { blocks } from "./markdown.js";
import { followTokens, plainLeaf } from "./tokens.js";

const ENDS = {
  length: "Cut off: the answer reached its maximum length.",
  stopped: "Stopped.",
  left: "Incomplete: the page was left while the answer was being written.",
  tooLong:
    "It does not fit into the model's context, so this turn is left out of the conversation. Edit the message, or" +
    " send a shorter one. If the conversation has become too long, start a new one.",
  abort: "The server ended this answer.",
  timeout: "The answer took too long, so the server ended it.",
};

/** A message: `{role, content, reasoning, calls, finish, error, tooLong, usage, first, rate, seed, model}`, and the
 *  alternatives of an answer, `before` and `after`. first: seconds to the first token. rate: tokens per second then. */
export class MessageView {
  /** actions: `regenerate(message)`, `turn(message, by)`, `edit(message)`, `answer(message, results)`. map: the
   *  TokenMap of an answer received since the page was loaded. */
  constructor(message, actions, map = null) {
    this.message = message;
    this.actions = actions;
    this.map = map;
    this.drawn = []; // the blocks on the page: {source, node}
    this.due = false; // whether a redraw is scheduled
    this.cost = 0; // milliseconds of the last redraw
    const name = { user: "You", assistant: "Answer", tool: "Tool result" }[message.role];
    this.body = make("div", { class: "body" });
    this.foot = make("div", { class: "foot" });
    this.root = make("article", { class: `message ${message.role}`, "aria-label": name }, this.body, this.foot);
    if (message.role === "assistant") this.prepare();
    else this.body.append(make("p", { class: "plain" }, message.content), ...(message.files ?? []).map(attached));
    if (message.role === "user") {
      const edit = make("button", { type: "button", class: "quiet", onclick: () => actions.edit(message) }, "Edit");
      this.foot.append(copyButton(() => message.content), edit);
    }
    if (map) followTokens(this.focusable(), map.tokens);
  }

  focusable() {
    this.body.tabIndex = 0;
    this.body.setAttribute("aria-description", "The arrow keys move through the tokens and show their probabilities.");
    return this.body;
  }

  prepare() {
    this.thoughts = make("div", { class: "thoughts" });
    const summary = make("summary", { onclick: () => (this.touched = true) }, "Thinking");
    this.thinking = make("details", { class: "thinking", hidden: true }, summary, this.thoughts);
    this.text = make("div", { class: "markdown" });
    this.calls = make("div", { class: "calls" });
    this.notes = make("div", { class: "notes" });
    this.body.append(this.thinking, this.text, this.calls, this.notes);
    this.draw();
  }

  /** waiting: the status to show while there is no answer. */
  draw(waiting = "") {
    const { message } = this;
    if (message.reasoning) {
      this.thinking.hidden = false;
      if (!this.touched) this.thinking.open = !message.content && !message.finish && !message.error;
      const leaf = this.map?.leaf("reasoning") ?? plainLeaf;
      this.thoughts.replaceChildren(...leaf(message.reasoning, [...Array(message.reasoning.length).keys()]));
    }
    this.drawText();
    this.drawCalls();
    this.drawNotes(waiting);
  }

  /** Redraws the blocks that have changed. */
  drawText() {
    const leaf = this.map?.leaf("content") ?? plainLeaf;
    const found = blocks(this.message.content ?? "");
    found.forEach((block, i) => {
      const old = this.drawn[i];
      if (old?.source === block.source && i < found.length - 1) return;
      const node = block.render(leaf);
      if (old) old.node.replaceWith(node);
      else this.text.append(node);
      this.drawn[i] = { source: block.source, node };
    });
    for (const lost of this.drawn.splice(found.length)) lost.node.remove();
  }

  drawCalls() {
    const { calls } = this.message;
    if (!calls?.length) return;
    this.calls.replaceChildren(...calls.map(callFigure));
    if (!this.message.finish || this.message.answered) return;
    const areas = calls.map(({ function: { name } }) =>
      make("textarea", { rows: 2, "aria-label": `Result of ${name}`, placeholder: `What ${name} returns` }),
    );
    const send = () => this.actions.answer(this.message, areas.map((area) => area.value));
    const label = calls.length > 1 ? "Send the results" : "Send the result";
    this.calls.append(...areas, make("button", { type: "button", onclick: send }, label));
  }

  drawNotes(waiting = "") {
    const { message } = this;
    const notes = [];
    if (message.error) notes.push(make("p", { class: "error", role: "alert" }, message.error));
    if (waiting) notes.push(make("p", { class: "small muted", role: "status" }, waiting));
    if (message.tooLong) notes.push(make("p", { class: "small muted" }, ENDS.tooLong));
    else if (ENDS[message.finish]) notes.push(make("p", { class: "small muted" }, ENDS[message.finish]));
    this.notes.replaceChildren(...notes);
    this.root.classList.toggle("growing", !message.finish && !message.error && !waiting);
    this.root.setAttribute("aria-busy", String(!message.finish && !message.error));
    if (message.role !== "assistant" || (!message.finish && !message.error)) return;
    const regenerate = () => this.actions.regenerate(message);
    this.foot.replaceChildren(
      copyButton(() => message.content),
      make("button", { type: "button", class: "quiet", onclick: regenerate }, "Regenerate"),
      ...this.ways(),
      ...statistics(message),
    );
  }

  /** Buttons for the alternatives of an answer. */
  ways() {
    const { before = [], after = [] } = this.message;
    if (!before.length && !after.length) return [];
    const turn = (by, sign, label, disabled) => {
      const onclick = () => this.actions.turn(this.message, by);
      return make("button", { type: "button", class: "quiet", "aria-label": label, disabled, onclick }, sign);
    };
    return [
      turn(-1, "‹", "Previous answer", !before.length),
      make("span", { class: "small muted" }, `${before.length + 1} of ${before.length + 1 + after.length}`),
      turn(1, "›", "Next answer", !after.length),
    ];
  }
}

function attached({ name, text }) {
  const summary = make("summary", {}, make("bdi", {}, name));
  return make("details", { class: "file" }, summary, make("pre", { tabindex: 0 }, text));
}

function callFigure(call) {
  const caption = make("figcaption", {}, "Tool call: ", make("code", {}, call.function.name));
  return make("figure", { class: "call" }, caption, make("pre", { tabindex: 0 }, pretty(call.function.arguments)));
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function statistics(message) {
  const found = figures(message);
  return found ? [make("details", { class: "small muted figures" }, make("summary", {}, "Statistics"), found)] : [];
}

function figures(message) {
  const found = [];
  const tokens = message.usage?.completion_tokens;
  if (tokens) found.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (message.first !== undefined) found.push(`first token after ${Math.round(1000 * message.first)} ms`);
  if (message.rate) found.push(`${message.rate.toFixed(1)} tokens/s`);
  const cached = message.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) found.push(`${cached} of ${message.usage.prompt_tokens} prompt tokens cached`);
  const { accepted_prediction_tokens: right = 0, rejected_prediction_tokens: wrong = 0 } =
    message.usage?.completion_tokens_details ?? {};
  if (right + wrong) found.push(`${right} of ${right + wrong} drafts right`);
  if (message.seed !== undefined) found.push(`seed ${message.seed}`);
  if (message.model) found.push(message.model);
  return found.join(" · ");
}
