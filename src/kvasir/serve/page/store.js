// What the browser keeps: the key, the settings, and each conversation under a name of its own, so that two tabs with
// different conversations never overwrite each other.

const CHAT = "kvasir.chat.";
const SETTINGS = "kvasir.settings";
const KEY = "kvasir.key";

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

/** False when the browser has no room left for it. */
function write(storage, name, text) {
  try {
    storage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

/** The API key: for this tab, or, when asked to and where there is room, until it is forgotten. */
export const key = {
  get value() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  },
  get kept() {
    return localStorage.getItem(KEY) !== null;
  },
  set(value, keep) {
    this.forget();
    if (!keep || !write(localStorage, KEY, value)) write(sessionStorage, KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

export const settings = {
  read: () => read(localStorage, SETTINGS) ?? {},
  write: (values) => write(localStorage, SETTINGS, JSON.stringify(values)),
};

export const isChat = (name) => name === null || name.startsWith(CHAT);

export function newChat() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", updated: Date.now(), messages: [] };
}

/** All conversations that can be read, the last changed first. */
export function chats() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    if (!name.startsWith(CHAT)) continue;
    const chat = read(localStorage, name);
    if (chat && Array.isArray(chat.messages)) found.push(chat);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export const loadChat = (id) => read(localStorage, CHAT + id);

/** False when the browser has no room left for it. */
export function saveChat(chat) {
  chat.updated = Date.now();
  return write(localStorage, CHAT + chat.id, JSON.stringify(chat));
}

export const removeChat = (id) => localStorage.removeItem(CHAT + id);
