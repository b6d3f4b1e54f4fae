// What the browser keeps: the key, the settings, and each conversation under a name of its own. What it has no room
// for, or would not keep at all, stays in memory as long as the page.

const CHAT = "kvasir.chat.";
const SETTINGS = "kvasir.settings";
const KEY = "kvasir.key";
const ROLES = ["user", "assistant", "tool"];

/** Null where the browser is set to keep nothing. */
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

/** False when the browser has no room left for it. */
function write(store, name, text) {
  try {
    store.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

let secret = null; // the key where nothing else keeps it

/** The API key: for this tab, or, when asked to and where there is room, until it is forgotten. */
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

/** One value at a time: another tab may have changed the others. */
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

// -- conversations ---------------------------------------------------------------------------------------------------

// {id, title, updated, version, messages}; version: what was written last, by whichever tab.
const unsaved = new Map(); // by id: those that the browser had no room for
const removed = new Set(); // ids; an answer that is still coming does not bring them back

const newId = () => crypto.randomUUID?.() ?? String(Math.random()).slice(2);
const isCall = (call) => typeof call?.function?.name === "string" && typeof call.function.arguments === "string";
const isMessage = (message) => ROLES.includes(message?.role) && typeof message.content === "string";

export const isChat = (name) => name === null || name.startsWith(CHAT);
export const newChat = () => ({ id: newId(), title: "", updated: Date.now(), messages: [] });
export const isUnsaved = (chat) => unsaved.has(chat.id);
export const hasUnsaved = () => unsaved.size > 0;

/** All conversations that can be read, the last changed first. */
export function chats() {
  const found = [...unsaved.values()];
  for (let i = 0; i < (local?.length ?? 0); i++) {
    const name = local.key(i);
    const chat = name.startsWith(CHAT) && !unsaved.has(name.slice(CHAT.length)) && readChat(name);
    if (chat) found.push(chat);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Null where there is none, or none that can be read. */
export const loadChat = (id) => unsaved.get(id) ?? readChat(CHAT + id);

function readChat(name) {
  const chat = read(name);
  if (!Array.isArray(chat?.messages)) return null;
  const messages = sound(chat.messages);
  const id = name.slice(CHAT.length);
  return { ...chat, id, messages, title: String(chat.title ?? ""), updated: Number(chat.updated) || 0 };
}

/** Those of these messages that are some; answers may have former and later ones with them. */
function sound(messages) {
  const found = messages.filter(isMessage);
  for (const message of found) {
    if (message.role === "assistant" && !message.error) message.finish ??= "left";
    if (!Array.isArray(message.calls) || !message.calls.every(isCall)) delete message.calls;
    for (const ways of ["before", "after"]) if (message[ways]) message[ways] = sound([message[ways]].flat());
  }
  return found;
}

/** Keeps a conversation; one that another tab has changed meanwhile is kept beside that one, under a new name.
 *  Returns whether that was so. */
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

/** There may be room for others afterwards. */
export function removeChat(id) {
  removed.add(id);
  unsaved.delete(id);
  local?.removeItem(CHAT + id);
  for (const chat of [...unsaved.values()]) keep(chat);
}
