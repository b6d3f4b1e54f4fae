"""JointTier: an engine's own tier and what others offer, as one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from kvasir.kv.tiers.block import Block
from kvasir.kv.tiers.connector import Bytes, Failed, KVConnector, TierStats
from kvasir.kv.tiers.peer import PeerServer


class JointTier:
    """A KVConnector over `tiers` of equal facts, which it owns: a part is saved to the first and loaded from the first
    that has it. server: offers the first to other engines; it ends before its tier does."""

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

    def wants(self, key: bytes, group: int) -> bool:
        return self._tiers[0].wants(key, group)

    def start_load(self, block: Block, group: int = 0) -> int:
        last = len(self._tiers) - 1
        at = next((i for i, tier in enumerate(self._tiers) if tier.has((block.key,), group)), last)
        return self._tiers[at].start_load(block, group) * len(self._tiers) + at

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

    def stats(self) -> TierStats:
        """Sums; the rate is the slowest of those known."""
        stats = [tier.stats() for tier in self._tiers]
        return TierStats(
            loads=dict(sum((Counter(s.loads) for s in stats), Counter())),
            saves=stats[0].saves,
            bytes_loaded=sum(s.bytes_loaded for s in stats),
            bytes_saved=stats[0].bytes_saved,
            evicted=stats[0].evicted,
            read_rate=min((s.read_rate for s in stats if s.read_rate), default=0.0),
            open_loads=sum(s.open_loads for s in stats),
            open_bytes=sum(s.open_bytes for s in stats),
            queued_bytes=stats[0].queued_bytes,
            num_parts=stats[0].num_parts,
            num_bytes=stats[0].num_bytes,
        )

    def close(self, timeout: float = 5.0) -> None:
        if self._server:
            self._server.close()
        for tier in reversed(self._tiers):
            tier.close(timeout)
