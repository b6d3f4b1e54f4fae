"""HostTier: parts of blocks in host memory, for a device with a pool in its own memory.

Parts have no checksum: their bytes never leave this process, and a checksum takes longer than the copy. The whole name
of a part is compared: a block with other ids is a miss.

Parts that no longer fit are passed to the tier below, the least recently used first. When the engine ends, all parts
are passed on, as far as time allows, and parts saved after `ending` go to the tier below directly.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from kvasir.kv.tiers.block import Name, StoredBlock, StoreFacts
from kvasir.kv.tiers.connector import Bytes, Failed, KVConnector
from kvasir.kv.tiers.transfers import HeldLoads, TransferMeter
from kvasir.statistics import TierStats

FALL_BYTES = 64 << 20  # bytes that may wait in the queue of the tier below while the engine ends
FALL_WAIT = 0.005  # seconds between two checks of it


class HostTier:
    """A KVConnector over `max_bytes` of memory. Loads complete at once; their only cost is the copy into the pool.

    below: the tier that evicted parts are passed to; its owner closes it later.
    """

    name = "host"

    def __init__(self, facts: StoreFacts, max_bytes: int, below: KVConnector | None = None):
        self.facts = facts
        self._max_bytes = max_bytes
        self._below = below
        self._meter = TransferMeter()
        self._loads = HeldLoads(self._meter)
        self._lock = threading.Lock()
        self._parts: OrderedDict[Name, tuple[StoredBlock, memoryview]] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._pace = 0.0  # the last known one
        self._ending = False

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Always True: all parts are in this process."""
        return True

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """The number of leading `keys` in memory."""
        return next((i for i, key in enumerate(keys) if (key, group) not in self._parts), len(keys))

    def read_seconds(self, names: Sequence[Name]) -> float:
        """Always 0.0: negligible."""
        return 0.0

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """True for a part that is not in memory; after `ending` the tier below decides."""
        self._pace = pace or self._pace
        if (key, group) in self._parts:
            return False
        return self._below.wants(key, group, pace, depth) if self._ending and self._below else True

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """Finds the part at once, or fails as missing or foreign; see KVConnector.start_load."""
        name = (block.key, group)
        with self._lock:
            held = self._parts.get(name)
            return self._loads.start(block, held[0] if held else None, lambda: self._use(name))

    def _use(self, name: Name) -> memoryview:
        self._parts.move_to_end(name)
        return self._parts[name][1]

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """The result of `start_load`; never None."""
        return self._loads.poll(ticket)

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        self._loads.cancel(ticket)

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """Stores a part and evicts others if needed. False if it is known or larger than the bound. After `ending` the
        part is saved to the tier below."""
        payload = memoryview(payload).cast("B").toreadonly()
        assert self.facts.admits(block, group), "the block belongs to another store"
        assert payload.nbytes == self.facts.groups[group].num_bytes, "a part must have the size that its group declares"
        if self._ending and self._below:
            return self._below.save(block, group, payload)
        with self._lock:
            refusal = self._refusal((block.key, group), payload.nbytes)
            if refusal:
                self._meter.save(refusal)
                return False
            while self._num_bytes + payload.nbytes > self._max_bytes:
                self._fall(next(iter(self._parts)))
                self._meter.evict()
            self._parts[block.key, group] = (block, payload)
            self._num_bytes += payload.nbytes
        self._meter.save("saved", payload.nbytes)
        return True

    def _refusal(self, name: Name, num_bytes: int) -> str:
        if name in self._parts:
            return "known"
        return "large" if num_bytes > self._max_bytes else ""

    def _fall(self, name: Name) -> None:
        """Evicts one part, and saves it to the tier below if that wants it."""
        block, payload = self._parts.pop(name)
        self._num_bytes -= payload.nbytes
        if self._below and self._below.wants(block.key, name[1], self._pace):
            self._below.save(block, name[1], payload)

    def ending(self) -> None:
        """Directs later saves to the tier below."""
        self._ending = True

    def stats(self) -> TierStats:
        """See KVConnector.stats."""
        with self._lock:
            return self._loads.stats(len(self._parts), self._num_bytes)

    def each(self) -> dict[str, TierStats]:
        """See KVConnector.each."""
        return {self.name: self.stats()}

    def close(self, timeout: float = 5.0) -> None:
        """Passes all parts to the tier below, the most recently used first, until the timeout (seconds)."""
        deadline = time.monotonic() + timeout
        while self._below and self._parts and time.monotonic() < deadline:
            if self._below.stats().queued_bytes > FALL_BYTES:
                time.sleep(FALL_WAIT)
            else:
                self._fall(next(reversed(self._parts)))
        self._parts.clear()
        self._num_bytes = 0
