"""A text rendered by a chat template, with a record of the parts that are not the template's own."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvasir.text.marked_string import MODEL


class TextSpan(NamedTuple):
    """The characters [start, end) of a text. mark: OUTSIDE or MODEL, of `marked_string`."""

    start: int
    end: int
    mark: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """spans: the parts from outside, ascending and disjoint. source: the template's source."""

    text: str
    spans: tuple[TextSpan, ...] = ()
    source: str = ""

    def __len__(self) -> int:
        return len(self.text)

    def cut(self, end: int) -> Rendered:
        """The first `end` characters."""
        spans = tuple(TextSpan(s.start, min(s.end, end), s.mark) for s in self.spans if s.start < end)
        return replace(self, text=self.text[:end], spans=spans)

    def foreign(self, marks: Collection[str] = ()) -> tuple[tuple[int, int], ...]:
        """The parts that may not produce control tokens: all parts from outside, except `marks` within a model's own
        turns, which the model wrote itself."""
        own = re.compile("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)) or r"(?!)")
        found: list[tuple[int, int]] = []
        for start, end, mark in self.spans:
            for match in own.finditer(self.text, start, end) if mark == MODEL else ():
                found.append((start, match.start()))
                start = match.end()
            found.append((start, end))
        return tuple((start, end) for start, end in found if start < end)
