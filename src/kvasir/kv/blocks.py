"""The block tables of one sequence, one per cache group, and the pools below them.

position   0      16     32     48     64
table      [ b3 ][ b9 ][ b4 ][ b7 ]           block_size 16
           |<- out of the window: returned, entry 0
"""

from __future__ import annotations

from kvasir.caches import Kind
from kvasir.kv.pool import SCRATCH, BlockPool

UNBOUNDED = 2**30  # tokens, more than any sequence has


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockTable:
    """Blocks of one sequence in one cache group. Owns one count of each of its blocks.

    kind: of the group's caches; it says where blocks lie in the sequence.
    """

    __slots__ = ("_fixed", "_forgets", "block_size", "ids", "kind", "pool")

    def __init__(self, pool: BlockPool, block_size: int, kind: Kind):
        self.pool = pool
        self.block_size = block_size
        self.kind = kind
        self.ids: list[int] = []
        self._fixed, self._forgets = kind.fixed, kind.forgets  # asked in every step

    def missing(self, num_tokens: int) -> int:
        """How many blocks must be taken so that positions [0, num_tokens) have a place."""
        missing = -(-(self._fixed or num_tokens) // self.block_size) - len(self.ids)
        return missing if missing > 0 else 0

    def room(self, num_tokens: int) -> int:
        """How many tokens after the first `num_tokens` have a place."""
        return UNBOUNDED if self._fixed else len(self.ids) * self.block_size - num_tokens

    def extend(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Takes the missing blocks; returns (first new index, new ids)."""
        first, missing = len(self.ids), self.missing(num_tokens)
        if not missing:
            return first, ()
        new = self.pool.take(missing)
        self.ids += new
        return first, tuple(new)

    def trim(self, computed: int) -> None:
        """Returns blocks that no position from `computed` on can see."""
        if not self._forgets:
            return
        dead = self.kind.first(computed, self.block_size)
        for i in range(min(dead, len(self.ids)) - 1, -1, -1):
            if self.ids[i] == SCRATCH:
                break
            self.pool.release((self.ids[i],))
            self.ids[i] = SCRATCH

    def next_trim(self, computed: int) -> int:
        """So many tokens may be computed, after `computed`, before `trim` has anything to return."""
        if not self._forgets:
            return UNBOUNDED
        dead, most = self.kind.first(computed, self.block_size), computed + self.block_size
        rises = (n for n in range(computed + 1, most) if self.kind.first(n, self.block_size) > dead)
        return next(rises, most)

    def adopt(self, ids: list[int]) -> None:
        """This empty table becomes one more holder of cached blocks, SCRATCH where it can do without."""
        assert not self.ids, "a table with blocks adopts others"
        self.ids = list(ids)
        self.pool.share(b for b in ids if b != SCRATCH)

    def make_own(self, num_tokens: int) -> tuple[int, int] | None:
        """Before writing at position `num_tokens`: replaces the partly filled last block by an own copy.

        Returns (source, target) to be copied before the step's forward, or None when the position opens a new block or
        is not written to at all.
        The source keeps its content until then: its next owner writes in a forward, after all copies.
        """
        index = num_tokens // self.block_size
        if self._fixed or num_tokens % self.block_size == 0 or index >= len(self.ids):
            return None
        source = self.ids[index]
        assert source != SCRATCH, "the block to be written has left the window"
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
        return tuple([t.extend(num_tokens) for t in self.tables])

    def room(self, num_tokens: int) -> int:
        """How many tokens after the first `num_tokens` have a place in all tables."""
        return min([t.room(num_tokens) for t in self.tables])

    def next_trim(self, computed: int) -> int:
        """See BlockTable."""
        return min([t.next_trim(computed) for t in self.tables])

    def whole(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The tables in full, in the form `extend` gives additions."""
        return tuple((0, tuple(t.ids)) for t in self.tables)

    def trim(self, computed: int) -> None:
        for table in self.tables:
            table.trim(computed)

    @property
    def block_size(self) -> int:
        return self.tables[0].block_size

    @property
    def ids(self) -> tuple[list[int], ...]:
        return tuple(t.ids for t in self.tables)

    def make_own(self, num_tokens: int) -> list[tuple[int, int, int]]:
        copies = ((g, t.make_own(num_tokens)) for g, t in enumerate(self.tables))
        return [(g, *pair) for g, pair in copies if pair]

    def release(self) -> None:
        for table in self.tables:
            table.release()
