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

let asked = null; // the promise of the open key dialog
let declined = false; // whether the last dialog was closed without a key

/** Asks for a key; resolves to whether one was entered. Concurrent callers share one dialog. */
function needKey(error = "The server requires an API key.") {
  asked ??= askForKey(error).finally(() => (asked = null));
  return asked;
}

function askForKey(error) {
  const dialog = find("key-dialog");
  find("key").hidden = false;
  find("key-error").textContent = error;
  find("key-value").value = "";
  find("key-keep").checked = key.kept;
  find("key-forget").hidden = !key.value;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const value = find("key-value").value.trim();
      const given = dialog.returnValue === "ok" && value !== "";
      if (given) key.set(value, find("key-keep").checked);
      declined = !given;
      find("key-value").value = "";
      resolve(given);
    }, { once: true });
  });
}

/** Loads the list of models; asks for a key as long as the server requires one and the user enters one. unasked: the
 *  page does this on its own, and asks no more once the user has declined. Resolves to whether it succeeded. */
async function introduce(unasked = false) {
  for (;;) {
    try {
      await models.load();
      return true;
    } catch (refused) {
      if (!(refused instanceof Refused)) throw refused;
      if (refused.status !== 401) return false;
    }
    if (unasked && declined) return false;
    const why = key.value ? "The server does not accept this key." : "Requests need a key. It stays in this browser.";
    if (!(await needKey(why))) return false;
  }
}

const options = new Options();
const models = new Models();
const engine = new EngineView(find("view-engine"), models, () => introduce(true));
const chat = new Chat(options, models, introduce);

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
  const open = document.body.toggleAttribute("data-sidebar");
  event.currentTarget.setAttribute("aria-expanded", String(open));
});
find("options").addEventListener("click", () => {
  options.show(find("settings").hidden);
});
find("key").addEventListener("click", async () => {
  if ((await needKey("")) && (await introduce())) showView();
});
find("key-forget").addEventListener("click", () => {
  key.forget();
  find("key-dialog").close("");
});
find("key").hidden = !key.value;
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || find("key-dialog").open || chat.escape()) return;
  if (document.body.hasAttribute("data-sidebar")) {
    find("menu").click();
    find("menu").focus();
  } else if (!find("settings").hidden) {
    options.show(false);
    find("options").focus();
  }
});

showView();
introduce(true);
