// The page as a whole: its views, its panels, and the key.

import { Refused } from "./api.js";
import { Chat } from "./chat.js";
import { find } from "./dom.js";
import { EngineView } from "./engine.js";
import { Models } from "./models.js";
import { Options } from "./options.js";
import { key } from "./store.js";

const VIEWS = ["chat", "engine"];

function showView() {
  const shown = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  for (const name of VIEWS) {
    const tab = find(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === shown));
    tab.tabIndex = name === shown ? 0 : -1;
    find(`view-${name}`).hidden = name !== shown;
  }
  document.body.dataset.view = shown;
  engine.watch(shown === "engine");
}

function togglePanel(button, open) {
  button.setAttribute("aria-expanded", String(open));
  return open;
}

/** Asks for a key; resolves to whether one was given. */
function needKey(error) {
  const dialog = find("key-dialog");
  find("key-error").textContent = error;
  find("key-value").value = "";
  find("key-keep").checked = key.kept;
  find("key-forget").hidden = !key.value;
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const value = find("key-value").value.trim();
      const given = dialog.returnValue === "ok" && value !== "";
      if (given) key.set(value, find("key-keep").checked);
      find("key-value").value = "";
      resolve(given);
    }, { once: true });
  });
}

/** What is served here; asks for a key as long as the server wants one and the user gives one. */
async function introduce(error = "") {
  if (error && !(await needKey(error))) return;
  try {
    await models.load();
  } catch (refused) {
    if (!(refused instanceof Refused)) throw refused;
    if (refused.status !== 401) return;
    find("key").hidden = false;
    await introduce(key.value ? "This key is not known here." : "Each request needs it. It stays in this browser.");
  }
}

const options = new Options();
const models = new Models();
const engine = new EngineView(find("view-engine"), models, () => introduce("The server asks for a key."));
const chat = new Chat(options, models, () => needKey("The server asks for a key."));

for (const [i, name] of VIEWS.entries()) {
  const tab = find(`tab-${name}`);
  tab.addEventListener("click", () => (location.hash = name));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[(i + 1) % VIEWS.length];
    location.hash = other;
    find(`tab-${other}`).focus();
  });
}
addEventListener("hashchange", showView);

find("menu").addEventListener("click", (event) => {
  const open = togglePanel(event.currentTarget, document.body.dataset.sidebar !== "open");
  if (open) document.body.dataset.sidebar = "open";
  else document.body.removeAttribute("data-sidebar");
});
find("options").addEventListener("click", (event) => {
  if (document.body.dataset.view !== "chat") location.hash = "chat";
  find("settings").hidden = !togglePanel(event.currentTarget, find("settings").hidden);
});
find("key").addEventListener("click", () => needKey("").then((given) => given && introduce()));
find("key-forget").addEventListener("click", () => {
  key.forget();
  find("key-dialog").close("");
});
if (key.value) find("key").hidden = false;
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || find("settings").hidden || chat.abort) return;
  find("settings").hidden = !togglePanel(find("options"), false);
  find("options").focus();
});

showView();
introduce();
