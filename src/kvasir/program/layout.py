"""The memory of a program: one arena for the values of a step, and whatever else its structures point to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvasir.program.lower import Buffer


class Layout:
    """Addresses that stay as long as it lives. kept: what it keeps alive."""

    def __init__(self, arena: int):
        self.arena = aligned(arena)
        self._base = self.arena.ctypes.data
        self.kept: list[Any] = []

    def at(self, buffer: Buffer) -> int:
        return self._base + buffer.offset

    def view(self, buffer: Buffer, count: int) -> np.ndarray:
        """Float32 [count, width]: the first rows."""
        flat = self.arena[buffer.offset : buffer.offset + count * buffer.row_bytes]
        return flat.view(np.float32).reshape(count, -1)

    def vector(self, tensor: Any) -> int:
        """Where a copy as float32 lies."""
        array = np.ascontiguousarray(tensor.float().numpy())
        self.kept.append(array)
        return array.ctypes.data

    def array(self, dtype: Any, count: int) -> int:
        """Where so many zeros lie."""
        array = np.zeros(count, dtype)
        self.kept.append(array)
        return array.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self.arena.nbytes + sum(array.nbytes for array in _arrays(self.kept))


def aligned(size: int) -> np.ndarray:
    """Uninitialised bytes that begin at a multiple of 4096."""
    raw = np.empty(size + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + size]


def _arrays(kept: Sequence[Any]) -> Iterator[np.ndarray]:
    for item in kept:
        if isinstance(item, np.ndarray):
            yield item
        elif isinstance(item, list):
            yield from _arrays(item)
