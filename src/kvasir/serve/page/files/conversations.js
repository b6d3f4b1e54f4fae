// The sidebar: the list of conversations, and the warning about those that could not be saved.

import { download, find, make } from "./dom.js";
import { chats, hasUnsaved, isChat, isUnsaved, loadChat, newChat, removeChat } from "./store.js";

export class Conversations {
  /** actions: `open(chat)`; `changed()`, for when another tab has changed a conversation; `chat`, the open one. */
  constructor(actions) {
    this.actions = actions;
    find("new").addEventListener("click", () => actions.open(newChat()));
    this.search = find("search");
    this.search.addEventListener("input", () => this.draw());
    find("download").addEventListener("click", () => this.download());
    addEventListener("storage", (event) => isChat(event.key) && actions.changed());
    addEventListener("beforeunload", (event) => hasUnsaved() && event.preventDefault());
  }

  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = chats().filter((chat) => !wanted || texts(chat).some((text) => text.toLowerCase().includes(wanted)));
    find("conversations").replaceChildren(...found.map((chat) => this.entry(chat)));
    find("nothing").hidden = !wanted || found.length > 0;
    find("unsaved").hidden = !hasUnsaved();
    find("download").hidden = !this.actions.chat.messages.length;
  }

  entry(chat) {
    const title = chat.title || "Conversation";
    const current = chat.id === this.actions.chat.id ? "true" : null;
    const open = () => this.actions.open(loadChat(chat.id) ?? newChat());
    const remove = { class: "icon small", "aria-label": `Delete ${title}`, title: "Delete" };
    const rename = { class: "icon small", "aria-label": `Rename ${title}`, title: "Rename" };
    const name = make("bdi", {}, title);
    const mark = isUnsaved(chat) ? make("span", { class: "error" }, " not saved") : null;
    return make(
      "li",
      {},
      make("button", { type: "button", class: "entry", title, "aria-current": current, onclick: open }, name, mark),
      make("button", { type: "button", ...rename, onclick: (event) => this.rename(chat, event.currentTarget) }, pencil()),
      make("button", { type: "button", ...remove, onclick: () => this.remove(chat) }, "×"),
    );
  }

  /** Puts an input in place of the title. Enter or leaving it saves, Esc cancels. */
  rename(chat, { parentElement: row }) {
    const input = make("input", { type: "text", class: "name", maxlength: 200, "aria-label": "New name" });
    input.value = chat.title;
    input.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      if (event.key === "Escape") input.value = chat.title;
      input.blur();
    });
    input.addEventListener("blur", () => this.named(chat.id, input.value.trim()), { once: true });
    row.replaceChildren(input);
    input.select();
  }

  named(id, title) {
    const { chat: open } = this.actions;
    const chat = id === open.id ? open : loadChat(id);
    if (chat && title && title !== chat.title) {
      chat.title = title;
      this.actions.save(chat);
    } else this.draw();
  }

  remove(chat) {
    if (!confirm(`Delete “${chat.title || "Conversation"}”?`)) return;
    removeChat(chat.id);
    if (chat.id === this.actions.chat.id) this.actions.open(chats()[0] ?? newChat());
    else this.draw();
  }

  /** Downloads the open conversation. */
  download() {
    const { title, messages } = this.actions.chat;
    download("conversation.json", "application/json", JSON.stringify({ title, messages }, null, 2));
  }
}

function pencil() {
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS(drawing.namespaceURI, "path");
  drawing.setAttribute("viewBox", "0 0 16 16");
  drawing.setAttribute("aria-hidden", "true");
  path.setAttribute("d", "M2.5 13.5l.8-3.2 7.6-7.6 2.4 2.4-7.6 7.6zM9.4 4.2l2.4 2.4");
  drawing.append(path);
  return drawing;
}

/** What a search looks at. */
const texts = ({ title, messages }) => [title, ...messages.map((message) => message.content)];
