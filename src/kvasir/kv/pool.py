"""BlockPool: the sole owner of block ids and their reference counts.

The states of a block:

    free  --take-->  held (count 1)  --share-->  held (count n)  --release (n times)-->  free

The prefix tree is a special holder: it owns at most one reference to a block, and a block that only the tree holds is
*idle*: it can be evicted at any time, at the cost of its cached content.

    held (n)  --keep-->  held and cached (n + 1)  --release (n times)-->  idle  --share-->  held and cached
                                                                          idle  --forget-->  free

Block 0 (scratch) is never allocated: the runner writes the keys and values of padding rows there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SCRATCH = 0


class BlockPool:
    """`num_blocks` blocks; id 0 is scratch. Only take, share, release, keep and forget change the state. Raises
    ValueError for fewer than 2 blocks."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is scratch), got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH, -1))
        self._count = [0] * num_blocks
        self._cached = bytearray(num_blocks)  # 1: the prefix tree owns one of the references
        self._idle = 0
        self.idled = 0  # how often a block has become idle by a release

    @property
    def total(self) -> int:
        """Blocks that can be allocated: all except scratch."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    @property
    def free_ids(self) -> frozenset[int]:
        """The ids of the blocks without a holder. Takes time proportional to their number."""
        return frozenset(self._free)

    @property
    def idle(self) -> int:
        """Blocks that only the prefix tree holds."""
        return self._idle

    @property
    def cached(self) -> int:
        """Blocks in the prefix tree, idle or held."""
        return self._cached.count(1)

    @property
    def cached_flags(self) -> bytes:
        """For each block id, 1 if the prefix tree holds it, else 0."""
        return bytes(self._cached)

    @property
    def available(self) -> int:
        """Blocks that are free or idle."""
        return len(self._free) + self._idle

    @property
    def used(self) -> int:
        """Blocks with a holder other than the prefix tree."""
        return self.total - self.available

    def take(self, n: int) -> list[int]:
        """Allocates `n` free blocks with a reference count of 1. The caller has checked `free`."""
        assert 0 <= n <= len(self._free), f"take({n}) of {len(self._free)} free blocks"
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._count[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of the blocks, which are held or cached."""
        count, cached = self._count, self._cached
        for block in blocks:
            assert count[block] > 0, f"share of free block {block}"
            if count[block] == 1 and cached[block]:
                self._idle -= 1
            count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops a reference to each of the blocks. A block without references becomes free; a block that only the
        prefix tree holds becomes idle."""
        count, cached = self._count, self._cached
        for block in blocks:
            assert count[block] > cached[block], f"release of block {block}, which is not held"
            count[block] -= 1
            if count[block] == 0:
                self._free.append(block)
            elif count[block] == 1 and cached[block]:
                self._idle += 1
                self.idled += 1

    def keep(self, blocks: Iterable[int]) -> None:
        """Adds the prefix tree's reference to each of the blocks, which must have another holder. Skips scratch."""
        count, cached = self._count, self._cached
        for block in blocks:
            if block != SCRATCH:
                held = count[block]
                assert held and not cached[block], f"keep of block {block}, which is free or cached already"
                count[block] = held + 1
                cached[block] = 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops the prefix tree's reference to each of the blocks; idle blocks become free. Skips scratch."""
        for block in blocks:
            if block != SCRATCH:
                assert self._cached[block], f"forget of block {block}, which is not cached"
                self._cached[block] = 0
                self._count[block] -= 1
                if self._count[block] == 0:
                    self._idle -= 1
                    self._free.append(block)

    def is_idle(self, block: int) -> bool:
        """Whether the prefix tree is the only holder of a block. Always false for scratch."""
        return self._count[block] == 1 and self._cached[block] == 1

    def check(self, holders: Iterable[Sequence[int]], cached: Iterable[Sequence[int]] = ()) -> None:
        """Recomputes every reference count from the block ids of all `holders` and of the prefix tree (`cached`).
        Raises AssertionError with the first difference."""
        expected = Counter(block for blocks in holders for block in blocks if block != SCRATCH)
        kept = Counter(block for blocks in cached for block in blocks if block != SCRATCH)
        for block in range(1, self.num_blocks):
            assert kept[block] == self._cached[block], f"block {block} is in the tree {kept[block]} times"
            count = expected[block] + kept[block]
            assert self._count[block] == count, f"block {block} counts {self._count[block]} holders, {count} hold it"
        idle = kept.keys() - expected.keys()
        assert self._idle == len(idle), f"{self._idle} blocks count as idle, {len(idle)} are"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert SCRATCH not in free and not (free & set(expected)), "a held block is free"
        assert len(free) + len(expected.keys() | kept.keys()) == self.total, "blocks are lost"
