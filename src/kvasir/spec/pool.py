"""Earlier answers to one key, in bounded memory: what followed some ids there may follow them again (suffix decoding,
https://arxiv.org/abs/2411.04975). Agents and batches repeat whole passages from one answer to the next.

The ids lie in a ring. Chains lead from three ids to the places where they occurred, most recent first, as in the window
of LZ77 (RFC 1951, section 4); a match is extended to the left as far as it goes. So a search costs a few steps whatever
the size, and an id costs twelve bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

from kvasir.spec.lookup import LONGEST

LEAST = 3  # ids that must match
CANDIDATES = 8  # places that are compared, the most recent ones
END = -1  # follows each answer: no match crosses it
SIZE = 1 << 16  # ids of a key
KEYS = 64  # keys with a pool: 48 MiB in all
WAITING = 1 << 18  # ids of answers that are not indexed yet; more are dropped, oldest first


class Pool:
    """size: ids that it keeps, a power of two."""

    def __init__(self, size: int = SIZE):
        self._mask = size - 1
        self._ids = array("i", [END]) * size
        self._earlier = array("i", [-1]) * size  # the place before with the same chain, -1 for none
        self._latest = array("i", [-1]) * size  # by chain
        self._end = 0  # ids added, of which the last `size` are kept

    def _chain(self, a: int, b: int, c: int) -> int:
        return ((a * 0x9E3779B1) ^ (b * 0x85EBCA6B) ^ (c * 0xC2B2AE35)) >> 7 & self._mask

    def add(self, ids: Sequence[int]) -> None:
        """Adds an answer, of a long one only the end."""
        answer = ids[-(self._mask // 2) :]
        self.extend(answer, 0, len(answer))

    def extend(self, answer: Sequence[int], start: int, end: int) -> None:
        """Adds the part [start, end) of an answer, right after what comes before it. It is over with its last id."""
        if len(answer) <= LEAST:
            return
        for at in range(start, end):
            self._put(answer[at])
            if at >= LEAST - 1:
                chain = self._chain(*answer[at - 2 : at + 1])
                self._earlier[(self._end - 1) & self._mask] = self._latest[chain]
                self._latest[chain] = self._end - 1
        if end < len(answer):
            return
        self._put(END)
        if self._end >= 1 << 30:  # places are int32
            self.__init__(self._mask + 1)

    def _put(self, token: int) -> None:
        place = self._end & self._mask
        self._ids[place], self._earlier[place] = token, -1
        self._end += 1

    def continuation(self, ids: array[int], most: int) -> tuple[array[int], int]:
        """As `lookup.continuation`, from the earlier answers."""
        if len(ids) < LEAST:
            return array("i"), 0
        found, longest = -1, LEAST - 1
        place, oldest = self._latest[self._chain(*ids[-LEAST:])], self._end - self._mask
        for _ in range(CANDIDATES):
            if place < max(oldest, 0):
                break
            length = self._matching(ids, place, oldest)
            if length > longest:
                found, longest = place, length
            place = self._earlier[place & self._mask]
        copied = self._after(found + 1, min(found + 1 + most, self._end)) if found >= 0 else array("i")
        return copied, longest if copied else 0

    def _after(self, begin: int, end: int) -> array[int]:
        """The ids of an answer from place `begin` on, at most to `end`."""
        first, last = begin & self._mask, end & self._mask
        part = self._ids[first:last] if first <= last else self._ids[first:] + self._ids[:last]
        return part[: part.index(END)] if END in part else part

    def _matching(self, ids: array[int], place: int, oldest: int) -> int:
        """How many ids up to `place` equal those at the end of `ids`, at most LONGEST."""
        most, length = min(LONGEST, len(ids), place - oldest + 1), 0
        while length < most and self._ids[(place - length) & self._mask] == ids[-1 - length]:
            length += 1
        return length


class Pools:
    """The pools of the keys that were used last; no key sees another's. An id takes about a microsecond to index, so
    answers wait for that until there is time.

    waiting: ids that are not indexed yet."""

    def __init__(self, keys: int = KEYS, size: int = SIZE):
        self._keys, self._size = keys, size
        self._pools: OrderedDict[tuple[str, str], Pool] = OrderedDict()
        self._answers: deque[tuple[tuple[str, str], Sequence[int]]] = deque()
        self._indexed = 0  # ids of the first answer
        self.waiting = 0

    def of(self, key: tuple[str, str]) -> Pool | None:
        """The key's pool, None if it has none yet."""
        return self._pools.get(key)

    def add(self, key: tuple[str, str], ids: Sequence[int]) -> None:
        """Takes an answer to the key; `index` adds it to the key's pool."""
        answer = ids[-((self._size - 1) // 2) :]
        if len(answer) <= LEAST:
            return
        self._answers.append((key, answer))
        self.waiting += len(answer)
        while self.waiting > WAITING and len(self._answers) > 2:
            _, dropped = self._answers[1]  # the first may be indexed in part
            del self._answers[1]
            self.waiting -= len(dropped)

    def index(self, most: int) -> int:
        """Indexes at most so many ids of the answers that wait; returns how many."""
        done = 0
        while self._answers and done < most:
            key, answer = self._answers[0]
            end = min(len(answer), self._indexed + most - done)
            self._of(key).extend(answer, self._indexed, end)
            done += end - self._indexed
            self._indexed = end
            if end == len(answer):
                self._answers.popleft()
                self._indexed = 0
        self.waiting -= done
        return done

    def _of(self, key: tuple[str, str]) -> Pool:
        """The key's pool, as the one used last."""
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(self._size)
        self._pools.move_to_end(key)
        while len(self._pools) > self._keys:
            self._pools.popitem(last=False)
        return pool
