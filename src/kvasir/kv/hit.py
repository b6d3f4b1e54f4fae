"""What a look into the prefix tree finds, and the tree's totals."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.caches import CacheKind
from kvasir.kv.node import PrefixNode


@dataclass(frozen=True, slots=True)
class Hit:
    """The first `tokens` of a prompt are in the cache.

    blocks: the block table of each group, SCRATCH where the group does not need a block. The hit holds no reference to
    them, so it is valid only until the tree changes. If `tokens` ends inside a block, the last blocks may also hold
    tokens of another sequence: a sequence that continues there copies them first (BlockTable.make_own).
    node: the last node that matched. kinds: the cache kind of each group.
    """

    tokens: int
    blocks: tuple[list[int], ...]
    node: PrefixNode | None = None
    kinds: tuple[CacheKind, ...] = ()

    def whole(self, block_size: int) -> Hit | None:
        """The hit shortened to full blocks, None if there are none. It is for a sequence that continues from a later
        token: groups that forget may lack blocks needed to continue from its end."""
        n = self.tokens // block_size * block_size
        tables = tuple(ids[: kind.blocks(n, block_size)] for kind, ids in zip(self.kinds, self.blocks, strict=True))
        return Hit(n, tables, self.node, self.kinds) if n else None


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of all groups. nodes, blocks: in the tree. idle: blocks that only the tree holds. pinned: blocks that pins
    hold. hits, hit_tokens: counted by `use`. evicted: blocks freed by `evict`."""

    nodes: int
    blocks: int
    idle: int
    pinned: int
    hits: int
    hit_tokens: int
    evicted: int
