"""What a sequence is computed from: its key for the prefix tree, its encoder sources, and where a step may end.

The tree compares ids. Where content begins that ids do not show (a mark of kvasir.inputs), the key holds a negative
number in place of the id. The number stands for the pair of mark and id and is never given to another pair. So equal
tree keys mean equal keys and values in the cache, and sequences with different numbers share nothing after them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from kvasir.inputs import Source, marks
from kvasir.kv.node import ID_BYTES
from kvasir.plan import Adapted
from kvasir.types import Request

FIRST = -2  # -1 is reserved: it names blocks of fixed size in a tier
LAST = -(2**31)


class MarkIds:
    """Assigns a number to each pair of id and mark. Keeps the `most` recently used; an evicted pair gets a new number,
    and so finds nothing in the prefix cache."""

    def __init__(self, most: int = 1 << 16):
        self._numbers: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._pairs: dict[int, tuple[int, bytes]] = {}
        self._most = most
        self._next = FIRST

    def of(self, token: int, mark: bytes) -> int:
        """The number of this pair, the same as before unless the pair was evicted."""
        number = self._numbers.pop((token, mark), None)
        if number is None:
            assert self._next >= LAST, "no numbers for marks are left"  # a new process starts at FIRST again
            number, self._next = self._next, self._next - 1
            if len(self._numbers) >= self._most:
                del self._pairs[self._numbers.popitem(last=False)[1]]
            self._pairs[number] = token, mark
        self._numbers[token, mark] = number
        return number

    def pair(self, number: int) -> tuple[int, bytes] | None:
        """The id and mark that a number stands for; None if the pair was evicted."""
        return self._pairs.get(number)


class SequenceContent:
    """What a sequence is computed from, and its keys in the prefix tree.

    adapters: with their contents. adapted: the same by the runner's ids, while it has a row. sources: encoder sources
    by content. namespace: in the prefix tree. prompt: the prompt's key. prefix_key: namespace and first block;
    sequences with equal ones share a prefix.
    """

    __slots__ = (
        *("_given", "_marks", "_numbers", "adapted", "adapters", "prefix_key", "inputs"),
        *("namespace", "prompt", "sources", "wholes"),
    )

    def __init__(self, request: Request, numbers: MarkIds, namespace: bytes, block_size: int):
        self.inputs, self.adapters = request.inputs, request.adapters
        self.adapted: tuple[Adapted, ...] = ()
        self.sources = {source.content: source for source in request.sources}
        self.wholes = tuple(s for s in request.inputs.spans if s.both_ways)
        self._marks, self._numbers = marks(request.inputs, request.adapters), numbers
        self._given: dict[int, int] = {}  # by position: keeps the key stable if MarkIds evicts a pair
        self.namespace = namespace
        self.prompt = self.key(array("i", request.prompt_ids))
        self.prefix_key = namespace + self.prompt[: block_size * ID_BYTES]

    def key(self, tokens: array[int]) -> bytes:
        """The prefix tree's key of `tokens`, the first tokens of the sequence."""
        if not self._marks:
            return tokens.tobytes()
        ids = tokens[:]
        for position, mark in self._marks.items():
            if position < len(ids):
                ids[position] = self._number(position, ids[position], mark)
        return ids.tobytes()

    def _number(self, position: int, token: int, mark: bytes) -> int:
        number = self._given.get(position)
        if number is None:
            number = self._given[position] = self._numbers.of(token, mark)
        return number

    def needs(self, start: int) -> Iterator[tuple[int, Source]]:
        """Encoder sources whose outputs are needed to compute the sequence from `start` on, each with the first
        position that reads it, in ascending order."""
        if self.inputs.encoded and not start:  # the first step writes all of it into the cache
            yield 0, self.sources[self.inputs.encoded]
        for span in self.inputs.spans:
            if span.end > start:
                yield span.start, self.sources[span.content]

    def stop(self, end: int) -> int:
        """The last position up to `end` at which a step, or a cached or loaded prefix, may end."""
        return next((span.start for span in self.wholes if span.start < end < span.end), end)

    def whole(self, start: int) -> int:
        """Tokens that one step must compute together if it begins at `start`; usually 1."""
        return next((span.length for span in self.wholes if span.start == start), 1)
