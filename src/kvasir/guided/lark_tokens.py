"""Splits a client's grammar in Lark into tokens, and names the lines of what is at fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvasir.errors import InvalidRequest, quoted

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|(?://|\#)[^\n]*)
      | (?P<line>(?:\r?\n)+[ \t]*)
      | (?P<rule>[!?]{0,2}_{0,2}[a-z][_a-z0-9-]*)
      | (?P<terminal>_?[A-Z][_A-Z0-9-]*)
      | (?P<text>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
      | (?P<count>\{[ \t]*[0-9]*[ \t]*(?:,[ \t]*[0-9]*[ \t]*)?\})
      | (?P<times>~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?)
      | (?P<special><[^<>\s]+>|@[a-zA-Z0-9_-]*)
      | (?P<statement>%[a-z]*)
      | (?P<number>[0-9]+)
      | (?P<sign>\.\.|->|[-()\[\]{}:|*+?.,=~&])
    """,
    re.VERBOSE,
)
MAX_SHOWN = 120  # characters of a quoted line


@dataclass(frozen=True, slots=True)
class Token:
    """kind: the name of its group in the pattern above. line: counted from 1."""

    kind: str
    text: str
    line: int


class Source:
    """A grammar as the client wrote it. param: the field of the request that has it."""

    def __init__(self, text: str, param: str):
        self.text, self.param = text, param

    def tokens(self) -> Iterator[Token]:
        """All but blanks and comments. Raises InvalidRequest."""
        at, line = 0, 1
        while at < len(self.text):
            found = _TOKEN.match(self.text, at)
            if found is None:
                raise self.refused(f"{quoted(self.text[at : at + 12])} begins nothing of a grammar", line)
            kind = found.lastgroup or ""
            if kind != "blank":
                yield Token(kind, found[0], line)
            line += found[0].count("\n")
            at = found.end()

    def refused(self, what: str, line: int, hint: str = "change the grammar") -> InvalidRequest:
        """The error for what is at fault in a line, which it quotes."""
        shown = self.text.split("\n")[line - 1].strip()[:MAX_SHOWN]
        return InvalidRequest(f"{what} (line {line} of the grammar: {shown})", hint, param=self.param)
