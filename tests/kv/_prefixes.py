"""A small world for the tests of the prefix tree: pools, sequences, and what is written in every block."""

from kvasir.caches import CacheKind, PagedKV, Window
from kvasir.kv.blocks import BlockTable, SequenceBlocks
from kvasir.kv.node import PrefixNode
from kvasir.kv.policy import POLICIES
from kvasir.kv.pool import SCRATCH, BlockPool
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.plan import CacheGroup, pack_ids, unpack_ids

FULL = CacheGroup(PagedKV(), (0,), 1)


def window(tokens: int) -> CacheGroup:
    return of(Window(window=tokens))


def of(kind: CacheKind) -> CacheGroup:
    return CacheGroup(kind, (0,), 1)


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


class Run:
    """A sequence at work: its tokens, of which the first `computed` are in the blocks."""

    def __init__(self, namespace: bytes, tokens: list[int], blocks: SequenceBlocks, computed: int = 0):
        self.namespace = namespace
        self.tokens = tokens
        self.blocks = blocks
        self.computed = computed
        self.joined = False  # has made the partly filled last block its own


class World:
    """Pools, a tree, the sequences, and what is written in every block: each position remembers all ids up to it."""

    def __init__(self, groups=(FULL,), num_blocks=32, block_size=4, policy="lru", on_evict=None):
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)
        self.tree = PrefixTree(self.pools, groups, block_size, POLICIES[policy], on_evict)
        self.block_size = block_size
        self.written = [[[None] * block_size for _ in range(num_blocks)] for _ in groups]
        self.runs: list[Run] = []

    def start(self, namespace: bytes, tokens: list[int], use=True) -> Run:
        run = Run(namespace, tokens, self.tables())
        self.runs.append(run)
        if use:
            hit = self.tree.match(namespace, pack_ids(tokens), len(tokens) - 1)
            self.verify(hit, namespace, tokens)
            self.tree.use(hit)
            for table, ids in zip(run.blocks.tables, hit.blocks, strict=True):
                table.adopt(ids)
            run.computed = hit.tokens
        return run

    def tables(self) -> SequenceBlocks:
        pairs = zip(self.pools, self.groups, strict=True)
        return SequenceBlocks(tuple(BlockTable(pool, self.block_size, group.kind) for pool, group in pairs))

    def verify(self, hit: Hit, namespace: bytes, tokens: list[int]) -> None:
        for g, blocks in enumerate(hit.blocks):
            kind, size = self.groups[g].kind, self.block_size
            needed = kind.needed(hit.tokens, size) if hit.tokens else range(0)
            assert len(blocks) == needed.stop
            assert all(block == SCRATCH for block in blocks[: needed.start]), "more than what is needed"
            for p in range(needed.start * size, self.positions(g, hit.tokens)):
                assert self.read(g, blocks, p) == self.content(g, namespace, tokens, p), "a hit of other tokens"

    def positions(self, group: int, tokens: int) -> int:
        """How many positions of a group a sequence of so many tokens has."""
        return self.groups[group].kind.fixed or tokens if tokens else 0

    def content(self, group: int, namespace: bytes, tokens: list[int], position: int) -> tuple:
        """What lies at a position of a sequence: it remembers all ids up to it, or its place in what is fixed."""
        if self.groups[group].kind.fixed:
            return (namespace, "fixed", position)
        return (namespace, *tokens[: position + 1])

    def read(self, group: int, blocks, position: int):
        assert blocks[position // self.block_size] != SCRATCH
        return self.written[group][blocks[position // self.block_size]][position % self.block_size]

    def has_room(self, run: Run, num_tokens: int) -> bool:
        """Makes room as a scheduler would, or says that there is none."""
        spare = not run.joined
        for table in run.blocks.tables:
            if table.missing(num_tokens) + spare > table.pool.available:
                return False
        for g, table in enumerate(run.blocks.tables):
            lacking = table.missing(num_tokens) + spare - table.pool.free
            if lacking > 0:
                assert self.tree.evict(g, lacking) >= lacking, "what is available cannot be had"
        return True

    def compute(self, run: Run, num_tokens: int) -> bool:
        """Computes up to `num_tokens`; False, with nothing done, when there is no room."""
        if not self.has_room(run, num_tokens):
            return False
        if not run.joined:
            for g, source, target in run.blocks.make_own(run.computed):
                self.written[g][target] = list(self.written[g][source])
            run.joined = True
        for g, (_, new) in enumerate(run.blocks.extend(num_tokens)):
            for block in new:
                self.written[g][block] = [None] * self.block_size
        for g, table in enumerate(run.blocks.tables):
            fixed = self.groups[g].kind.fixed
            for p in range(0 if run.computed else fixed) if fixed else range(run.computed, num_tokens):
                slot = self.written[g][table.ids[p // self.block_size]]
                slot[p % self.block_size] = self.content(g, run.namespace, run.tokens, p)
        run.computed = num_tokens
        return True

    def insert(self, run: Run, priority=0) -> None:
        ids = pack_ids(run.tokens[: run.computed])
        self.tree.insert(run.namespace, ids, [t.ids for t in run.blocks.tables], priority)

    def end(self, run: Run) -> None:
        run.blocks.release()
        self.runs.remove(run)

    def serve(self, tokens: list[int], namespace=b"", priority=0, use=True) -> int:
        """One sequence from its beginning to its end; returns the tokens it found in the cache."""
        run = self.start(namespace, tokens, use)
        found = run.computed
        assert self.compute(run, len(tokens))
        self.insert(run, priority)
        self.end(run)
        self.check()
        return found

    def cached(self, tokens: list[int], namespace=b"") -> int:
        hit = self.tree.match(namespace, pack_ids(tokens))
        self.verify(hit, namespace, tokens)
        return hit.tokens

    def check(self) -> None:
        self.tree.check([[run.blocks.tables[g].ids for run in self.runs] for g in range(len(self.groups))])
        for run in self.runs:
            for g, table in enumerate(run.blocks.tables):
                for p in range(self.positions(g, run.computed)):
                    if table.ids[p // self.block_size]:
                        assert self.read(g, table.ids, p) == self.content(g, run.namespace, run.tokens, p), (
                            "overwritten"
                        )

    def roots(self) -> list[PrefixNode]:
        return [node for node in self.tree.nodes() if node.parent is None]

    def entries(self) -> dict[tuple, tuple[int, ...]]:
        """(namespace, all ids up to the end of a block, or of a partly filled one) -> its block in each group."""
        found = {}
        for root in self.roots():
            stack = [(root, ())]
            while stack:
                node, before = stack.pop()
                ids = (*before, *unpack_ids(node.ids))
                for i in range(node.num_blocks):
                    end = min(len(ids), (node.start + i + 1) * self.block_size)
                    found[root.namespace, *ids[:end]] = tuple(b[i] for b in node.blocks)
                stack += [(child, ids) for child in node.children]
        return found
