"""KVConnector: what the engine sees of a tier. Every call returns at once; disks and peers wait in threads.

The life of a load:

    ask(keys) -> bool       whether all is known that can be; who must be asked is being asked
    has(keys) -> n          from memory alone, and perhaps too few
    start_load -> ticket    queued
    poll(ticket)            None ... None, then once the bytes or Failed; the ticket is gone
    cancel(ticket)          at any time before that

A load that fails, for whatever reason, means that the tokens are computed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.kv.tiers.block import Block, Facts, Name
from kvasir.types import TierStats

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there are no bytes: a reason of record.Unusable."""

    reason: str


class KVConnector(Protocol):
    """Safe to call from several threads. name: what kind of tier it is, in one word."""

    name: str
    facts: Facts

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Whether `has` says of these keys all that can be known. False: someone is being asked, and did not answer
        within the timeout."""
        ...

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """How many of the leading `keys` can be loaded, as far as is known without asking anybody."""
        ...

    def read_seconds(self, names: Sequence[Name]) -> float:
        """How long loading these parts takes, after what is open; 0 where that is not known, or next to nothing."""
        ...

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """Whether a part of this name would be kept: it is not there yet, and reading it may be expected to pay.
        pace: bytes a second that computing makes of such blocks, 0 for unknown. depth: blocks before it."""
        ...

    def start_load(self, block: Block, group: int = 0) -> int:
        """Begins to load one part; returns its ticket, to be polled to its end or cancelled."""
        ...

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """The part's bytes, checked and read-only; Failed; or None: not yet. A thread that may wait gives a timeout."""
        ...

    def cancel(self, ticket: int) -> None:
        """Forgets a ticket, finished or not."""
        ...

    def save(self, block: Block, group: int, payload: Bytes) -> bool:
        """Hands over one part, which no one may write to from now on; False when it will not be kept."""
        ...

    def ending(self) -> None:
        """The engine computes no more: what is saved from now on takes no one's time."""
        ...

    def stats(self) -> TierStats: ...

    def each(self) -> dict[str, TierStats]:
        """By name, of the tiers that this one consists of."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Ends the threads. What is queued to be saved is written until the timeout; open loads fail."""
        ...
