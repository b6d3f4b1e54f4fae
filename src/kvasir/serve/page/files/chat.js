// The open conversation: its messages, and the stream that produces the next one.

import { Refused, stream } from "./api.js";
import { Attachments } from "./attachments.js";
import { Conversations } from "./conversations.js";
import { announce, find, make } from "./dom.js";
import { End } from "./end.js";
import { MessageView } from "./message.js";
import { chats, loadChat, newChat, saveChat } from "./store.js";
import { TokenMap } from "./tokens.js";
import { welcome } from "./welcome.js";
import { requestOf, take, time } from "./wire.js";

const TOO_LONG = "context_length_exceeded"; // an error code
const LEAVING = 1000; // milliseconds; a stream that fails so soon after the page was left failed because of that

export class Chat {
  /** needKey: asks the user for a key; resolves to whether one was entered. */
  constructor(options, models, needKey) {
    this.options = options;
    this.models = models;
    this.needKey = needKey;
    this.chat = chats()[0] ?? newChat();
    this.maps = new WeakMap(); // message -> its TokenMap, for answers received since the page was loaded
    this.abort = null; // AbortController of the answer in progress
    this.edited = null; // the message that the next one will replace
    this.prompt = find("prompt");
    this.end = new End(find("messages"));
    this.attachments = new Attachments((text) => this.notice(text));
    this.conversations = new Conversations(this);
    for (const source of [options, models]) source.changed = () => this.welcome();
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.prompt.addEventListener("input", () => this.fit());
    find("stop").addEventListener("click", () => this.stop());
    find("edit-cancel").addEventListener("click", () => this.edit(null));
    // A partial answer is saved when the page is left or hidden, since a hidden page may be discarded.
    this.left = -LEAVING;
    for (const leaves of ["beforeunload", "pagehide"]) addEventListener(leaves, () => (this.left = performance.now()));
    for (const leaves of ["pagehide", "visibilitychange"]) {
      addEventListener(leaves, () => this.abort && document.visibilityState === "hidden" && saveChat(this.chat));
    }
    this.show();
  }

  /** Handles Esc; returns whether there was something to cancel. */
  escape() {
    if (this.abort) this.stop();
    else if (this.edited) this.edit(null);
    else return false;
    return true;
  }

  open(chat) {
    this.stop();
    this.edit(null);
    this.chat = chat;
    this.show();
    document.body.removeAttribute("data-sidebar");
    find("menu").setAttribute("aria-expanded", "false");
    this.prompt.focus();
  }

  changed() {
    const stored = loadChat(this.chat.id);
    if (stored && !this.abort && stored.version !== this.chat.version) {
      this.editing(null);
      this.chat = stored;
      this.show();
    } else this.conversations.draw();
  }

  save(chat = this.chat) {
    if (saveChat(chat)) this.notice("Another tab has changed this conversation. Your version is saved separately.");
    this.conversations.draw();
  }

  // -- the messages ------------------------------------------------------------------------------------------------

  show() {
    const box = find("messages");
    box.replaceChildren(...this.chat.messages.map((message) => this.view(message).root));
    this.welcome();
    this.end.go();
    this.conversations.draw();
  }

  /** Whether texts are continued, without a chat template. */
  get isCompletion() {
    const { mode } = this.options;
    return mode ? mode === "completion" : this.models.info.has_template === false;
  }

  /** Shows what the model is, in an empty conversation. */
  welcome() {
    if (this.chat.messages.length) return;
    const box = find("messages");
    box.querySelector(".welcome")?.remove();
    box.prepend(welcome(this.models.info, this.isCompletion, (text) => this.write(text)));
  }

  view(message) {
    return new MessageView(message, this, this.maps.get(message));
  }

  add(message) {
    find("messages").querySelector(".welcome")?.remove();
    const view = this.view(message);
    find("messages").append(view.root);
    this.end.go();
    return view;
  }

  notice(text) {
    find("messages").append(make("p", { class: "notice", role: "alert" }, text));
    this.end.go();
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, 240)}px`;
  }

  write(text) {
    this.prompt.value = text;
    this.fit();
    this.prompt.focus();
  }

  send() {
    const text = this.isCompletion ? this.prompt.value : this.prompt.value.trim();
    if (!(text.trim() || this.attachments.files.length) || this.abort || !this.options.complete()) return;
    if (this.edited) this.goBack(this.edited);
    this.editing(null);
    this.write("");
    const files = this.attachments.take();
    this.post({ role: "user", content: text, ...(files.length ? { files } : {}) });
    this.generate();
  }

  post(message) {
    this.chat.messages.push(message);
    this.chat.title ||= (message.content.trim() || message.files[0].name).split("\n")[0].slice(0, 60);
    this.add(message);
    this.save();
  }

  /** Replaces an answer with a new one, and keeps the old one as an alternative. Later messages are removed. */
  regenerate(message) {
    if (this.abort || !this.options.complete()) return;
    const { messages } = this.chat;
    const later = messages.length - 1 - messages.indexOf(message);
    const removed = later === 1 ? "the message" : `the ${later} messages`;
    if (later && !confirm(`Regenerating this answer removes ${removed} after it.`)) return;
    this.goBack(message);
    const { before = [], after = [], error, content } = message;
    Object.assign(message, { before: undefined, after: undefined });
    this.generate([...before, ...(error && !content ? [] : [message]), ...after]);
  }

  /** Shows the previous (by: -1) or the next (by: 1) alternative of an answer. */
  turn(message, by) {
    const { before = [], after = [] } = message;
    const shown = by < 0 ? before.at(-1) : after[0];
    if (this.abort || !shown) return;
    const ways = by < 0 ? [before.slice(0, -1), [message, ...after]] : [[...before, message], after.slice(1)];
    Object.assign(message, { before: undefined, after: undefined });
    Object.assign(shown, { before: ways[0], after: ways[1] });
    const { messages } = this.chat;
    messages[messages.indexOf(message)] = shown;
    this.save();
    this.show();
  }

  /** Puts a message into the composer; sending it replaces the message and all later ones. Null cancels that. */
  edit(message) {
    if (message ? this.abort : !this.edited) return;
    this.editing(message);
    this.attachments.set(message?.files);
    this.write(message?.content ?? "");
  }

  editing(message) {
    this.edited = message;
    find("editing").hidden = message === null;
  }

  goBack(message) {
    this.chat.messages.length = this.chat.messages.indexOf(message);
    this.show();
  }

  /** Sends the results of an answer's tool calls. */
  answer(message, results) {
    if (this.abort || !this.options.complete()) return;
    message.answered = true;
    message.calls.forEach((call, i) => {
      this.chat.messages.push({ role: "tool", tool_call_id: call.id, content: results[i] });
    });
    this.show();
    this.save();
    this.generate();
  }

  // -- the stream --------------------------------------------------------------------------------------------------

  stop() {
    this.abort?.abort();
  }

  /** Requests the next message and streams it to its end. before: its earlier alternatives. */
  async generate(before = []) {
    const { chat } = this;
    const fields = {
      ...this.models.fields,
      ...this.options.fields(),
      stream: true,
      stream_options: { include_usage: true },
      timings_per_token: true,
      n: 1,
    };
    const [path, body] = requestOf(this.isCompletion, this.options.system, chat.messages, fields);
    const message = { role: "assistant", content: "", ...(before.length ? { before } : {}) };
    const map = body.logprobs ? new TokenMap() : undefined;
    if (map) this.maps.set(message, map);
    chat.messages.push(message);
    const view = this.add(message);
    this.abort = new AbortController();
    this.busy(true);
    this.models.whileLoading(this.abort.signal, (text) => this.draw(view, text));
    try {
      for await (const chunk of stream(path, body, this.abort.signal)) {
        if (chunk.usage) message.usage = chunk.usage;
        if (chunk.timings) time(message, chunk.timings);
        if (body.model) message.model = chunk.model;
        for (const choice of chunk.choices) {
          take(message, choice, map);
          this.follow(view);
        }
      }
      message.finish ??= "stop";
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else if (performance.now() - this.left < LEAVING) message.finish = "left";
      else message.error = error instanceof Refused ? error.words : `This page has a bug: ${error.message}`;
      if (error.code === TOO_LONG) message.tooLong = true;
      if (error.status === 404) this.models.refresh().catch(() => {}); // the message shows the error already
      if (error.status === 401) queueMicrotask(() => this.retryWithKey(message));
    }
    this.abort.abort();
    this.abort = null;
    this.busy(false);
    this.draw(view);
    this.save(chat);
    announce(message.error ?? "The answer is complete.");
  }

  async retryWithKey(message) {
    if ((await this.needKey()) && this.chat.messages.includes(message)) this.regenerate(message);
  }

  busy(busy) {
    find("send").hidden = busy;
    find("stop").hidden = !busy;
    if (!busy && document.activeElement === document.body) this.prompt.focus();
  }

  /** waiting: the status of a message that has no text yet. */
  draw(view, waiting = "") {
    view.draw(waiting);
    this.end.keep();
  }

  /** Schedules a redraw of a growing answer at the next frame, or later if drawing is slow. */
  follow(view) {
    if (view.due) return;
    view.due = true;
    setTimeout(() => {
      requestAnimationFrame((begun) => {
        this.draw(view);
        view.cost = performance.now() - begun;
        view.due = false;
      });
    }, 3 * view.cost);
  }
}
