"""A text that a chat template made, and which parts of it are not the template's own words."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvasir.text.marked_string import MODEL


class Span(NamedTuple):
    """The characters [start, end) of a text. mark: OUTSIDE or MODEL, of `marked_string`."""

    start: int
    end: int
    mark: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """spans: what came from outside, ascending and apart. source: of the template."""

    text: str
    spans: tuple[Span, ...] = ()
    source: str = ""

    def __len__(self) -> int:
        return len(self.text)

    def cut(self, end: int) -> Rendered:
        """Its first `end` characters."""
        spans = tuple(Span(s.start, min(s.end, end), s.mark) for s in self.spans if s.start < end)
        return replace(self, text=self.text[:end], spans=spans)

    def foreign(self, marks: Collection[str] = ()) -> tuple[tuple[int, int], ...]:
        """The parts that may write no control token: all from outside, but for `marks` in a model's own turns, where
        they are what it wrote itself."""
        own = re.compile("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)) or r"(?!)")
        found: list[tuple[int, int]] = []
        for start, end, mark in self.spans:
            for match in own.finditer(self.text, start, end) if mark == MODEL else ():
                found.append((start, match.start()))
                start = match.end()
            found.append((start, end))
        return tuple((start, end) for start, end in found if start < end)
