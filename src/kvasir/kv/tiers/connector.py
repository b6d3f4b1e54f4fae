"""KVConnector: the interface between the engine and a tier. Every call returns at once, unless it is given a timeout;
disk and peer I/O runs in threads.

The life of a load:

    ask(keys) -> bool       whether `has` is complete for these keys; if not, the peer is being queried
    has(keys) -> n          from memory alone; may be too low
    start_load -> ticket    queued
    poll(ticket)            None ... None, then once the bytes or Failed; this ends the ticket
    cancel(ticket)          at any time before that

If a load fails, for whatever reason, the tokens are computed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.kv.tiers.block import Name, StoredBlock, StoreFacts
from kvasir.statistics import TierStats

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of a failed load. reason: see record.Unusable."""

    reason: str


class KVConnector(Protocol):
    """A tier. Thread-safe. name: the kind of tier, one word."""

    name: str

    @property
    def facts(self) -> StoreFacts:
        """Of its blocks."""
        ...

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Whether `has` is complete for these keys. False: a peer is being queried and has not responded within the
        timeout (seconds)."""
        ...

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """The number of leading `keys` that can be loaded, as far as is known without querying a peer."""
        ...

    def read_seconds(self, names: Sequence[Name]) -> float:
        """Estimated seconds until these parts are loaded, after all open loads; 0 if unknown or negligible."""
        ...

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """Whether the tier would keep a part of this name: it does not have it yet, and expects reading it to pay.
        pace: bytes per second at which computing produces such blocks, 0 for unknown. depth: blocks before it in the
        sequence."""
        ...

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """Begins to load one part. Returns a ticket, which the caller polls to the end or cancels."""
        ...

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """The part's bytes, verified and read-only; Failed; or None while loading. Waits at most `timeout` seconds."""
        ...

    def cancel(self, ticket: int) -> None:
        """Discards a ticket, finished or not."""
        ...

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """Takes over the payload of one part, which must not be written to any more. False: it is not kept."""
        ...

    def ending(self) -> None:
        """Announces that the engine computes no more steps: later saves slow nothing down."""
        ...

    def stats(self) -> TierStats:
        """Counters and sizes."""
        ...

    def each(self) -> dict[str, TierStats]:
        """The stats of each tier that this one consists of, by name."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Ends the threads. Queued saves are written until the timeout (seconds); open loads fail."""
        ...
