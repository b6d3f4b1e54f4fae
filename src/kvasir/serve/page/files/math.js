// Renders formulas with KaTeX. Commands that load or link something are errors; a formula with an error stays text.

import { make } from "./dom.js";
import "./vendor/katex.js"; // defines `katex`

const LONGEST = 5000; // characters
const LIMITS = { maxSize: 20, maxExpand: 300, trust: false, strict: "ignore", throwOnError: true, output: "html" };

/** A formula as an element; null if KaTeX refuses it. */
export function formula(tex, displayMode) {
  if (tex.length > LONGEST) return null;
  const name = displayMode ? "math display" : "math";
  const element = make("span", { class: name, role: "math", "aria-label": tex.trim() });
  try {
    globalThis.katex.render(tex, element, { ...LIMITS, displayMode });
  } catch {
    return null;
  }
  if (displayMode) element.tabIndex = 0; // it may scroll
  return element;
}

const ENDS = { "\\(": "\\)", "\\[": "\\]", $: "$", $$: "$$" };

/** The formula that begins at `i` of a text: `{tex, end, isDisplay}`; null if there is none. endless: the openings that
 *  are known to have no end in the rest of the text. */
export function formulaAt(text, i, endless) {
  const two = text.slice(i, i + 2);
  const open = ENDS[two] ? two : text[i] === "$" ? "$" : "";
  if (!open || endless.has(open)) return null;
  const begin = i + open.length;
  if (open === "$" && (/\s/.test(text[begin] ?? " ") || /[\w$]/.test(text[i - 1] ?? ""))) return null;
  const close = closing(text, begin, ENDS[open]);
  if (close < 0) {
    if (open !== "$") endless.add(open);
    return null;
  }
  return { tex: text.slice(begin, close), end: close + open.length, isDisplay: open === "\\[" || open === "$$" };
}

/** Where a formula ends. That of a $ ends on its line, with no space before and no digit or letter after it, so that
 *  amounts of money are none. */
function closing(text, begin, end) {
  if (end !== "$") return text.indexOf(end, begin);
  for (let i = begin; i < text.length && text[i] !== "\n"; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "$") return i > begin && text[i - 1] !== " " && !/\w/.test(text[i + 1] ?? "") ? i : -1;
  }
  return -1;
}
