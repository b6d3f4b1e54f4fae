"""Scores by relative position, as tables (csrc/attention.h).

Column c of a table stands for `key position - query position` = c - REACH - EDGE, clamped to [-reach, reach]; the EDGE
columns on either side let kernels read a vector of columns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EDGE = 16
MAX_DIM = 256  # of a head, for tables of keys and queries


@dataclass(frozen=True, slots=True, eq=False)
class Relative:
    """Tables of the relative positions from -reach to reach, float32, C-contiguous. A score is
    (q k + q keys + k queries) * scale + bias, where bias is [H, columns], keys and queries are [H, d, columns], and
    each may be None."""

    reach: int
    bias: np.ndarray | None = None
    keys: np.ndarray | None = None
    queries: np.ndarray | None = None

    def __post_init__(self) -> None:
        for table in (self.bias, self.keys, self.queries):
            if table is not None:
                assert table.shape[-1] == columns(self.reach) and table.dtype == np.float32, table.shape
                assert table.flags.c_contiguous


def columns(reach: int) -> int:
    """The number of columns of a table."""
    return 2 * (reach + EDGE)


def expand(table: Any, reach: int, place: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Float32 [.., columns] from a table [.., n]. place: the index in the table of each relative position, key - query,
    int64 -> int64."""
    away = np.clip(np.arange(columns(reach)) - reach - EDGE, -reach, reach)
    return np.ascontiguousarray(np.asarray(table, np.float32)[..., place(away)])
