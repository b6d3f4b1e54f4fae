"""Builds a grammar for llguidance: rules in its Lark dialect, for a vocabulary in which some tokens are not text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from kvasir.guided.sources import literals
from kvasir.parse.format import Format, Style

TURN = "<|start|>assistant"  # in formats with channels, each message begins with it; the prompt begins the first
MAX_BLANK = 4  # characters after reasoning: some models would write endless blanks
NUMBER = "\0"  # placeholder for the number of a call in a text


class Lark:
    """specials: ids by text of the tokens that are matched by id and not as text, except tokens that end a choice;
    ends: the texts of the latter."""

    def __init__(self, specials: Mapping[str, int], ends: Collection[str] = ()):
        self.specials, self.ends = specials, ends
        self.lines = ["%llguidance {}"]

    def text(self) -> str:
        """The grammar so far."""
        return "\n".join(self.lines) + "\n"

    def rule(self, name: str, body: str) -> None:
        """Adds a rule; an empty body matches the empty text."""
        self.lines.append(f"{name}: {body.strip() or chr(34) * 2}")

    def words(self, text: str) -> str:
        """A text as literals; NUMBER becomes a pattern of digits."""
        pieces = [" ".join(literals(piece, self.specials)) for piece in text.split(NUMBER)]
        return " /[0-9]{1,4}/ ".join(pieces).strip()

    def cut(self, text: str) -> str:
        """The text up to the first token that ends a choice: the grammar is complete there, and any such token may
        follow."""
        return re.split("|".join(map(re.escape, self.ends)), text)[0] if self.ends else text

    def free(self, text: str, marks: Collection[str] = ()) -> str:
        """Alternatives: `text`, and the special tokens that no mark begins with."""
        ids = sorted(i for token, i in self.specials.items() if not any(mark.startswith(token) for mark in marks))
        return " | ".join([text, *([f"<[{','.join(map(str, ids))}]>"] if ids else [])])

    def until(self, name: str, end: str) -> None:
        """Adds the rule for any text up to and including the end mark; a mark that is text ends it at its first
        occurrence."""
        head, *rest = literals(end, self.specials)
        if head.startswith("<["):
            others = self.free(r"/(.|\n)+/", [end])
            self.rule(name, f"({others})* {' '.join([head, *rest])}")
        elif rest:  # a special token after the text distinguishes the mark from other text
            self.rule(name, " ".join([rf"/(.|\n)*{re.escape(json.loads(head)).replace('/', chr(92) + '/')}/", *rest]))
        else:
            self.rule(name, " ".join([f"{name}_end", *rest]))
            self.rule(f"{name}_end[lazy]", rf"/(.|\n)*/ {head}")

    def listed(self, rule: str, items: Mapping[str, str], required: Collection[str], separator: str) -> str:
        """A list of items by key, the required items first; all others are optional. rule: prefix for the names of the
        rules that this adds."""
        between = json.dumps(separator)
        first = [key for key in items if key in required]
        rest = [key for key in items if key not in required]
        if first:
            return f" {between} ".join(items[k] for k in first) + "".join(f" ({between} {items[k]})?" for k in rest)
        for i, key in reversed(list(enumerate(rest))):
            after = "".join(f" ({between} {items[k]})?" for k in rest[i + 1 :])
            self.rule(f"{rule}_{i}", f"{items[key]}{after}")
        return f"({' | '.join(f'{rule}_{i}' for i in range(len(rest)))})?" if rest else ""

    def lead(self, format: Format, opened: bool) -> str:
        """Adds the rule for what may precede the requested output: reasoning and a few blanks. Returns its name, or "".
        opened: the prompt has opened the reasoning."""
        thinking = format.thinking
        if thinking is None:
            return ""
        turn = self.words(TURN) if format.calls.style is Style.CHANNELS else ""
        self.until("thought", thinking.end)
        thought = rf"thought {turn} /[ \n]{{0,{MAX_BLANK}}}/"
        self.rule("lead", thought if opened else f"({self.words(thinking.start)} {thought})?")
        return "lead"

    def around(self, format: Format) -> tuple[str, str]:
        """What stands, or may stand, before and after the content."""
        begin, end = format.thinking.answer if format.thinking else ("", "")
        if format.calls.style is Style.CHANNELS:
            return self.words(begin.removeprefix(TURN)), self.words(self.cut(end))
        return tuple(f"{self.words(text)}?" if text else "" for text in (begin, self.cut(end)))  # type: ignore


def behind_reasoning(
    grammar: str, format: Format, specials: Mapping[str, int], ends: Collection[str] = (), opened: bool = False
) -> str:
    """A grammar of choices that may reason first, and then follow `grammar`."""
    lark = Lark(specials, ends)
    lead, (before, after) = lark.lead(format, opened), lark.around(format)
    lark.rule("start", f"{lead} {before} @answer {after}")
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark.text()}, {**answer, "name": "answer"}]})
