"""The memory of a program: one arena for the values of a step, and all other arrays that its structures point to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvasir.program.lower import Buffer


class ProgramMemory:
    """Memory whose addresses stay valid for the lifetime of this object. arena: bytes. kept: objects that it keeps
    alive. lender: a memory whose arena is used too if it is large enough, by steps that never run at the same time."""

    def __init__(self, arena: int, lender: ProgramMemory | None = None):
        self._borrows = lender is not None and lender.arena.nbytes >= arena
        self.arena = lender.arena if lender is not None and self._borrows else aligned(arena)
        self._base = self.arena.ctypes.data
        self.kept: list[Any] = []

    def at(self, buffer: Buffer) -> int:
        """The address of a buffer."""
        return self._base + buffer.offset

    def view(self, buffer: Buffer, count: int) -> np.ndarray:
        """The first `count` rows of a buffer, float32 [count, width]."""
        flat = self.arena[buffer.offset : buffer.offset + count * buffer.row_bytes]
        return flat.view(np.float32).reshape(count, -1)

    def vector(self, values: Any) -> int:
        """The address of an array's values as contiguous float32."""
        array = np.ascontiguousarray(values, np.float32)
        self.kept.append(array)
        return array.ctypes.data

    def array(self, dtype: Any, count: int) -> int:
        """The address of a new array of `count` zeros."""
        array = np.zeros(count, dtype)
        self.kept.append(array)
        return array.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena, if it is not another memory's, and of all kept arrays."""
        return self.arena.nbytes * (not self._borrows) + sum(array.nbytes for array in _arrays(self.kept))


def aligned(size: int) -> np.ndarray:
    """An uninitialised byte array whose address is a multiple of 4096."""
    raw = np.empty(size + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + size]


def _arrays(kept: Sequence[Any]) -> Iterator[np.ndarray]:
    for item in kept:
        if isinstance(item, np.ndarray):
            yield item
        elif isinstance(item, list):
            yield from _arrays(item)
