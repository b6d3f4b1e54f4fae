// Colours code with highlight.js. Of its result only the bounds of the tokens are used, never its HTML.

import hljs from "./vendor/highlight.js";

const LONGEST = 20_000; // characters; longer code stays plain, since it is coloured again as it grows

/** Collects `[begin, end, scope]` of the parts that have a scope. */
class Ranges {
  constructor() {
    this.found = [];
    this.at = 0;
    this.open = [];
  }

  addText(text) {
    const scope = this.open.at(-1);
    if (scope && text) this.found.push([this.at, this.at + text.length, scope]);
    this.at += text.length;
  }

  startScope(scope) {
    this.open.push(scope);
  }

  endScope() {
    this.open.pop();
  }

  __addSublanguage(inner) {
    for (const [begin, end, scope] of inner.found) this.found.push([this.at + begin, this.at + end, scope]);
    this.at += inner.at;
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: Ranges });

/** The parts of code that have a colour: `[begin, end, class]`, in order; [] for an unknown language. */
export function ranges(code, language) {
  if (code.length > LONGEST || !hljs.getLanguage(language)) return [];
  const { _emitter: emitter, errorRaised } = hljs.highlight(code, { language, ignoreIllegals: true });
  if (errorRaised || emitter.at !== code.length) return [];
  return emitter.found.map(([begin, end, scope]) => [begin, end, `h-${scope.split(".")[0]}`]);
}
