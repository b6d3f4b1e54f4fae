// The conversation: messages, the stream that makes the next one, and the list of conversations beside it.

import { Refused, stream } from "./api.js";
import { find, make, say } from "./dom.js";
import { MessageView } from "./message.js";
import { chats, isChat, loadChat, newChat, removeChat, saveChat } from "./store.js";
import { TokenMap } from "./tokens.js";

export class Chat {
  /** needKey: asks the user for a key; resolves to whether there is a new one. */
  constructor(options, models, needKey) {
    this.options = options;
    this.models = models;
    this.needKey = needKey;
    this.chat = chats()[0] ?? newChat();
    this.maps = new WeakMap(); // message -> the tokens of an answer of this visit
    this.abort = null; // of the answer that is being written
    this.prompt = find("prompt");
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
    find("new").addEventListener("click", () => this.open(newChat()));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.abort && !find("key-dialog").open) this.stop();
    });
    addEventListener("storage", (event) => isChat(event.key) && this.changedElsewhere());
    this.show();
  }

  // -- the list ----------------------------------------------------------------------------------------------------

  open(chat) {
    this.stop();
    this.chat = chat;
    this.show();
    document.body.removeAttribute("data-sidebar");
    find("menu").setAttribute("aria-expanded", "false");
    this.prompt.focus();
  }

  list() {
    const known = chats();
    find("conversations").replaceChildren(...known.map((chat) => this.entry(chat)));
  }

  entry(chat) {
    const title = chat.title || "Conversation";
    const current = chat.id === this.chat.id ? "true" : null;
    const open = () => this.open(loadChat(chat.id) ?? newChat());
    const remove = { class: "icon small", "aria-label": `Delete ${title}`, title: "Delete" };
    return make(
      "li",
      {},
      make("button", { type: "button", class: "entry", title, "aria-current": current, onclick: open }, title),
      make("button", { type: "button", ...remove, onclick: () => this.remove(chat) }, "✕"),
    );
  }

  remove(chat) {
    if (!confirm(`Delete “${chat.title || "Conversation"}”?`)) return;
    removeChat(chat.id);
    if (chat.id === this.chat.id) this.open(chats()[0] ?? newChat());
    else this.list();
  }

  changedElsewhere() {
    const stored = loadChat(this.chat.id);
    if (stored && !this.abort) {
      this.chat = stored;
      this.show();
    } else this.list();
  }

  save() {
    if (!saveChat(this.chat)) {
      this.notice("This browser has no room left. Delete other conversations, or this one is lost with the page.");
    }
    this.list();
  }

  // -- the messages ------------------------------------------------------------------------------------------------

  show() {
    this.views = [];
    find("messages").replaceChildren();
    for (const message of this.chat.messages) this.add(message);
    if (!this.chat.messages.length) find("messages").append(make("p", { class: "welcome muted" }, "Ask something."));
    this.list();
  }

  add(message) {
    find("messages").querySelector(".welcome")?.remove();
    const view = new MessageView(message, this, this.maps.get(message));
    this.views.push(view);
    find("messages").append(view.root);
    view.root.scrollIntoView({ block: "end" });
    return view;
  }

  notice(text) {
    const note = make("p", { class: "notice", role: "alert" }, text);
    find("messages").append(note);
    note.scrollIntoView({ block: "end" });
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, 240)}px`;
  }

  send() {
    const text = this.prompt.value.trim();
    if (!text || this.abort) return;
    this.prompt.value = "";
    this.fit();
    this.say({ role: "user", content: text });
    this.generate();
  }

  say(message) {
    this.chat.messages.push(message);
    this.chat.title ||= message.content.split("\n")[0].slice(0, 60);
    this.add(message);
    this.save();
  }

  /** The answer, and whatever came after it, is replaced by a new one. */
  regenerate(view) {
    if (this.abort) return;
    this.goBack(view);
    this.generate();
  }

  /** The message goes back to where it was written; what came after it is gone. */
  edit(view) {
    if (this.abort) return;
    this.goBack(view);
    this.prompt.value = view.message.content;
    this.fit();
    this.prompt.focus();
  }

  goBack(view) {
    this.chat.messages.length = this.chat.messages.indexOf(view.message);
    this.save();
    this.show();
  }

  /** The tools that an answer called gave these results. */
  answer(view, results) {
    if (this.abort) return;
    view.message.answered = true;
    view.draw();
    view.message.calls.forEach((call, i) => this.say({ role: "tool", tool_call_id: call.id, content: results[i] }));
    this.generate();
  }

  // -- the stream --------------------------------------------------------------------------------------------------

  stop() {
    this.abort?.abort();
  }

  /** Asks for the next message and follows it to its end. */
  async generate() {
    const chat = this.chat;
    const body = {
      ...this.models.fields,
      ...this.options.fields(),
      messages: wireMessages(this.options.system, chat.messages),
      stream: true,
      stream_options: { include_usage: true },
      n: 1,
    };
    const message = { role: "assistant", content: "" };
    if (body.logprobs) this.maps.set(message, new TokenMap());
    chat.messages.push(message);
    const view = this.add(message);
    this.abort = new AbortController();
    this.busy(true);
    const begun = performance.now();
    const seconds = () => (performance.now() - begun) / 1000;
    try {
      for await (const chunk of stream("/v1/chat/completions", body, this.abort.signal)) {
        if (chunk.usage) message.usage = chunk.usage;
        for (const choice of chunk.choices) {
          if (take(message, choice, this.maps.get(message))) message.first ??= seconds();
          follow(view);
        }
      }
      message.finish ??= "stop";
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = error instanceof Refused ? error.message : `This page failed: ${error.message}`;
      if (error.status === 401) queueMicrotask(() => this.retryWithKey(view));
    }
    message.seconds = seconds();
    this.abort = null;
    this.busy(false);
    view.draw();
    if (chat === this.chat) this.save();
    else saveChat(chat);
    say(message.error ?? "The answer is complete.");
  }

  async retryWithKey(view) {
    if (await this.needKey("")) this.regenerate(view);
  }

  busy(busy) {
    find("send").hidden = busy;
    find("stop").hidden = !busy;
    if (!busy && document.activeElement === document.body) this.prompt.focus();
  }
}

/** Takes a choice of a chunk into the message; true when it brought some of the answer. */
function take(message, choice, map) {
  const { delta } = choice;
  if (choice.logprobs?.content && map) map.addTokens(choice.logprobs.content);
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) {
    message.reasoning = (message.reasoning ?? "") + reasoning;
    map?.addText("reasoning", reasoning);
  }
  if (delta.content) {
    message.content += delta.content;
    map?.addText("content", delta.content);
  }
  for (const call of delta.tool_calls ?? []) {
    message.calls ??= [];
    const known = (message.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= call.id ?? "";
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (choice.seed !== undefined) message.seed = choice.seed;
  return Boolean(reasoning || delta.content || delta.tool_calls);
}

/** Keeps the end of a growing answer in sight, unless the reader has scrolled away from it. */
function follow(view) {
  const box = find("messages");
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  view.grow();
  if (near) requestAnimationFrame(() => (box.scrollTop = box.scrollHeight));
}

/** The messages as the API takes them. What failed is left out; thoughts are the template's to keep or to drop. */
function wireMessages(system, messages) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const m of messages) {
    if (m.error && !m.content) continue;
    const message = { role: m.role, content: m.content };
    if (m.tool_call_id) message.tool_call_id = m.tool_call_id;
    if (m.reasoning) message.reasoning_content = m.reasoning;
    if (m.calls?.length) message.tool_calls = m.calls;
    found.push(message);
  }
  return found;
}
