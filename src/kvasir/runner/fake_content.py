"""The numbers that FakeRunner computes a sequence from: made of ids, embeddings, positions, a bias and adapters, so
that a row that reads another sequence's numbers is detected."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from kvasir.inputs import NONE, Adapter, Inputs, in_effect, places


class FakeContent:
    """The numbers that inputs and adapters make of the ids of a sequence of at most `length` tokens.

    scope: a hash of the inputs and adapters that apply to the whole sequence. ahead: by how much positions after the
    prompt exceed their index.
    """

    def __init__(self, inputs: Inputs, adapters: Sequence[Adapter], length: int):
        self._kept, self._added = np.ones(length, np.int64), np.zeros(length, np.int64)
        self._inputs, self._wholes = inputs, [s for s in inputs.spans if s.both_ways]
        for span in inputs.spans:
            at = slice(span.start, span.end)
            self._kept[at] = span.added
            places_in = range(span.first, span.first + span.length)
            self._added[at] += [fake_mixed(span.content, i, span.layers, span.both_ways) for i in places_in]
        self.ahead = 0
        for place, (at, usual) in enumerate(places(inputs)):
            self._added[place] += fake_mixed(at) if any(x != usual for x in at) else 0
            self.ahead = max(usual - 1, *at) - place
        if inputs.second:
            self._added[inputs.second :] += fake_mixed("second")
        for start in {a.start for a in adapters if a.start < length}:
            self._added[start:] += fake_mixed(in_effect(adapters, start))
        scope = inputs.bias, inputs.encoded, in_effect(adapters, 0)
        self.scope = fake_mixed(scope) if any(scope) else 0
        self._added += fake_mixed(inputs.bias) if inputs.bias else 0

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """One number for each of the first ids, int64 [len(ids)]."""
        return ids * self._kept[: len(ids)] + self._added[: len(ids)]

    def reads(self, start: int, end: int) -> list[bytes]:
        """Contents whose embeddings are read by a step that computes [start, end)."""
        found = [s.content for s in self._inputs.spans if s.start < end and start < s.end]
        return [*found, self._inputs.encoded] if self._inputs.encoded and not start else found

    def inside(self, place: int) -> int:
        """How many bidirectional spans a step that begins or ends at `place` would cut."""
        return sum(span.start < place < span.end for span in self._wholes)


class _Plain(FakeContent):
    """The content of sequences without inputs and adapters: their ids."""

    def __init__(self) -> None:
        self._inputs, self._wholes, self.ahead, self.scope = NONE, [], 0, 0

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        return ids.astype(np.int64)


PLAIN = _Plain()


def fake_mixed(*values: object) -> int:
    """A hash (CRC-32) of the values."""
    return zlib.crc32(repr(values).encode())
