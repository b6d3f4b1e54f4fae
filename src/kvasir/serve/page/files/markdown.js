// Renders the markdown that models write. HTML and unsupported syntax stay text; nothing is loaded.
//
// Each piece of text keeps its origin: `leaf(text, positions)` creates the nodes of a piece from the position of each
// of its characters in the source, so that tokens can be shown within the rendered text.

import { copyButton, make } from "./dom.js";
import { colouredLeaf, inlines, join } from "./inline.js";

const DEEPEST = 8; // levels of nested quotes and lists

/** The blocks of a text: `{source, start, render(leaf)}`. A complete block never changes when more text follows. */
export function blocks(text) {
  return split(toLines(text)).map((lines) => ({
    source: lines.map((line) => line.text).join("\n"),
    start: lines[0].at,
    render: (leaf) => block(lines, leaf, 0),
  }));
}

// A line: its text, and its position in the source.
function toLines(text) {
  let at = 0;
  return text.split("\n").map((line) => {
    const found = { text: line, at };
    at += line.length + 1;
    return found;
  });
}

const cut = (line, n) => ({ text: line.text.slice(n), at: line.at + n });

const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const MATH = /^ {0,3}(\$\$|\\\[)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE_RULE = /^\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?$/;
const BREAKS = /^ {0,3}([-*+]|1[.)])[ \t]+\S/; // a list item that may follow a paragraph without a blank line

const isBlank = (line) => !line.text.trim();
const indent = (line) => line.text.length - line.text.trimStart().length;

/** Groups lines by block. */
function split(lines) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    if (isBlank(lines[i])) {
      i++;
      continue;
    }
    const end = blockEnd(lines, i);
    found.push(lines.slice(i, end));
    i = end;
  }
  return found;
}

function blockEnd(lines, i) {
  const fence = FENCE.exec(lines[i].text);
  if (fence) {
    for (let j = i + 1; j < lines.length; j++) if (closes(lines[j], fence)) return j + 1;
    return lines.length;
  }
  const formula = mathEnd(lines, i);
  if (formula) return formula;
  if (HEADING.test(lines[i].text) || RULE.test(lines[i].text)) return i + 1;
  if (ITEM.test(lines[i].text)) return listEnd(lines, i);
  let j = i + 1;
  if (QUOTE.test(lines[i].text)) {
    while (j < lines.length && QUOTE.test(lines[j].text)) j++;
    return j;
  }
  while (j < lines.length && !isBlank(lines[j]) && !interrupts(lines[j])) j++;
  return j;
}

/** Where the displayed formula that begins at a line ends, before the next blank line; 0 if there is none. */
function mathEnd(lines, i) {
  const open = MATH.exec(lines[i].text);
  if (!open) return 0;
  const close = open[1] === "$$" ? "$$" : "\\]";
  let rest = lines[i].text.slice(open[0].length);
  for (let j = i; j < lines.length && !isBlank(lines[j]); rest = lines[++j]?.text ?? "") {
    if (rest.includes(close)) return j + 1;
  }
  return 0;
}

/** Whether a line closes a fenced block of code. */
function closes(line, fence) {
  const text = line.text.trim();
  return text.length >= fence[1].length && indent(line) < 4 && text === fence[1][0].repeat(text.length);
}

/** Whether a line ends a paragraph without a blank line before it. */
function interrupts({ text }) {
  return [FENCE, HEADING, RULE, QUOTE, BREAKS, MATH].some((begin) => begin.test(text));
}

function listEnd(lines, i) {
  const ordered = isOrdered(lines[i]);
  let j = i + 1;
  while (j < lines.length) {
    if (isBlank(lines[j])) {
      let next = j;
      while (next < lines.length && isBlank(lines[next])) next++;
      if (next === lines.length || !belongs(lines[next], ordered)) return j;
      j = next;
    } else if (belongs(lines[j], ordered) || (!isBlank(lines[j - 1]) && !interrupts(lines[j]))) j++;
    else return j;
  }
  return j;
}

const isOrdered = (line) => /\d/.test(ITEM.exec(line.text)[2]);
const isItem = (line) => ITEM.test(line.text) && !RULE.test(line.text);
const belongs = (line, ordered) => indent(line) >= 2 || (isItem(line) && isOrdered(line) === ordered);

function block(lines, leaf, depth) {
  const first = lines[0].text;
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence, leaf);
  const heading = HEADING.exec(first);
  if (heading) {
    const line = cut(lines[0], heading[0].length);
    // The page's own headings rank above those of an answer.
    const title = { ...line, text: withoutEnd(line.text) };
    return make(`h${Math.min(6, heading[1].length + 2)}`, {}, inlines([title], leaf));
  }
  if (RULE.test(first)) return make("hr");
  if (depth < DEEPEST && QUOTE.test(first)) {
    return make("blockquote", {}, inner(lines.map((l) => cut(l, QUOTE.exec(l.text)[0].length)), leaf, depth));
  }
  if (depth < DEEPEST && ITEM.test(first)) return list(lines, leaf, depth);
  if (lines.length > 1 && first.includes("|") && TABLE_RULE.test(lines[1].text.trim())) return table(lines, leaf);
  return make("p", {}, inlines(lines.map((l) => cut(l, indent(l))), leaf));
}

/** A heading without its closing #s. */
function withoutEnd(text) {
  text = text.trimEnd();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end < text.length && /^$|[ \t]/.test(text[end - 1] ?? "") ? text.slice(0, end) : text;
}

const inner = (lines, leaf, depth) => split(lines).map((found) => block(found, leaf, depth + 1));

function code(lines, fence, leaf) {
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  const body = lines.slice(1, closed ? -1 : undefined);
  const [text, positions] = join(body);
  const language = fence[2].trim().split(/\s/)[0];
  const head = make("div", { class: "code-head" }, make("span", {}, language), copyButton(() => text));
  const shown = make("code", {}, colouredLeaf(text, positions, leaf, language));
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, shown));
}

function list(lines, leaf, depth) {
  const mark = ITEM.exec(lines[0].text)[2];
  const items = [];
  let width = 0;
  const base = indent(lines[0]);
  for (const line of lines) {
    const item = ITEM.exec(line.text);
    if (item && (items.length === 0 || item[1].length < Math.max(base + 2, 2))) {
      width = Math.min(item[0].length, item[1].length + item[2].length + 4);
      items.push([cut(line, item[0].length)]);
    } else items.at(-1).push(cut(line, Math.min(indent(line), width)));
  }
  const loose = items.some((item) => item.slice(0, -1).some(isBlank));
  const tag = /\d/.test(mark) ? "ol" : "ul";
  const start = tag === "ol" && parseInt(mark) !== 1 ? { start: parseInt(mark) } : {};
  const bare = (node) => (node.tagName === "P" && !loose ? [...node.childNodes] : [node]);
  return make(tag, start, items.map((item) => make("li", {}, inner(item, leaf, depth).flatMap(bare))));
}

function table(lines, leaf) {
  const align = cells(lines[1]).map(({ text }) => {
    const right = text.endsWith(":");
    return text.startsWith(":") ? (right ? "center" : null) : right ? "end" : null;
  });
  const row = (line, tag) => {
    return make("tr", {}, cells(line).map((cell, i) => make(tag, { class: align[i] }, inlines([cell], leaf))));
  };
  const head = make("thead", {}, row(lines[0], "th"));
  const body = make("tbody", {}, lines.slice(2).map((line) => row(line, "td")));
  return make("div", { class: "table", tabindex: 0 }, make("table", {}, head, body));
}

function cells(line) {
  const found = [];
  let begin = 0;
  const { text, at } = line;
  const end = text.trimEnd().length;
  for (let i = 0; i <= end; i++) {
    if (i < end && text[i] === "\\") i++;
    else if (i === end || text[i] === "|") {
      const raw = text.slice(begin, i);
      const outside = (begin === 0 && !raw.trim()) || (i === end && !raw.trim());
      if (!outside) found.push({ text: raw.trim(), at: at + begin + (raw.length - raw.trimStart().length) });
      begin = i + 1;
    }
  }
  return found;
}
