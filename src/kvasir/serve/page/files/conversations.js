// The sidebar: the list of conversations, and the warning about those that could not be saved.

import { download, find, make } from "./dom.js";
import { chats, hasUnsaved, isChat, isUnsaved, loadChat, newChat, removeChat } from "./store.js";

export class Conversations {
  /** actions: `open(chat)`; `changed()`, for when another tab has changed a conversation; `chat`, the open one. */
  constructor(actions) {
    this.actions = actions;
    find("new").addEventListener("click", () => actions.open(newChat()));
    find("download").addEventListener("click", () => this.download());
    addEventListener("storage", (event) => isChat(event.key) && actions.changed());
    addEventListener("beforeunload", (event) => hasUnsaved() && event.preventDefault());
  }

  draw() {
    find("conversations").replaceChildren(...chats().map((chat) => this.entry(chat)));
    find("unsaved").hidden = !hasUnsaved();
    find("download").hidden = !this.actions.chat.messages.length;
  }

  entry(chat) {
    const title = chat.title || "Conversation";
    const current = chat.id === this.actions.chat.id ? "true" : null;
    const open = () => this.actions.open(loadChat(chat.id) ?? newChat());
    const remove = { class: "icon small", "aria-label": `Delete ${title}`, title: "Delete" };
    const name = make("bdi", {}, title);
    const mark = isUnsaved(chat) ? make("span", { class: "error" }, " not saved") : null;
    return make(
      "li",
      {},
      make("button", { type: "button", class: "entry", title, "aria-current": current, onclick: open }, name, mark),
      make("button", { type: "button", ...remove, onclick: () => this.remove(chat) }, "×"),
    );
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
