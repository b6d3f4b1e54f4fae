"""Grammars one can follow by hand: what is allowed depends on the place in the answer alone."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from kvasir.errors import KvasirError

VOCAB = 256


def allowed_at(grammar: str, place: int) -> list[int]:
    """The ids that "SEED LENGTH" allows there: half of the places leave one, some all. None behind
    LENGTH."""
    seed, length = map(int, grammar.split())
    mixed = (seed * 2654435761 + place * 40503 + (seed ^ place) * 69069) >> 4
    if place >= length:
        return []
    if mixed % 7 < 4:
        return [mixed % VOCAB]
    return list(range(mixed % 3, VOCAB, 3)) if mixed % 7 < 6 else list(range(VOCAB))


def mask_at(grammar: str, place: int) -> bytes:
    bits = sum(1 << i for i in allowed_at(grammar, place))
    return bits.to_bytes(VOCAB // 8, "little")


class HandGuide:
    def __init__(self, grammar: str):
        self.grammar, self.place = grammar, 0

    @property
    def quiet(self) -> bool:
        """A guess that is often wrong."""
        return self.place % 2 == 0

    @property
    def done(self) -> bool:
        return not allowed_at(self.grammar, self.place)

    def allowed(self) -> bytes | None:
        mask = mask_at(self.grammar, self.place)
        return None if all(byte == 255 for byte in mask) else mask

    def forced(self) -> list[int]:
        ids: list[int] = []
        while len(only := allowed_at(self.grammar, self.place + len(ids))) == 1:
            ids += only
        return ids

    def copy(self) -> HandGuide:
        other = HandGuide(self.grammar)
        other.place = self.place
        return other

    def advance(self, ids: Iterable[int]) -> None:
        for token in ids:
            if token not in allowed_at(self.grammar, self.place):
                raise KvasirError(f"id {token} at {self.place}")
            self.place += 1


class HandGuides:
    """Compiles on request; `broken` is a grammar that does not compile."""

    def __init__(self, at_once: bool = True):
        self.at_once = at_once
        self.open: list[tuple[Future, str]] = []

    def begin(self, grammar: str) -> Future:
        future: Future = Future()
        self.open.append((future, grammar))
        if self.at_once:
            self.compile()
        return future

    def ends(self, grammar: str) -> bool:
        return True

    def compile(self) -> None:
        for future, grammar in self.open:
            if grammar == "broken":
                future.set_exception(KvasirError("the grammar does not compile"))
            else:
                future.set_result(grammar)
        self.open = []

    def take(self, compiled: Future, ids: Iterable[int] = ()) -> HandGuide:
        guide = HandGuide(compiled.result())
        guide.advance(ids)
        return guide
