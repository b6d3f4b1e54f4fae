// Renders what a block of markdown contains: emphasis, code, links.

import { make } from "./dom.js";
import { ranges } from "./highlight.js";
import { formula, formulaAt } from "./math.js";

const DEEPEST = 8; // levels of nested emphasis

/** Joins lines; returns the text, and the position of each of its characters in the source. */
export function join(lines) {
  const positions = [];
  lines.forEach((line, i) => {
    if (i) positions.push(line.at - 1);
    for (let k = 0; k < line.text.length; k++) positions.push(line.at + k);
  });
  return [lines.map((line) => line.text).join("\n"), positions];
}

export function inlines(lines, leaf) {
  const [text, positions] = join(lines);
  return inline(text, positions, leaf, 0);
}

// Characters that change the direction of the text after them: https://www.unicode.org/reports/tr9/
const TURNS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Code as nodes. Characters that could disguise it, by changing its direction, are shown as code points. */
export function codeLeaf(text, positions, leaf) {
  const nodes = [];
  let begin = 0;
  for (const { 0: mark, index } of text.matchAll(TURNS)) {
    nodes.push(...leaf(text.slice(begin, index), positions.slice(begin, index)));
    const number = mark.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(make("span", { class: "control", "data-code": `U+${number}` }));
    begin = index + 1;
  }
  return [...nodes, ...leaf(text.slice(begin), positions.slice(begin))];
}

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const URL = /https?:\/\/[^\s<>"'`|\\^{}]+/y;
const TARGET = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/;

/** Code as nodes, with the colours of its language. */
export function colouredLeaf(text, positions, leaf, language) {
  const nodes = [];
  let at = 0;
  const plain = (end) => end > at && nodes.push(...codeLeaf(text.slice(at, end), positions.slice(at, end), leaf));
  for (const [begin, end, name] of ranges(text, language)) {
    plain(begin);
    nodes.push(make("span", { class: name }, codeLeaf(text.slice(begin, end), positions.slice(begin, end), leaf)));
    at = end;
  }
  plain(text.length);
  return nodes;
}

/** A text with its positions as nodes. The end of a mark that has none is searched for once only, to stay linear. */
function inline(text, positions, leaf, depth) {
  const nodes = [];
  const endless = new Set();
  let plain = [];
  let i = 0;

  const flush = () => {
    if (plain.length) nodes.push(leaf(plain.map((k) => text[k]).join(""), plain.map((k) => positions[k])));
    plain = [];
  };
  const within = (a, b) => {
    const part = [text.slice(a, b), positions.slice(a, b), leaf];
    return depth < DEEPEST ? inline(...part, depth + 1) : leaf(...part);
  };
  const put = (node, next) => {
    flush();
    nodes.push(node);
    i = next;
  };

  while (i < text.length) {
    const c = text[i];
    if (c === "$" || c === "\\") {
      const found = formulaAt(text, i, endless);
      const node = found && formula(found.tex, found.isDisplay);
      if (node) {
        put(node, found.end);
        continue;
      }
    }
    if (c === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1])) {
      plain.push(i + 1);
      i += 2;
      continue;
    }
    if (c === "`") {
      const run = runLength(text, i);
      const end = endless.has(`\`${run}`) ? -1 : codeEnd(text, i + run, run);
      if (end > 0) {
        put(make("code", {}, codeLeaf(text.slice(i + run, end), positions.slice(i + run, end), leaf)), end + run);
        continue;
      }
      endless.add(`\`${run}`);
      for (let k = 0; k < run; k++) plain.push(i++);
      continue;
    }
    if ((c === "*" || c === "_" || c === "~") && text[i + 1] !== " ") {
      const double = text[i + 1] === c;
      const mark = double ? c + c : c;
      if ((double || c !== "~") && !endless.has(mark) && opens(text, i, mark)) {
        const end = markEnd(text, i + mark.length, mark);
        if (end > 0) {
          const tag = c === "~" ? "del" : double ? "strong" : "em";
          put(make(tag, {}, within(i + mark.length, end)), end + mark.length);
          continue;
        }
        endless.add(mark);
      }
    }
    if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      const found = link(text, c === "!" ? i + 1 : i);
      if (found) {
        put(anchor(found.url, within(found.open, found.close)), found.end);
        continue;
      }
    }
    if (c === "h") {
      const url = address(text, i);
      if (url) {
        put(anchor(url, leaf(url, positions.slice(i, i + url.length))), i + url.length);
        continue;
      }
    }
    if (c === "\n") {
      const hard = /( {2,}|\\)$/.test(text.slice(Math.max(0, i - 3), i));
      if (hard) {
        put(make("br"), i + 1);
        continue;
      }
    }
    plain.push(i++);
  }
  flush();
  return nodes.flat();
}

function runLength(text, i) {
  let n = 1;
  while (text[i + n] === text[i]) n++;
  return n;
}

function codeEnd(text, i, run) {
  while ((i = text.indexOf("`", i)) >= 0) {
    const n = runLength(text, i);
    if (n === run) return i;
    i += n;
  }
  return -1;
}

/** The URL that begins at `i`, without trailing punctuation; "" if there is none. */
function address(text, i) {
  URL.lastIndex = i;
  const found = isWord(text[i - 1]) ? null : URL.exec(text);
  if (!found) return "";
  let end = found[0].length;
  while (").,:;!?*_~]".includes(found[0][end - 1])) end--;
  return end > "https://".length ? found[0].slice(0, end) : "";
}

const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

function opens(text, i, mark) {
  const next = text[i + mark.length];
  return next !== undefined && next.trim() !== "" && !(mark[0] === "_" && isWord(text[i - 1]));
}

/** The index at which emphasis that began before `i` ends, or -1. */
function markEnd(text, i, mark) {
  for (let j = i; (j = text.indexOf(mark, j)) >= 0; ) {
    const run = runLength(text, j);
    const fits = (mark.length === 2 || run !== 2) && j > i && text[j - 1].trim();
    if (text[j - 1] === "\\") j++;
    else if (fits && !(mark[0] === "_" && isWord(text[j + run]))) return j + (mark.length === 2 ? run - 2 : 0);
    else j += run;
  }
  return -1;
}

/** A link `[text](url "title")` whose bracket opens at `i`: the bounds of its text, its URL, and its end; or null. */
function link(text, i) {
  let level = 0;
  for (let j = i; j < text.length && j < i + 2000; j++) {
    if (text[j] === "\\") j++;
    else if (text[j] === "[") level++;
    else if (text[j] === "]" && --level === 0) {
      const rest = TARGET.exec(text.slice(j + 1, j + 2001));
      return rest && { open: i + 1, close: j, url: rest[1], end: j + 1 + rest[0].length };
    }
  }
  return null;
}

/** A link to a web page or a mail address; the text of any other link, without its target. */
function anchor(url, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return make("span", { class: "dead-link", title: url }, children);
  return make("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, children);
}
