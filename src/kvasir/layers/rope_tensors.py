"""The angles of rotary embeddings as tensors, for the eager executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir.layers.rope import Angles, Rope
from kvasir.plan import Work

_FIRST_ROWS = 1024


class AngleTensors:
    """cos and sin of a rotary embedding on a device: float32 [length, dim / 2] each. On the CPU they are the memory of
    `Angles`, elsewhere copies of the rows that are computed."""

    def __init__(self, rope: Rope, length: int, device: torch.device | str):
        self.length, self.device = length, torch.device(device)
        self._angles = Angles(rope, length)
        self._host = torch.from_numpy(self._angles.cos), torch.from_numpy(self._angles.sin)
        shared = self.device.type == "cpu"
        self.cos, self.sin = self._host if shared else (torch.zeros_like(t, device=device) for t in self._host)
        self._shared = shared
        self._copy(slice(0, self._angles.until))

    def fill(self, start: int, end: int) -> None:
        """See Angles.fill."""
        for rows in self._angles.fill(start, end):
            self._copy(rows)

    def _copy(self, rows: slice) -> None:
        if not self._shared:
            for there, here in zip((self.cos, self.sin), self._host, strict=True):
                there[rows] = here[rows].to(self.device)


def angles_of(rope: Rope, positions_T: Tensor, works: Sequence[Work]) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, dim / 2]. positions: int64, each within one of the works, or 0."""
    end, tables = max(work.end for work in works), rope.tensors
    if tables is None or end > tables.length or tables.device != positions_T.device:
        tables = reserve(rope, max(_FIRST_ROWS, 1 << (end - 1).bit_length()), positions_T.device)
    for work in works:
        tables.fill(work.start, work.end)
    return tables.cos[positions_T], tables.sin[positions_T]


def reserve(rope: Rope, length: int, device: torch.device) -> AngleTensors:
    """Allocates the tables for all positions below `length`, so that steps need not allocate."""
    rope.tensors = AngleTensors(rope, length, device)
    return rope.tensors
