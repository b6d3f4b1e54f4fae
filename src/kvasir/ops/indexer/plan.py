"""Where a step's rows and their sequences lie, for ops that read all earlier tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvasir.plan import Work


@dataclass(frozen=True, slots=True)
class Walked:
    """A work of a step. first: its first token row. start, count: its positions. blocks: int64, those that hold all
    positions up to its last. block_size: in tokens."""

    first: int
    start: int
    count: int
    blocks: np.ndarray
    block_size: int

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.count


def walked_rows(
    works: Sequence[Work], starts: Sequence[int] | np.ndarray, tables: Sequence[np.ndarray] | np.ndarray, size: int
) -> tuple[Walked, ...]:
    """starts, tables: as in plan_attention. size: of a block."""
    assert not any(work.indivisible for work in works), "an indexer cannot select later tokens"
    return tuple(
        Walked(int(first), work.start, work.count, tables[work.row][: -(-work.end // size)].astype(np.int64), size)
        for work, first in zip(works, starts, strict=False)
    )
