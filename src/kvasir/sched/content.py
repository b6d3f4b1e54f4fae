"""What a sequence is computed from, as the scheduler needs it: a key for the prefix tree, and where a step may end.

The tree compares ids. Where something begins that the ids do not tell (a mark of kvasir.inputs), the key has a number
below every id in the place of the id. The number stands for the mark and the id together, and no other ever gets it:
so equal keys mean equal keys and values, and one number separates all that comes after it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from kvasir.inputs import Source, marks
from kvasir.kv.node import ID_BYTES
from kvasir.plan import Adapted
from kvasir.types import Request

FIRST = -2  # -1 names blocks of fixed kinds in a tier
LAST = -(2**31)


class Numbers:
    """The numbers of marks. Remembers the `most` used last; what is forgotten gets another number, and hits nothing."""

    def __init__(self, most: int = 1 << 16):
        self._numbers: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._most = most
        self._next = FIRST

    def of(self, token: int, mark: bytes) -> int:
        number = self._numbers.pop((token, mark), None)
        if number is None:
            assert self._next >= LAST, "the numbers of marks are used up"  # a new process has all of them again
            number, self._next = self._next, self._next - 1
            if len(self._numbers) >= self._most:
                self._numbers.popitem(last=False)
        self._numbers[token, mark] = number
        return number


class Content:
    """Of a sequence: what it is computed from, and what the prefix tree calls that.

    adapted: the adapters by the runner's ids. sources: by content. namespace: of the tree. prompt: the prompt's key.
    prefix_key: namespace and first block; who has an equal one begins alike.
    """

    __slots__ = (
        *("_given", "_marks", "_numbers", "adapted", "prefix_key", "inputs"),
        *("namespace", "prompt", "sources", "wholes"),
    )

    def __init__(
        self, request: Request, adapted: tuple[Adapted, ...], numbers: Numbers, namespace: bytes, block_size: int
    ):
        self.inputs, self.adapted = request.inputs, adapted
        self.sources = {source.content: source for source in request.sources}
        self.wholes = tuple(s for s in request.inputs.spans if s.both_ways)
        self._marks, self._numbers = marks(request.inputs, request.adapters), numbers
        self._given: dict[int, int] = {}  # a sequence's key never changes, whatever the numbers forget
        self.namespace = namespace
        self.prompt = self.key(array("i", request.prompt_ids))
        self.prefix_key = namespace + self.prompt[: block_size * ID_BYTES]

    def key(self, tokens: array[int]) -> bytes:
        """The prefix tree's key of the first tokens of the sequence, as long as they are."""
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
        """What must be there of an encoder where a sequence is computed from `start` on, with the positions that read
        it, in ascending order."""
        if self.inputs.encoded and not start:  # the first step writes all of it into the cache
            yield 0, self.sources[self.inputs.encoded]
        for span in self.inputs.spans:
            if span.end > start:
                yield span.start, self.sources[span.content]

    def stop(self, end: int) -> int:
        """The last position up to `end` before which a step, or what is taken from elsewhere, may end."""
        return next((span.start for span in self.wholes if span.start < end < span.end), end)

    def whole(self, start: int) -> int:
        """Tokens that must be computed together where a step begins at `start`; 1 as a rule."""
        return next((span.length for span in self.wholes if span.start == start), 1)
