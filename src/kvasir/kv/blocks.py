"""The block tables of one sequence, one per cache group; each takes its blocks from the group's pool.

position   0      16     32     48     64
table      [ b3 ][ b9 ][ b4 ][ b7 ]           block_size 16
           |<- outside the window: released, entry 0
"""

from __future__ import annotations

from kvasir.caches import CacheKind
from kvasir.kv.pool import SCRATCH, BlockPool

UNBOUNDED = 2**30  # tokens; longer than any sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """The block table of one sequence in one cache group. Owns one reference to each of its blocks.

    kind: the cache kind of the group; it defines which blocks a sequence needs.
    """

    __slots__ = ("_fixed", "_forgets", "block_size", "ids", "kind", "pool")

    def __init__(self, pool: BlockPool, block_size: int, kind: CacheKind):
        self.pool = pool
        self.block_size = block_size
        self.kind = kind
        self.ids: list[int] = []
        self._fixed, self._forgets = kind.fixed, kind.forgets  # read in every step

    def missing(self, num_tokens: int) -> int:
        """The number of blocks to take so that the table covers positions [0, num_tokens)."""
        missing = -(-(self._fixed or num_tokens) // self.block_size) - len(self.ids)
        return missing if missing > 0 else 0

    def room(self, num_tokens: int) -> int:
        """The number of tokens after the first `num_tokens` that the table still covers."""
        return UNBOUNDED if self._fixed else len(self.ids) * self.block_size - num_tokens

    def extend(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Takes the missing blocks from the pool. Returns (first new index, new ids)."""
        first, missing = len(self.ids), self.missing(num_tokens)
        if not missing:
            return first, ()
        new = self.pool.take(missing)
        self.ids += new
        return first, tuple(new)

    def trim(self, computed: int) -> None:
        """Releases the blocks that no position from `computed` on can read; their entries become SCRATCH."""
        if not self._forgets:
            return
        dead = self.kind.first(computed, self.block_size)
        for i in range(min(dead, len(self.ids)) - 1, -1, -1):
            if self.ids[i] == SCRATCH:
                break
            self.pool.release((self.ids[i],))
            self.ids[i] = SCRATCH

    def next_trim(self, computed: int) -> int:
        """The number of computed tokens, above `computed`, at which to call `trim` next; it has nothing to release
        below that. UNBOUNDED if the kind never forgets."""
        if not self._forgets:
            return UNBOUNDED
        dead, most = self.kind.first(computed, self.block_size), computed + self.block_size
        rises = (n for n in range(computed + 1, most) if self.kind.first(n, self.block_size) > dead)
        return next(rises, most)

    def adopt(self, ids: list[int]) -> None:
        """Fills this empty table with cached blocks and takes a reference to each; SCRATCH marks unneeded entries."""
        assert not self.ids, "a table that already has blocks cannot adopt others"
        self.ids = list(ids)
        self.pool.share(b for b in ids if b != SCRATCH)

    def make_own(self, num_tokens: int) -> tuple[int, int] | None:
        """Copy-on-write: before position `num_tokens` is written, replaces its partly filled block by a private copy.

        Returns (source, target) to copy before the step's forward, or None if the position opens a new block or is
        never written. The source keeps its content until then: its next owner writes in a forward, after all copies.
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
        """Releases all blocks and empties the table."""
        self.pool.release(b for b in self.ids if b != SCRATCH)
        self.ids = []


class SequenceBlocks:
    """All block tables of a sequence: one handle, released as a whole. `tables` has one table per cache group."""

    __slots__ = ("tables",)

    def __init__(self, tables: tuple[BlockTable, ...]):
        self.tables = tables

    def extend(self, num_tokens: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """BlockTable.extend of each group: (first new index, new ids)."""
        return tuple([t.extend(num_tokens) for t in self.tables])

    def room(self, num_tokens: int) -> int:
        """The number of tokens after the first `num_tokens` that all tables still cover."""
        return min([t.room(num_tokens) for t in self.tables])

    def next_trim(self, computed: int) -> int:
        """The smallest BlockTable.next_trim of the tables."""
        return min([t.next_trim(computed) for t in self.tables])

    def whole(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The complete tables, in the format that `extend` returns."""
        return tuple((0, tuple(t.ids)) for t in self.tables)

    def trim(self, computed: int) -> None:
        """BlockTable.trim of each group."""
        for table in self.tables:
            table.trim(computed)

    @property
    def block_size(self) -> int:
        """Tokens per block, the same in all groups."""
        return self.tables[0].block_size

    @property
    def ids(self) -> tuple[list[int], ...]:
        """The block ids of each table."""
        return tuple(t.ids for t in self.tables)

    def make_own(self, num_tokens: int) -> list[tuple[int, int, int]]:
        """BlockTable.make_own of each group. Returns (group, source, target) of each copy to make."""
        copies = ((g, t.make_own(num_tokens)) for g, t in enumerate(self.tables))
        return [(g, *pair) for g, pair in copies if pair]

    def release(self) -> None:
        """Releases the blocks of all tables."""
        for table in self.tables:
            table.release()
