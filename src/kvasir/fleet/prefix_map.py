"""What is known of a replica's prefix cache: the hashes of its blocks, and of those that routed requests will add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kvasir import inputs
from kvasir.kv.changes import CacheChanges, chain
from kvasir.sched.admission import namespace
from kvasir.types import Request

MOST_BLOCKS = 1 << 18  # of a replica; about 100 bytes each
MOST_KEYS = 1 << 12  # blocks of a request that are looked up


class PrefixMap:
    """Mirrors one cache. most: blocks that it remembers; it predicts less if there are more.

    dropped: blocks that it had no room for. gaps: how often changes were missing. block_size: in tokens, 0 as long as
    nothing is known."""

    def __init__(self, most: int = MOST_BLOCKS):
        self._most = most
        self._blocks: set[bytes] = set()
        self._promised: Counter[bytes] = Counter()
        self._number = 0
        self.block_size = 0
        self.dropped = self.gaps = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def forget(self) -> None:
        """The cache is gone; a snapshot must come before other changes."""
        self._blocks.clear()
        self._number = self.block_size = 0

    def take(self, changes: CacheChanges) -> bool:
        """Applies changes. False if some are missing: then nothing is known until a snapshot comes."""
        if changes.snapshot:
            self.forget()
        elif changes.number != self._number + 1 or not self.block_size:
            self.gaps += bool(self.block_size)
            self.forget()
            return False
        self._number, self.block_size = changes.number, changes.block_size
        for run in changes.runs:
            if not run.stored:
                self._blocks.difference_update(run.each())
                continue
            new = list(islice(run.each(), max(0, self._most - len(self._blocks))))
            self.dropped += len(list(run.each())) - len(new)
            self._blocks.update(new)
        return True

    def promise(self, keys: Sequence[bytes], sign: int = 1) -> None:
        """Counts the blocks of a request that will be computed there, or (-1) no longer."""
        for key in keys:
            self._promised[key] += sign
            if not self._promised[key]:
                del self._promised[key]

    def cached(self, keys: Sequence[bytes]) -> int:
        """Leading blocks of a request that are in the cache, or will be."""
        for i, key in enumerate(keys):
            if key not in self._blocks and key not in self._promised:
                return i
        return len(keys)


def keys_of(request: Request, ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of the full blocks of a request with these ids, those that the prefix tree of its engine has for them;
    [] if it shares no prefixes. At least one id is left to compute."""
    if request.no_cache or not block_size:
        return []
    begins = inputs.marks(request.inputs, request.adapters)
    found = chain(namespace(request, False), ids[: len(ids) - 1], begins, block_size)
    return list(islice(found, MOST_KEYS))
