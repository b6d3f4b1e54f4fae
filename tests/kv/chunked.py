"""A kind of cache of the tests' own: attention within chunks of the sequence, which no executor computes. All that it
takes is this class; tests put it beside the others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kvasir.caches import PagedKV


@dataclass(frozen=True)
class Chunked(PagedKV):
    """Keys and values of the chunk of `chunk` tokens that the row lies in."""

    chunk: int = 1

    name = "chunked"
    needs = "chunked attention"

    @property
    def reach(self) -> int:
        return max(2, self.chunk)

    @property
    def table(self) -> Hashable:
        return "chunk", self.chunk

    def low(self, tokens: int) -> int:
        return tokens // self.chunk * self.chunk
