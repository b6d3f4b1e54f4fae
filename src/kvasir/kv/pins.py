"""Pins: prefixes whose blocks are protected from eviction for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from kvasir.kv.pool import SCRATCH, BlockPool

Name = tuple[bytes, bytes]  # namespace, packed ids


@dataclass(slots=True)
class _Pin:
    until: float
    blocks: tuple[list[int], ...]


class Pins:
    """All pins. Owns one reference to each block of a pinned prefix. Reads no clock: `expire` is given the time."""

    def __init__(self, pools: Sequence[BlockPool]):
        self._pools = pools
        self._pins: dict[Name, _Pin] = {}
        self.expiry = inf  # no pin ends earlier

    def add(self, name: Name, blocks: tuple[list[int], ...], until: float) -> None:
        """Pins a prefix until a time. blocks: ids per group, SCRATCH where there is no block. Pinning the same prefix
        again can only extend the time."""
        if name in self._pins:
            self._pins[name].until = max(self._pins[name].until, until)
        else:
            self._pins[name] = _Pin(until, blocks)
            for pool, ids in zip(self._pools, blocks, strict=True):
                pool.share(b for b in ids if b != SCRATCH)
        self.expiry = min(self.expiry, until)

    def expire(self, now: float) -> int:
        """Ends the pins that expire at `now` or earlier (`math.inf`: all pins). Returns how many ended."""
        ended = [name for name, pin in self._pins.items() if pin.until <= now]
        self._end(ended)
        self.expiry = min((pin.until for pin in self._pins.values()), default=inf)
        return len(ended)

    def drop(self, namespace: bytes) -> None:
        """Ends all pins of a namespace."""
        self._end([name for name in self._pins if name[0] == namespace])

    def _end(self, names: Iterable[Name]) -> None:
        for name in names:
            for pool, ids in zip(self._pools, self._pins.pop(name).blocks, strict=True):
                pool.release(b for b in ids if b != SCRATCH)

    def held(self, group: int) -> list[list[int]]:
        """The block ids that each pin holds in a group."""
        return [pin.blocks[group] for pin in self._pins.values()]

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[tuple[Name, tuple[list[int], ...]]]:
        return ((name, pin.blocks) for name, pin in self._pins.items())
