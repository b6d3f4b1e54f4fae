"""KVManager: the pools of all cache groups, the allocation of blocks to sequences, and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.kv.blocks import BlockTable, SequenceBlocks
from kvasir.kv.policy import POLICIES
from kvasir.kv.pool import SCRATCH, BlockPool
from kvasir.kv.radix import Hit, OnEvict, PrefixTree
from kvasir.plan import CacheGroup, Capacity


class KVManager:
    """Owns the pools and the prefix tree. It keeps no list of sequences: each sequence owns its SequenceBlocks."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        block_size: int,
        eviction: str = "lru",
        on_evict: OnEvict | None = None,
    ):
        """eviction: the eviction policy, a key of kv.policy.POLICIES. on_evict: see PrefixTree."""
        assert len(groups) == len(num_blocks)
        self.groups = groups
        self.block_size = block_size
        self.pools = tuple(BlockPool(n) for n in num_blocks)
        self.tree = PrefixTree(self.pools, groups, block_size, POLICIES[eviction], on_evict)

    @classmethod
    def of(cls, capacity: Capacity, eviction: str = "lru", on_evict: OnEvict | None = None) -> KVManager:
        """A manager for the groups, pool sizes and block size of a Capacity."""
        return cls(capacity.groups, capacity.num_blocks, capacity.block_size, eviction, on_evict)

    # -- the blocks of a sequence ------------------------------------------------------------------------------

    def new(self) -> SequenceBlocks:
        """Empty block tables for a new sequence."""
        pairs = zip(self.pools, self.groups, strict=True)
        return SequenceBlocks(tuple(BlockTable(p, self.block_size, g.kind) for p, g in pairs))

    def adopt(self, blocks: SequenceBlocks, hit: Hit) -> list[tuple[int, int, int]]:
        """Lets a sequence without blocks start from a hit. Returns (group, source, target) of each partly matched
        block, to be copied before the step's forward."""
        self.tree.use(hit)
        for table, ids in zip(blocks.tables, hit.blocks, strict=True):
            table.adopt(ids)
        if hit.tokens % self.block_size:
            for group, cache in enumerate(self.groups):
                self._free(group, not cache.kind.fixed)
        return blocks.make_own(hit.tokens)

    def receive(self, blocks: SequenceBlocks, num_tokens: int) -> list[tuple[int, int, int]]:
        """Takes blocks for data from outside the pool, whole blocks up to `num_tokens`. Returns (group, index, id) of
        the blocks to write. Entries that a window has passed by then get no block."""
        taken: list[tuple[int, int, int]] = []
        for group, table in enumerate(blocks.tables):
            table.trim(num_tokens)
            passed = table.kind.first(num_tokens, self.block_size)
            table.ids += [SCRATCH] * (passed - len(table.ids))
            self._free(group, table.missing(num_tokens))
            first, ids = table.extend(num_tokens)
            taken += [(group, first + i, id) for i, id in enumerate(ids)]
        return taken

    def extend(self, blocks: SequenceBlocks, num_tokens: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Takes the blocks that a sequence needs to hold `num_tokens`; the caller has checked that they are available
        (`grows`). Returns (first new index, new ids) per group."""
        for group, table in enumerate(blocks.tables):
            if missing := table.missing(num_tokens):
                self._free(group, missing)
        return blocks.extend(num_tokens)

    def _free(self, group: int, n: int) -> None:
        short = n - self.pools[group].free
        if short > 0:
            self.tree.evict(group, short)

    # -- whether it fits ---------------------------------------------------------------------------------------

    def grows(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Whether enough blocks are available to extend a sequence to `num_tokens`."""
        return all([t.missing(num_tokens) <= t.pool.available for t in blocks.tables])

    def fits(self, hit: Hit | None, num_tokens: int, chunk: int) -> bool:
        """Whether enough blocks are available to compute a new sequence, from `hit` to `num_tokens`, in chunks of
        `chunk` tokens."""
        size = self.block_size
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            held = [b for b in hit.blocks[g] if b != SCRATCH] if hit else []
            kept = group.kind.kept(hit.tokens, size) if hit else 0
            missing = min(group.kind.blocks(num_tokens, size) - kept, group.kind.most(num_tokens, chunk, size))
            if missing > pool.available - sum(pool.is_idle(b) for b in held):
                return False
        return True

    def can_ever_hold(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of `num_tokens`, computed in chunks of at most `chunk` tokens, fits into empty pools."""
        return all(
            group.kind.most(num_tokens, chunk, self.block_size) <= pool.total
            for pool, group in zip(self.pools, self.groups, strict=True)
        )

    # -- looking -----------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Usable blocks of all pools."""
        return sum(p.total for p in self.pools)

    @property
    def used(self) -> int:
        """Blocks with a holder other than the prefix tree."""
        return sum(p.used for p in self.pools)

    def check(self, holders: Iterable[SequenceBlocks]) -> None:
        """Recomputes all reference counts from the tree and the tables of all living sequences (`holders`). Raises
        AssertionError if one differs."""
        held = list(holders)
        self.tree.check([[h.tables[g].ids for h in held] for g in range(len(self.pools))])
