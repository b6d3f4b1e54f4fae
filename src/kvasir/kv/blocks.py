"""The block tables of one sequence, one per cache group, and the pools behind them.

position   0      16     32     48     64
table      [ b3 ][ b9 ][ b4 ][ b7 ]           block_size 16
           |<- behind the window: returned, entry 0
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.kv.pool import SCRATCH, BlockPool
from kvasir.plan import CacheGroup, Capacity


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockTable:
    """Blocks of one sequence in one cache group. Owns one count of each of its blocks."""

    __slots__ = ("block_size", "ids", "pool", "window")

    def __init__(self, pool: BlockPool, block_size: int, window: int = 0, ids: list[int] | None = None):
        self.pool = pool
        self.block_size = block_size
        self.window = window
        self.ids: list[int] = ids if ids is not None else []

    def missing(self, num_tokens: int) -> int:
        """How many blocks must be taken so that positions [0, num_tokens) have a place."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(self.ids))

    def extend(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Takes the missing blocks; returns (first new index, new ids)."""
        first = len(self.ids)
        new = self.pool.take(self.missing(num_tokens))
        self.ids += new
        return first, tuple(new)

    def trim(self, computed: int) -> None:
        """Returns blocks that no position from `computed` on can see: a query at p sees keys in (p - window, p]."""
        if not self.window:
            return
        dead = max(0, computed - self.window + 1) // self.block_size
        for i in range(min(dead, len(self.ids)) - 1, -1, -1):
            if self.ids[i] == SCRATCH:
                break
            self.pool.release((self.ids[i],))
            self.ids[i] = SCRATCH

    def fork(self, num_tokens: int) -> BlockTable:
        """A second table over the blocks that hold positions [0, num_tokens), each shared."""
        ids = self.ids[: blocks_for(num_tokens, self.block_size)]
        self.pool.share(b for b in ids if b != SCRATCH)
        return BlockTable(self.pool, self.block_size, self.window, ids)

    def make_own(self, num_tokens: int) -> tuple[int, int] | None:
        """Before writing at position `num_tokens`: replaces the partly filled last block by an own copy.

        Returns (source, target) to be copied before the step's forward, or None when the position opens a new block.
        The source keeps its content until then: whoever gets it next writes in a forward, after all copies.
        """
        index = num_tokens // self.block_size
        if num_tokens % self.block_size == 0 or index >= len(self.ids):
            return None
        source = self.ids[index]
        assert source != SCRATCH, "the block to be written lies behind the window"
        (target,) = self.pool.take(1)
        self.ids[index] = target
        self.pool.release((source,))
        return source, target

    def release(self) -> None:
        self.pool.release(b for b in self.ids if b != SCRATCH)
        self.ids = []


class SequenceBlocks:
    """All tables of a sequence: one handle, released as a whole."""

    __slots__ = ("tables",)

    def __init__(self, tables: tuple[BlockTable, ...]):
        self.tables = tables

    def extend(self, num_tokens: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple(t.extend(num_tokens) for t in self.tables)

    def whole(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The tables in full, in the form `extend` gives additions."""
        return tuple((0, tuple(t.ids)) for t in self.tables)

    def trim(self, computed: int) -> None:
        for table in self.tables:
            table.trim(computed)

    def fork(self, num_tokens: int) -> SequenceBlocks:
        return SequenceBlocks(tuple(t.fork(num_tokens) for t in self.tables))

    def make_own(self, num_tokens: int) -> list[tuple[int, int, int]]:
        copies = ((g, t.make_own(num_tokens)) for g, t in enumerate(self.tables))
        return [(g, *pair) for g, pair in copies if pair]

    def release(self) -> None:
        for table in self.tables:
            table.release()


class KVManager:
    """The pools of all cache groups. Holds no list of sequences: handles belong to their sequences."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...], block_size: int):
        assert len(groups) == len(num_blocks)
        self.groups = groups
        self.block_size = block_size
        self.pools = tuple(BlockPool(n) for n in num_blocks)

    @classmethod
    def of(cls, capacity: Capacity) -> KVManager:
        return cls(capacity.groups, capacity.num_blocks, capacity.block_size)

    def new(self) -> SequenceBlocks:
        pairs = zip(self.pools, self.groups, strict=True)
        return SequenceBlocks(tuple(BlockTable(p, self.block_size, g.window) for p, g in pairs))

    def _live(self, group: CacheGroup, num_tokens: int, chunk: int) -> int:
        """Tokens of the group that hold blocks at once when `num_tokens` are computed `chunk` a step."""
        return min(num_tokens, group.window + chunk + self.block_size) if group.window else num_tokens

    def fits(self, blocks: SequenceBlocks, num_tokens: int, chunk: int, spare: int = 0) -> bool:
        """Whether `blocks` can be extended to `num_tokens` now, `chunk` tokens a step, leaving `spare` blocks."""
        return all(
            t.missing(self._live(g, num_tokens, chunk)) + spare <= p.free
            for t, g, p in zip(blocks.tables, self.groups, self.pools, strict=True)
        )

    def can_ever_hold(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of `num_tokens`, computed at most `chunk` a step, fits when it is alone."""
        return all(
            blocks_for(self._live(group, num_tokens, chunk), self.block_size) <= pool.total
            for pool, group in zip(self.pools, self.groups, strict=True)
        )

    @property
    def total(self) -> int:
        return sum(p.total for p in self.pools)

    @property
    def used(self) -> int:
        return sum(p.used for p in self.pools)

    def check(self, holders: Iterable[SequenceBlocks]) -> None:
        """Recomputes all counts from the living handles. Raises AssertionError."""
        held = list(holders)
        for g, pool in enumerate(self.pools):
            pool.check(h.tables[g].ids for h in held)
