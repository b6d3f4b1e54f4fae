"""JointTier: an engine's own tiers and what others offer, as one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from kvasir.kv.tiers.block import Block, Name
from kvasir.kv.tiers.connector import Bytes, Failed, KVConnector
from kvasir.kv.tiers.peer import PeerServer
from kvasir.types import TierStats


class JointTier:
    """A KVConnector over `tiers` of equal facts, which it owns: a part is saved to the first and loaded from the first
    that has it. They end in this order. server: offers one of them to other engines; it ends before they do."""

    name = "joint"

    def __init__(self, tiers: Sequence[KVConnector], server: PeerServer | None = None):
        self.facts = tiers[0].facts
        self._tiers = tuple(tiers)
        self._server = server

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        deadline = time.monotonic() + timeout
        settled = True
        for tier in self._tiers:
            settled &= tier.ask(keys, group, max(0.0, deadline - time.monotonic()))
            keys = [key for key in keys if not tier.has((key,), group)]
        return settled

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        for i, key in enumerate(keys):
            if not any(tier.has((key,), group) for tier in self._tiers):
                return i
        return len(keys)

    def read_seconds(self, names: Sequence[Name]) -> float:
        whose: dict[int, list[Name]] = {}
        for name in names:
            whose.setdefault(self._first(*name), []).append(name)
        return sum(self._tiers[at].read_seconds(own) for at, own in whose.items())

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        return self._tiers[0].wants(key, group, pace, depth)

    def start_load(self, block: Block, group: int = 0) -> int:
        at = self._first(block.key, group)
        return self._tiers[at].start_load(block, group) * len(self._tiers) + at

    def _first(self, key: bytes, group: int) -> int:
        """The first tier that has a part; the last when none has."""
        last = len(self._tiers) - 1
        return next((i for i, tier in enumerate(self._tiers) if tier.has((key,), group)), last)

    def _at(self, ticket: int) -> tuple[KVConnector, int]:
        """A ticket says whose it is."""
        number, at = divmod(ticket, len(self._tiers))
        return self._tiers[at], number

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        tier, number = self._at(ticket)
        return tier.poll(number, timeout)

    def cancel(self, ticket: int) -> None:
        tier, number = self._at(ticket)
        tier.cancel(number)

    def save(self, block: Block, group: int, payload: Bytes) -> bool:
        return self._tiers[0].save(block, group, payload)

    def ending(self) -> None:
        for tier in self._tiers:
            tier.ending()

    def stats(self) -> TierStats:
        """Sums; the rate is the slowest of those known."""
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
        return {name: stats for tier in self._tiers for name, stats in tier.each().items()}

    def close(self, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        if self._server:
            self._server.close()
        for tier in self._tiers:
            tier.close(max(0.0, deadline - time.monotonic()))
