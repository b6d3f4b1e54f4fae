// Creates elements. Text becomes text nodes only, so that no output of a model or a server is parsed as markup.

export const find = (id) => document.getElementById(id);

/** An element with properties (`class`, `on...` listeners, attributes) and children (nodes, strings, null). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** Announces a text to screen readers. */
export function announce(text) {
  find("status").textContent = text;
}

/** A button that copies a text and shows whether that worked. text: returns it. */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", class: "quiet", "aria-label": `${label} to the clipboard` }, label);
  button.addEventListener("click", async () => {
    let done = "Copied";
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      done = "Copying failed";
    }
    button.textContent = done;
    announce(done);
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** Downloads a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
