"""BlockPool: the sole owner of block ids and their reference counts.

The states of a block:

    free  --take-->  held (count 1)  --share-->  held (count n)  --release (n times)-->  free

Block 0 is never given out: the runner writes the keys and values of padding rows there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SCRATCH = 0


class BlockPool:
    """`num_blocks` blocks, of which id 0 is scratch. Changes only by take, share and release."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is scratch), got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH, -1))
        self._count = [0] * num_blocks

    @property
    def total(self) -> int:
        """Blocks that can be given out."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, n: int) -> list[int]:
        """Gives out `n` free blocks with count 1. The caller has asked `free` before."""
        assert 0 <= n <= len(self._free), f"take({n}) of {len(self._free)} free blocks"
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._count[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of the held blocks."""
        for block in blocks:
            assert self._count[block] > 0, f"share of free block {block}"
            self._count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less; a block without holders is free again."""
        for block in blocks:
            assert self._count[block] > 0, f"release of free block {block}"
            self._count[block] -= 1
            if self._count[block] == 0:
                self._free.append(block)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Recomputes every count from all `holders` and compares. Raises AssertionError naming the first fault."""
        expected = Counter(block for blocks in holders for block in blocks if block != SCRATCH)
        for block in range(1, self.num_blocks):
            assert self._count[block] == expected[block], (
                f"block {block} counts {self._count[block]} holders, {expected[block]} hold it"
            )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert SCRATCH not in free and not (free & set(expected)), "a held block is free"
        assert len(free) + len(expected) == self.total, "blocks are lost"
