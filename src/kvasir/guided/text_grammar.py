"""A client's grammar of one text, embedded in the grammar of a call: as it is between marks, or spelled inside a string
in JSON.

Only terminals are translated; the rules stay the client's own. What is ignored between terminals becomes a rule, since
nothing is ignored in the rest of the call. It comes after a terminal, never before the first, as in llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from kvasir.guided import json_spelling
from kvasir.guided.json_spelling import Unwritable
from kvasir.guided.lark import Lark
from kvasir.guided.lark_tokens import Source, Token

_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?"
# The terminals that can be imported, from Lark's grammars/common.lark.
COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": _NUMBER, "SIGNED_NUMBER": f"[+-]?(?:{_NUMBER})",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+", "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/", "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
_REFUSED = {
    "~": "a complement", "&": "an intersection", "=": "an attribute", "{": "a template", "-": "a sign", ",": "a list",
    ".": "a priority or a path",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """definition: in the dialect of Lark that llguidance reads, or a regular expression that the whole text matches.
    param: the field of the request that has it."""

    syntax: Literal["lark", "regex"]
    definition: str
    param: str = "tools"

    def source(self) -> Source:
        """The grammar in Lark."""
        if self.syntax == "lark":
            return Source(self.definition, self.param)
        from llguidance import regex_to_lark

        return Source(f"start: /{regex_to_lark(self.definition)}/", self.param)


def in_json(lark: Lark, name: str, grammar: TextGrammar) -> str:
    """Adds rules for the text as it is spelled inside a string in JSON. name: begins the names of the rules. Returns
    the name of the first. Raises InvalidRequest."""
    return _Embedding(lark, name, grammar.source(), json=True).made()


def between_marks(
    lark: Lark, name: str, grammar: TextGrammar, end: Sequence[str], without: Collection[str] = ()
) -> str:
    """As `in_json`, for a text as it is and the words after it. end: those words, as `literals` gives them. without:
    marks that no terminal contains.

    The library takes the longest match of a terminal and never goes back. So a terminal that is the whole text is
    matched together with the mark after it; of other texts, the last terminal must not match how the mark begins.
    """
    return _Embedding(lark, name, grammar.source(), end=end, without=without).made()


class _Embedding:
    """Rules are named `name-RULE`, terminals `NAME-TERMINAL`; what this adds itself has two dashes."""

    def __init__(
        self, lark: Lark, name: str, source: Source, *, json: bool = False, end: Sequence[str] = (),
        without: Collection[str] = (),
    ):  # fmt: skip
        self._lark, self._name, self._source, self._json = lark, name, source, json
        self._end = list(end)
        self._without = [mark for mark in without if mark]
        self._ignored: list[str] = []
        self._whole: dict[str, str] = {}  # the names of terminals that need a rule, by what they match
        self._lines: list[tuple[str, list[Token]]] = []  # definitions of rules

    def made(self) -> str:
        for statement in self._statements():
            self._read(statement)
        skip = self._rule("-ignored") if self._ignored else ""
        whole = self._only_terminal()
        for name, body in [] if whole else self._lines:
            self._lark.rule(name, self._body(body, lambda found: f"({self._lexeme(found)} {skip})"))
        marks = "|".join(re.escape(mark).replace("/", "\\/") for mark in self._without)
        for expression, name in self._whole.items():
            self._lark.rule(name, f"({expression}) & ~/(.|\\n)*({marks})(.|\\n)*/")
        if skip:
            ignored = self._terminal("-IGNORED")
            self._lark.rule(ignored, " | ".join(f"({one})" for one in self._ignored))
            self._lark.rule(skip, f"{ignored}*")
        if whole:
            self._lark.rule(self._terminal("-END"), f"({whole}) {self._end.pop(0)}")
        start = self._terminal("-END") if whole else self._rule("start")
        self._lark.rule(self._name, " ".join([start, *self._end]))
        return self._name

    def _only_terminal(self) -> str:
        """The terminal that is the whole text, if text comes after it; else ""."""
        if self._ignored or len(self._lines) != 1 or not self._end or not self._end[0].startswith('"'):
            return ""
        [(_, body)] = self._lines
        alone = len(body) == 1 and body[0].kind in ("terminal", "text", "regex")
        return self._body(body, self._lexeme) if alone else ""

    def _statements(self) -> Iterator[list[Token]]:
        """Definitions and statements, without line breaks: a line that begins with "|" continues the one before."""
        found: list[Token] = []
        broken = False
        for token in self._source.tokens():
            if token.kind == "line":
                broken = True
                continue
            if broken and token.text != "|" and found:
                yield found
                found = []
            found.append(token)
            broken = False
        if found:
            yield found

    def _read(self, tokens: list[Token]) -> None:
        first = tokens[0]
        if first.kind == "statement":
            if first.text == "%ignore":
                self._ignored.append(self._body(tokens[1:], lambda terminal: terminal))
            elif first.text == "%import":
                self._import(tokens)
            else:
                self._refuse(f"the statement {first.text}", first)
            return
        if first.kind not in ("rule", "terminal") or len(tokens) < 2:
            raise self._source.refused("a rule or a terminal is expected", first.line)
        if tokens[1].text != ":":
            self._refuse("a priority, a template or an attribute", first)
        if first.kind == "rule":
            self._lines.append((self._rule(first.text), tokens[2:]))
        else:
            self._lark.rule(self._terminal(first.text), self._body(tokens[2:], lambda terminal: terminal))

    def _import(self, tokens: list[Token]) -> None:
        text = "".join(token.text for token in tokens[1:])
        found = re.fullmatch(r"common(?:\.(_?[A-Z_]+)(?:->(_?[A-Z][_A-Z0-9-]*))?|\(((?:_?[A-Z_]+,?)+)\))", text)
        names = found[3].split(",") if found and found[3] else [found[1]] if found else []
        for name in filter(None, names):
            if name not in COMMON:
                self._refuse(f"the import of {name}", tokens[0])
            spelled = json_spelling.regex(COMMON[name]) if self._json else f"/{COMMON[name]}/"
            self._lark.rule(self._terminal(found[2] if found and found[2] else name), spelled)
        if not names:
            self._refuse("an import other than of terminals of common", tokens[0])

    def _body(self, tokens: list[Token], lexeme: Callable[[str], str]) -> str:
        """The right side of a definition. lexeme: what stands for a terminal."""
        words: list[str] = []
        at = 0
        while at < len(tokens):
            token = tokens[at]
            after = tokens[at + 1].text if at + 1 < len(tokens) else ""
            if after == ".." and at + 2 < len(tokens):
                words.append(lexeme(self._between(token, tokens[at + 2])))
                at += 3
                continue
            match token.kind:
                case "rule":
                    words.append(self._rule(token.text))
                case "terminal":
                    words.append(lexeme(self._terminal(token.text)))
                case "text" | "regex":
                    spelled = self._spelled(token)
                    words.append(lexeme(spelled) if spelled != '""' else spelled)
                case "count" | "times":
                    words.append(token.text)
                case "sign" if token.text == "->":
                    at += 1  # the name of a branch
                case "sign" if token.text in "()[]|*+?":
                    words.append(token.text)
                case _:
                    self._refuse(_REFUSED.get(token.text[:1], f"{token.text!r:.40}"), token)
            at += 1
        return " ".join(words)

    def _lexeme(self, expression: str) -> str:
        """A terminal of a rule, which has none of the marks."""
        if not self._without:
            return expression
        if expression[0] == expression[-1] == '"' and not any(mark in expression for mark in self._without):
            return expression
        return self._whole.setdefault(expression, self._terminal(f"-{len(self._whole)}"))

    def _spelled(self, token: Token) -> str:
        if not self._json:
            return token.text
        try:
            if token.kind == "text":
                return json_spelling.literal(self._value(token), token.text.endswith("i"))
            pattern, _, flags = token.text[1:].rpartition("/")
            return json_spelling.regex(pattern, flags)
        except Unwritable as error:
            self._refuse_for(str(error), token)

    def _between(self, first: Token, last: Token) -> str:
        if first.kind != "text" or last.kind != "text" or not (len(self._value(first)) == len(self._value(last)) == 1):
            raise self._source.refused("a range is between two characters", first.line)
        if not self._json:
            return f"{first.text}..{last.text}"
        try:
            return json_spelling.between(self._value(first), self._value(last))
        except Unwritable as error:
            self._refuse_for(str(error), first)

    def _value(self, token: Token) -> str:
        """What a quoted text says."""
        written = re.sub(r"(\\\\)|\\x", lambda found: found[1] or "\\u00", token.text.removesuffix("i"))
        try:
            return json.loads(written)
        except ValueError:
            self._refuse_for("a text is quoted as in JSON", token)

    def _rule(self, name: str) -> str:
        return f"{self._name}-{name.lstrip('!?')}"

    def _terminal(self, name: str) -> str:
        return f"{self._name.upper()}-{name}"

    def _refuse(self, what: str, token: Token) -> NoReturn:
        raise self._source.refused(f"{what} is not supported", token.line)

    def _refuse_for(self, what: str, token: Token) -> NoReturn:
        raise self._source.refused(what, token.line)
