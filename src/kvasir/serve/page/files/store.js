// What the browser stores: the key, the settings, and each conversation under its own name. What it cannot store stays
// in memory until the page is closed.

const CHAT = "kvasir.chat.";
const SETTINGS = "kvasir.settings";
const PRESETS = "kvasir.presets";
const KEY = "kvasir.key";
const ROLES = ["user", "assistant", "tool"];

/** Null if the browser's settings forbid it. */
function storage(name) {
  try {
    return globalThis[name];
  } catch {
    return null;
  }
}

const local = storage("localStorage");
const session = storage("sessionStorage");

function read(name) {
  try {
    return JSON.parse(local.getItem(name));
  } catch {
    return null;
  }
}

/** Returns false if there is no room for it. */
function write(store, name, text) {
  try {
    store.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

let secret = null; // the key, if it cannot be stored

/** The API key: stored for this tab, or permanently if the user wants that and there is room. */
export const key = {
  get value() {
    return secret ?? session?.getItem(KEY) ?? local?.getItem(KEY) ?? "";
  },
  get kept() {
    return Boolean(local?.getItem(KEY));
  },
  set(value, keep) {
    this.forget();
    if (!(keep && write(local, KEY, value)) && !write(session, KEY, value)) secret = value;
  },
  forget() {
    secret = null;
    session?.removeItem(KEY);
    local?.removeItem(KEY);
  },
};

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Written one value at a time, since another tab may have changed the others. */
export const settings = {
  read() {
    const values = read(SETTINGS);
    return isObject(values) ? values : {};
  },
  write(name, value) {
    write(local, SETTINGS, JSON.stringify({ ...this.read(), [name]: value }));
  },
  clear: () => local?.removeItem(SETTINGS),
};

/** Named sets of settings. */
export const presets = {
  read() {
    const named = read(PRESETS);
    return isObject(named) ? Object.fromEntries(Object.entries(named).filter(([, values]) => isObject(values))) : {};
  },
  write(name, values) {
    write(local, PRESETS, JSON.stringify({ ...this.read(), [name]: values }));
  },
  remove(name) {
    const { [name]: _, ...others } = this.read();
    write(local, PRESETS, JSON.stringify(others));
  },
};

// -- conversations ---------------------------------------------------------------------------------------------------

// {id, title, updated, version, messages}; version: of the last write, by any tab.
const unsaved = new Map(); // by id: conversations for which there was no room
const removed = new Set(); // ids, so that an answer still in progress does not restore them

const newId = () => crypto.randomUUID?.() ?? String(Math.random()).slice(2);
const isCall = (call) => typeof call?.function?.name === "string" && typeof call.function.arguments === "string";
const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
const isMessage = (message) => ROLES.includes(message?.role) && typeof message.content === "string";

export const isChat = (name) => name === null || name.startsWith(CHAT);
export const newChat = () => ({ id: newId(), title: "", updated: Date.now(), messages: [] });
export const isUnsaved = (chat) => unsaved.has(chat.id);
export const hasUnsaved = () => unsaved.size > 0;

/** All readable conversations, the most recently changed first. */
export function chats() {
  const found = [...unsaved.values()];
  for (let i = 0; i < (local?.length ?? 0); i++) {
    const name = local.key(i);
    const chat = name.startsWith(CHAT) && !unsaved.has(name.slice(CHAT.length)) && readChat(name);
    if (chat) found.push(chat);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Null if there is none, or it cannot be read. */
export const loadChat = (id) => unsaved.get(id) ?? readChat(CHAT + id);

function readChat(name) {
  const chat = read(name);
  if (!Array.isArray(chat?.messages)) return null;
  const messages = valid(chat.messages);
  const id = name.slice(CHAT.length);
  return { ...chat, id, messages, title: String(chat.title ?? ""), updated: Number(chat.updated) || 0 };
}

/** The valid ones of these messages, with the valid ones of their alternatives. */
function valid(messages) {
  const found = messages.filter(isMessage);
  for (const message of found) {
    if (message.role === "assistant" && !message.error) message.finish ??= "left";
    if (!Array.isArray(message.files) || !message.files.every(isFile)) delete message.files;
    if (!Array.isArray(message.calls) || !message.calls.every(isCall)) delete message.calls;
    for (const ways of ["before", "after"]) if (message[ways]) message[ways] = valid([message[ways]].flat());
  }
  return found;
}

/** Saves a conversation: as a separate one with a new title if another tab has changed it in the meantime. Returns
 *  whether that was so. */
export function saveChat(chat) {
  if (removed.has(chat.id)) return false;
  const stored = read(CHAT + chat.id);
  const isForked = stored !== null && stored.version !== chat.version;
  if (isForked) {
    unsaved.delete(chat.id);
    Object.assign(chat, { id: newId(), title: `${chat.title} (2)` });
  }
  chat.updated = Date.now();
  keep(chat);
  return isForked;
}

function keep(chat) {
  const version = newId();
  if (write(local, CHAT + chat.id, JSON.stringify({ ...chat, version }))) {
    chat.version = version;
    unsaved.delete(chat.id);
  } else unsaved.set(chat.id, chat);
}

/** Removes a conversation, which may make room for others. */
export function removeChat(id) {
  removed.add(id);
  unsaved.delete(id);
  local?.removeItem(CHAT + id);
  for (const chat of [...unsaved.values()]) keep(chat);
}
