// Markdown as models write it, to nodes. What is not understood stays text; HTML is text; nothing is loaded.
//
// Every piece of text knows where it came from: `leaf(text, positions)` makes the nodes of a piece, with the place of
// each of its characters in the source, so that tokens can be shown within the finished text.

import { copyButton, make } from "./dom.js";

const DEEPEST = 8; // levels of quotes, lists and emphasis within each other

/** The blocks of a text: `{source, start, render(leaf)}`. A block that ended never changes when more text follows. */
export function blocks(text) {
  return split(toLines(text)).map((lines) => ({
    source: lines.map((line) => line.text).join("\n"),
    start: lines[0].at,
    render: (leaf) => block(lines, leaf, 0),
  }));
}

// A line: its text, and where in the source it begins.
function toLines(text) {
  let at = 0;
  return text.split("\n").map((line) => {
    const found = { text: line, at };
    at += line.length + 1;
    return found;
  });
}

const cut = (line, n) => ({ text: line.text.slice(n), at: line.at + n });

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

const isBlank = (line) => !line.text.trim();
const indent = (line) => line.text.length - line.text.trimStart().length;

/** Lines to runs of lines, one for each block. */
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
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
    for (let j = i + 1; j < lines.length; j++) if (close.test(lines[j].text)) return j + 1;
    return lines.length;
  }
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

/** Whether a line ends a paragraph without a blank line before it. */
function interrupts({ text }) {
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || /^ {0,3}([-*+]|1[.)])[ \t]+\S/.test(text);
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
const belongs = (line, ordered) => indent(line) >= 2 || (ITEM.test(line.text) && !RULE.test(line.text) && isOrdered(line) === ordered);

function block(lines, leaf, depth) {
  const first = lines[0].text;
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence, leaf);
  const heading = HEADING.exec(first);
  if (heading) {
    const line = cut(lines[0], heading[0].length);
    // The page's own headings are above those of an answer.
    return make(`h${Math.min(6, heading[1].length + 2)}`, {}, inlines([{ ...line, text: line.text.replace(/[ \t]+#+[ \t]*$/, "") }], leaf));
  }
  if (RULE.test(first)) return make("hr");
  if (depth < DEEPEST && QUOTE.test(first)) {
    return make("blockquote", {}, inner(lines.map((l) => cut(l, QUOTE.exec(l.text)[0].length)), leaf, depth));
  }
  if (depth < DEEPEST && ITEM.test(first)) return list(lines, leaf, depth);
  if (lines.length > 1 && first.includes("|") && TABLE_RULE.test(lines[1].text)) return table(lines, leaf);
  return make("p", {}, inlines(lines.map((l) => cut(l, indent(l))), leaf));
}

const inner = (lines, leaf, depth) => split(lines).map((found) => block(found, leaf, depth + 1));

function code(lines, fence, leaf) {
  const closed = lines.length > 1 && new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`).test(lines.at(-1).text);
  const body = lines.slice(1, closed ? -1 : undefined);
  const [text, positions] = join(body);
  const head = make("div", { class: "code-head" }, make("span", {}, fence[2]), copyButton(() => text));
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, make("code", {}, leaf(text, positions))));
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
  return make(tag, start, items.map((item) => make("li", {}, inner(item, leaf, depth).map((node) => (node.tagName === "P" && !loose ? [...node.childNodes] : node)).flat())));
}

function table(lines, leaf) {
  const align = cells(lines[1]).map(({ text }) => {
    const right = text.endsWith(":");
    return text.startsWith(":") ? (right ? "center" : null) : right ? "end" : null;
  });
  const row = (line, tag) => {
    const found = cells(line);
    return make("tr", {}, align.map((side, i) => make(tag, { class: side }, found[i] ? inlines([found[i]], leaf) : [])));
  };
  const body = lines.slice(2).map((line) => row(line, "td"));
  return make("div", { class: "table", tabindex: 0 }, make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, body)));
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

// -- within a block ------------------------------------------------------------------------------------------------

/** The lines as one text, and the place of each of its characters in the source. */
function join(lines) {
  const positions = [];
  lines.forEach((line, i) => {
    if (i) positions.push(line.at - 1);
    for (let k = 0; k < line.text.length; k++) positions.push(line.at + k);
  });
  return [lines.map((line) => line.text).join("\n"), positions];
}

function inlines(lines, leaf) {
  const [text, positions] = join(lines);
  return inline(text, positions, leaf, 0);
}

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const URL_START = /https?:\/\//y;
const URL_REST = /[^\s<>"'`|\\^{}]+/y;

/** A text with its positions to nodes. Each kind of mark that has no end is searched for once, not at every place. */
function inline(text, positions, leaf, depth) {
  const nodes = [];
  const endless = new Set();
  let plain = [];
  let from = 0;
  let i = 0;

  const flush = () => {
    if (plain.length) nodes.push(leaf(plain.map((k) => text[k]).join(""), plain.map((k) => positions[k])));
    plain = [];
  };
  const within = (a, b) => (depth < DEEPEST ? inline(text.slice(a, b), positions.slice(a, b), leaf, depth + 1) : leaf(text.slice(a, b), positions.slice(a, b)));
  const put = (node, next) => {
    flush();
    nodes.push(node);
    i = next;
  };

  while (i < text.length) {
    const c = text[i];
    if (c === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1])) {
      plain.push(i + 1);
      i += 2;
      continue;
    }
    if (c === "`") {
      const run = runLength(text, i);
      const end = endless.has(`\`${run}`) ? -1 : codeEnd(text, i + run, run);
      if (end > 0) {
        put(make("code", {}, leaf(text.slice(i + run, end), positions.slice(i + run, end))), end + run);
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
    if (c === "h" && i >= from) {
      URL_START.lastIndex = URL_REST.lastIndex = i;
      const start = URL_START.test(text) && !/\w/.test(text[i - 1] ?? "") ? URL_REST.exec(text)[0].replace(/[).,:;!?*_~\]]+$/, "") : "";
      if (start.length > 8) {
        put(anchor(start, leaf(start, positions.slice(i, i + start.length))), i + start.length);
        continue;
      }
      from = i + 1;
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

const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

function opens(text, i, mark) {
  const next = text[i + mark.length];
  return next !== undefined && next.trim() !== "" && !(mark[0] === "_" && isWord(text[i - 1]));
}

/** Where emphasis that began before `i` ends, or -1. */
function markEnd(text, i, mark) {
  for (let j = i; (j = text.indexOf(mark, j)) >= 0; ) {
    const run = runLength(text, j);
    const fits = mark.length === 1 ? run !== 2 : true;
    if (text[j - 1] === "\\") j++;
    else if (fits && j > i && text[j - 1].trim() && !(mark[0] === "_" && isWord(text[j + run]))) return j + (mark.length === 2 ? run - 2 : 0);
    else j += run;
  }
  return -1;
}

/** A link `[text](url "title")` whose bracket opens at `i`: the ends of its text, its address, and where it ends. */
function link(text, i) {
  let level = 0;
  for (let j = i; j < text.length && j < i + 2000; j++) {
    if (text[j] === "\\") j++;
    else if (text[j] === "[") level++;
    else if (text[j] === "]" && --level === 0) {
      const rest = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(j + 1, j + 2001));
      return rest && { open: i + 1, close: j, url: rest[1], end: j + 1 + rest[0].length };
    }
  }
  return null;
}

/** A link that can only lead to a web page or a letter; any other address is shown and leads nowhere. */
function anchor(url, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return make("span", { class: "dead-link", title: url }, children);
  return make("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, children);
}
