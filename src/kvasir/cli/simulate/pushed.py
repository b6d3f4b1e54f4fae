"""The tier of a simulated replica that computes answers: blocks that another replica has computed and pushed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvasir.kv.tiers.block import GroupFacts, Name, StoredBlock, StoreFacts, chain
from kvasir.kv.tiers.connector import Bytes, Failed
from kvasir.plan import pack_ids
from kvasir.sched.admission import namespace
from kvasir.statistics import TierStats
from kvasir.types import Request

_PART = memoryview(b"\0")  # never read: a simulated machine has no keys and values


class PushedBlocks:
    """A KVConnector whose loads are done at once: a request arrives after its blocks. Each is given out once, since it
    is in the replica's pool afterwards."""

    name = "pushed"

    def __init__(self, block_size: int):
        self.facts = StoreFacts("simulated", "", block_size, (GroupFacts("none", len(_PART)),))
        self._held: set[bytes] = set()
        self._tickets: dict[int, bytes] = {}
        self._numbers = itertools.count()

    def push(self, request: Request) -> None:
        """Takes the full blocks of a prompt."""
        self._held.update(self._keys(request))

    def drop(self, request: Request) -> None:
        """Drops what the replica has not used of a prompt."""
        self._held.difference_update(self._keys(request))

    def _keys(self, request: Request) -> Iterator[bytes]:
        space = namespace(request, False)
        return (block.key for block in chain(space, pack_ids(request.prompt_ids), self.facts.block_size))

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        return True

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        return sum(1 for _ in itertools.takewhile(self._held.__contains__, keys))

    def read_seconds(self, names: Sequence[Name]) -> float:
        return 0.0

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        return False

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        ticket = next(self._numbers)
        self._tickets[ticket] = block.key
        return ticket

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        key = self._tickets.pop(ticket)
        if key not in self._held:
            return Failed("missing")
        self._held.remove(key)
        return _PART

    def cancel(self, ticket: int) -> None:
        self._tickets.pop(ticket, None)

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        return False

    def ending(self) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats()

    def each(self) -> dict[str, TierStats]:
        return {self.name: self.stats()}

    def close(self, timeout: float = 5.0) -> None:
        pass
