// Text files that go along with the next message. Models read text, so other files are refused.

import { find, make } from "./dom.js";

const MOST = 1_000_000; // bytes of a file

export class Attachments {
  /** complain: shows why a file is refused. */
  constructor(complain) {
    this.files = []; // {name, text}
    this.complain = complain;
    const input = find("files");
    find("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.add([...input.files]);
      input.value = "";
    });
    const composer = find("composer");
    composer.addEventListener("dragover", (event) => event.preventDefault());
    composer.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    for (const file of files) {
      if (file.size > MOST) this.complain(`${file.name} is too large: a file may have ${MOST / 1e6} MB.`);
      else {
        const text = decoded(await file.arrayBuffer());
        if (text === null) this.complain(`${file.name} is not a text file in UTF-8, which is all that the model reads.`);
        else this.files.push({ name: file.name, text });
      }
    }
    this.draw();
  }

  set(files = []) {
    this.files = [...files];
    this.draw();
  }

  /** The files, which are then no longer attached. */
  take() {
    const { files } = this;
    this.set();
    return files;
  }

  draw() {
    const chips = this.files.map((file, i) => {
      const remove = () => this.set(this.files.filter((_, k) => k !== i));
      const about = { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, onclick: remove };
      return make("li", {}, make("bdi", {}, file.name), make("button", about, "×"));
    });
    find("attached").replaceChildren(...chips);
    find("attached").hidden = !chips.length;
  }
}

/** The text of a file in UTF-8; null if it is none. */
function decoded(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/** The files as blocks of code after a text, as models are used to them. */
export function withFiles(text, files = []) {
  const block = ({ name, text: inside }) => {
    const longest = Math.max(2, ...[...inside.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${inside.replace(/\n$/, "")}\n${fence}`;
  };
  return [text, ...files.map(block)].filter(Boolean).join("\n\n");
}
