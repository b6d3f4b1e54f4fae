"""The per-row arrays of a runner that steps read, at fixed addresses. A sequence keeps its row from joining to
leaving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RowArrays:
    """ids: int32 [rows, ids]. tables: per cache group the block ids, int32 [rows, blocks]; entries entirely before a
    window may be stale. seconds: int32 [rows], the first position of a second text (inputs.Inputs), 0 for none."""

    ids: np.ndarray
    tables: tuple[np.ndarray, ...]
    seconds: np.ndarray

    @classmethod
    def empty(cls, rows: int, ids: int, groups: int, blocks: int) -> RowArrays:
        """Zero-filled arrays. The system allocates memory on first write."""
        tables = tuple(np.zeros((rows, blocks), np.int32) for _ in range(groups))
        return cls(np.zeros((rows, ids), np.int32), tables, np.zeros(rows, np.int32))
