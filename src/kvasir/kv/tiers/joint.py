"""JointTier: an engine's own tiers and those of its peers, combined into one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvasir.kv.tiers.block import Name, StoredBlock
from kvasir.kv.tiers.connector import Bytes, Failed, KVConnector
from kvasir.statistics import TierStats


class Server(Protocol):
    """What offers a tier to other engines."""

    def close(self) -> None: ...


class JointTier:
    """A KVConnector over `tiers` with equal facts, which it owns. A part is saved to the first tier and loaded from the
    first tier that has it. Tiers are closed in this order. server: offers one of the tiers to other engines; it is
    closed before the tiers."""

    name = "joint"

    def __init__(self, tiers: Sequence[KVConnector], server: Server | None = None):
        self.facts = tiers[0].facts
        self._tiers = tuple(tiers)
        self._server = server

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Asks each tier for the keys that no earlier tier has."""
        deadline = time.monotonic() + timeout
        settled = True
        for tier in self._tiers:
            settled &= tier.ask(keys, group, max(0.0, deadline - time.monotonic()))
            keys = [key for key in keys if not tier.has((key,), group)]
        return settled

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """The number of leading `keys` that at least one tier has."""
        for i, key in enumerate(keys):
            if not any(tier.has((key,), group) for tier in self._tiers):
                return i
        return len(keys)

    def read_seconds(self, names: Sequence[Name]) -> float:
        """The sum over the tiers that the parts are loaded from."""
        whose: dict[int, list[Name]] = {}
        for name in names:
            whose.setdefault(self._first(*name), []).append(name)
        return sum(self._tiers[at].read_seconds(own) for at, own in whose.items())

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """Whether the first tier wants the part."""
        return self._tiers[0].wants(key, group, pace, depth)

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """Begins a load from the first tier that has the part."""
        at = self._first(block.key, group)
        return self._tiers[at].start_load(block, group) * len(self._tiers) + at

    def _first(self, key: bytes, group: int) -> int:
        """The index of the first tier that has a part; the last one if none has it."""
        last = len(self._tiers) - 1
        return next((i for i, tier in enumerate(self._tiers) if tier.has((key,), group)), last)

    def _at(self, ticket: int) -> tuple[KVConnector, int]:
        """The tier of a ticket, and the ticket's number there."""
        number, at = divmod(ticket, len(self._tiers))
        return self._tiers[at], number

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """See KVConnector.poll."""
        tier, number = self._at(ticket)
        return tier.poll(number, timeout)

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        tier, number = self._at(ticket)
        tier.cancel(number)

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """Saves to the first tier."""
        return self._tiers[0].save(block, group, payload)

    def ending(self) -> None:
        """Passes the announcement on to all tiers."""
        for tier in self._tiers:
            tier.ending()

    def stats(self) -> TierStats:
        """Sums over the tiers; the rate is the lowest known one."""
        stats = [tier.stats() for tier in self._tiers]
        return TierStats(
            loads=dict(sum((Counter(s.loads) for s in stats), Counter())),
            saves=dict(sum((Counter(s.saves) for s in stats), Counter())),
            bytes_loaded=sum(s.bytes_loaded for s in stats),
            bytes_saved=sum(s.bytes_saved for s in stats),
            evicted=sum(s.evicted for s in stats),
            read_rate=min((s.read_rate for s in stats if s.read_rate), default=0.0),
            open_loads=sum(s.open_loads for s in stats),
            open_bytes=sum(s.open_bytes for s in stats),
            queued_bytes=sum(s.queued_bytes for s in stats),
            num_parts=sum(s.num_parts for s in stats),
            num_bytes=sum(s.num_bytes for s in stats),
        )

    def each(self) -> dict[str, TierStats]:
        """The stats of all tiers, by name."""
        return {name: stats for tier in self._tiers for name, stats in tier.each().items()}

    def close(self, timeout: float = 5.0) -> None:
        """Closes the server, then the tiers in order, all within the timeout (seconds)."""
        deadline = time.monotonic() + timeout
        if self._server:
            self._server.close()
        for tier in self._tiers:
            tier.close(max(0.0, deadline - time.monotonic()))
