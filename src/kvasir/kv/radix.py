"""The prefix cache: a radix tree from token ids to the blocks of all cache groups that hold their keys and values.

block_size 4; sequences "abcdefghij", "abcdefxy" and "abcdKLMN":

    root (namespace) -- abcd -+- efgh ij        a node is a run of blocks; it begins at a block boundary
                              +- efxy           children may share a prefix: the shared "ef" is a partial match
                              +- KLMN

The tree holds a reference to each block of a node (`BlockPool.keep`); running sequences share the blocks. A block
without another holder is idle and is evicted when a pool runs out: in groups that need all blocks of a prefix, from the
ends of leaves; in groups that forget (a window, a recurrent state), anywhere. Blocks of groups of fixed size (an
encoder's output) belong to the namespace: its root holds all of them or none.

A match has L tokens only if every group can continue from L, as its cache kind defines (caches.Kind.needed).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvasir.kv.blocks import blocks_for
from kvasir.kv.changes import ChangeLog
from kvasir.kv.eviction import Evictor
from kvasir.kv.hit import Hit, Stats
from kvasir.kv.node import ID_BYTES, LOWEST, PrefixNode, common
from kvasir.kv.pins import Pins
from kvasir.kv.policy import Policy, lru
from kvasir.kv.pool import SCRATCH, BlockPool
from kvasir.kv.tiers.block import StoredBlock, fixed_chain, marked
from kvasir.plan import CacheGroup

# (name of the block, its index in the sequence, per group the evicted block id or SCRATCH)
OnEvict = Callable[[StoredBlock, int, tuple[int, ...]], None]


class PrefixTree:
    """One tree for all groups, with a root for each namespace; namespaces share nothing.

    Owns one reference to each block in it, and those of the pins. Reads no clock: it counts ticks for the policy, and
    `expire` is given the time.
    on_evict: called before `evict` frees a full block, while the block still has its content.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        groups: Sequence[CacheGroup],
        block_size: int,
        policy: Policy = lru,
        on_evict: OnEvict | None = None,
    ):
        assert len(pools) == len(groups) > 0 and not all(group.kind.fixed for group in groups)
        self.pools = tuple(pools)
        self.block_size = block_size
        self._kinds = tuple(group.kind for group in groups)
        self._forgetting = {g: kind for g, kind in enumerate(self._kinds) if kind.forgets}
        self._fixed = {g: kind for g, kind in enumerate(self._kinds) if kind.fixed}
        self._full = tuple(g for g, kind in enumerate(self._kinds) if not kind.forgets and not kind.fixed)
        self._on_evict, self._policy = on_evict, policy
        self._block_bytes = block_size * ID_BYTES
        self._roots: dict[bytes, PrefixNode] = {}
        self._pins = Pins(self.pools)
        self._evictor = Evictor(self, self.pools, self._forgetting, self._full, block_size, policy)
        self._tick = 0
        self._nodes = self._dead = 0
        self._hits = self._hit_tokens = self._evicted = 0
        self.log: ChangeLog | None = None  # is told of all blocks that come and go, if someone follows them

    # -- matching ----------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, ids: bytes, limit: int | None = None) -> Hit:
        """The longest cached prefix of `ids` (packed), of at most `limit` tokens, from which every group can continue.
        Changes nothing: call `use` if the hit is used."""
        if limit is not None:
            ids = ids[: max(0, limit) * ID_BYTES]
        path, tokens = self._walk(namespace, ids)
        tables: tuple[list[int], ...] = tuple([] for _ in self.pools)
        for node in path:
            for table, blocks in zip(tables, node.blocks, strict=True):
                table += blocks
        tokens = self._resumable(tables, tokens) if self._has_fixed(namespace) else 0
        for table in tables:
            del table[blocks_for(tokens, self.block_size) :]
        for g, kind in self._forgetting.items():
            needed = kind.first(tokens, self.block_size)
            tables[g][:needed] = [SCRATCH] * needed
        for g in self._fixed if tokens else ():
            tables[g][:] = self._roots[namespace].fixed[g]
        node = next((n for n in reversed(path) if n.start * self.block_size < tokens), None)
        return Hit(tokens, tables, node, self._kinds)

    def use(self, hit: Hit) -> None:
        """Counts a hit for the policy and the statistics."""
        self._hits += hit.tokens > 0
        self._hit_tokens += hit.tokens
        self._stamp(hit.node, hits=1)

    def _walk(self, namespace: bytes, ids: bytes) -> tuple[list[PrefixNode], int]:
        """The nodes that match `ids`, and how many tokens match; only the last node may match partly."""
        path: list[PrefixNode] = []
        node = self._roots.get(namespace)
        at = 0
        while node is not None and at < len(ids):
            node = node.find(ids[at : at + self._block_bytes])
            if node is None:
                break
            path.append(node)
            if not ids.startswith(node.ids, at):
                at += common(node.ids, ids[at : at + len(node.ids)]) * ID_BYTES
                break
            at += len(node.ids)
        return path, at // ID_BYTES

    def _has_fixed(self, namespace: bytes) -> bool:
        """Whether the namespace has its blocks of all groups of fixed size."""
        if not self._fixed:
            return True
        root = self._roots.get(namespace)
        return root is not None and self._fixed.keys() <= root.fixed.keys()

    def _resumable(self, tables: tuple[list[int], ...], tokens: int) -> int:
        """The largest number of tokens, at most `tokens`, from which every group that forgets can continue."""
        asked = -1
        while tokens != asked:
            asked = tokens
            for g, kind in self._forgetting.items():
                table, i = tables[g], blocks_for(tokens, self.block_size)
                first = kind.first(tokens, self.block_size)
                while i > first:
                    i -= 1
                    if table[i] == SCRATCH:
                        while i and table[i - 1] == SCRATCH:
                            i -= 1
                        tokens = i * self.block_size
                        first = kind.first(tokens, self.block_size)
        return tokens

    # -- inserting ---------------------------------------------------------------------------------------------

    def insert(self, namespace: bytes, ids: bytes, tables: Sequence[Sequence[int]], priority: int = 0) -> None:
        """Adds a computed prefix. A sequence has computed exactly `ids` (packed) into the blocks of `tables`, one table
        per group, and writes to none of these positions again. It must hold the blocks until `insert` returns.

        Blocks of tokens that are in the tree already stay private to the sequence. A partial last block is added too,
        and is replaced later by a block with more of the same tokens. Tables of groups that forget start with SCRATCH
        entries; the tree adds their blocks where it has none, so inserting before blocks are trimmed lets later
        branches hit.
        """
        assert len(ids) % ID_BYTES == 0 and len(tables) == len(self.pools)
        counts = (kind.blocks(len(ids) // ID_BYTES, self.block_size) for kind in self._kinds)
        assert all(len(t) >= n for t, n in zip(tables, counts, strict=True)), "a table is shorter than its tokens"
        if not ids:
            return
        if self._fixed:
            self._fix(namespace, tables)
            count = blocks_for(len(ids), self._block_bytes)
            tables = [[SCRATCH] * count if g in self._fixed else table for g, table in enumerate(tables)]
        path, tokens = self._walk(namespace, ids)
        first = {g: bisect_left(tables[g], True, key=bool) for g in self._forgetting}
        for node in path:
            self._fill(node, tokens, tables, first)
        last = path[-1] if path else self._root(namespace)
        if tokens * ID_BYTES < len(ids):
            last = self._lengthen(last, tokens, ids, tables)
        self._stamp(last, priority=priority)
        self.settle(last)

    def _lengthen(self, last: PrefixNode, tokens: int, ids: bytes, tables: Sequence[Sequence[int]]) -> PrefixNode:
        """Adds the rest of `ids` after node `last`, which matches up to `tokens`. Returns the leaf with their end."""
        if last.end(self.block_size) > tokens:
            last = self._branch(last, tokens)
        elif last.parent is not None and not last.children:
            self._grow(last, ids, tables)
            return last
        return self._sprout(last, ids, tables)

    def _stamp(self, node: PrefixNode | None, hits: int = 0, priority: int = LOWEST) -> None:
        """Advances the tick and marks the node and its ancestors as used."""
        self._tick += 1
        while node is not None:
            node.last_used = self._tick
            node.hits += hits
            node.priority = max(node.priority, priority)
            node = node.parent

    def _root(self, namespace: bytes) -> PrefixNode:
        if namespace not in self._roots:
            self._roots[namespace] = PrefixNode(namespace, None, 0, b"", tuple([] for _ in self.pools))
        return self._roots[namespace]

    def _fix(self, namespace: bytes, tables: Sequence[Sequence[int]]) -> None:
        """Adds the blocks of those groups of fixed size that the namespace lacks."""
        root = self._root(namespace)
        for g in self._fixed.keys() - root.fixed.keys():
            root.fixed[g] = list(tables[g])
            self.pools[g].keep(tables[g])

    def _fill(self, node: PrefixNode, tokens: int, tables: Sequence[Sequence[int]], first: dict[int, int]) -> None:
        """Adds the blocks that a node lacks in groups that forget; the node matches the sequence up to `tokens`. A
        partly matched block is not added: the sequence's block may hold fewer tokens."""
        if node.end(self.block_size) <= tokens:
            equal = node.num_blocks
        else:
            equal = tokens // self.block_size - node.start
        for g in self._forgetting:
            blocks, table = node.blocks[g], tables[g]
            begin = max(0, first[g] - node.start)
            missing = [i for i in range(begin, equal) if blocks[i] == SCRATCH != table[node.start + i]]
            if missing:
                for i in missing:
                    blocks[i] = table[node.start + i]
                self.pools[g].keep(blocks[i] for i in missing)
                node.low[g] = min(node.low[g], missing[0])
                self._evictor.push_window(node, g)

    def _grow(self, leaf: PrefixNode, ids: bytes, tables: Sequence[Sequence[int]]) -> None:
        """Extends the run of a leaf. Its partial last block either is the sequence's own block, with more tokens in it,
        or is replaced by the sequence's block."""
        whole = len(leaf.ids) // self._block_bytes
        if whole == 0:
            self._rename(leaf, self._head(ids, leaf.start))
        leaf.ids = ids[leaf.start * self._block_bytes :]
        for g, blocks in enumerate(leaf.blocks):
            tail = blocks[whole:]
            new = self._cut_table(tables[g], leaf.start + whole, ids)
            same = tail[:1] == new[:1]
            if not same:
                self.pools[g].forget(tail)
            self.pools[g].keep(new[same:])
            blocks[whole:] = new
            leaf.low[g] = min(leaf.low[g], whole)
        self._evictor.push(leaf)
        if self.log:
            self.log.gained(leaf)

    def _rename(self, leaf: PrefixNode, head: bytes) -> None:
        """Updates the head of a leaf whose first block has more tokens. Its place among its siblings does not change:
        no head is a prefix of another."""
        assert leaf.parent is not None
        leaf.parent.heads[leaf.parent.slot(leaf.ids)] = head

    def _branch(self, node: PrefixNode, tokens: int) -> PrefixNode:
        """The parent for a run that diverges inside `node` at `tokens`; splits the node if at least a block matches."""
        parent = node.parent
        assert parent is not None
        whole = tokens // self.block_size - node.start
        if whole == 0:
            return parent
        upper = node.split(whole, node.ids[: self._block_bytes])
        self._nodes += 1
        for g in self._forgetting:
            self._evictor.push_window(upper, g)
        return upper

    def _sprout(self, parent: PrefixNode, ids: bytes, tables: Sequence[Sequence[int]]) -> PrefixNode:
        """Adds a new leaf to `parent`, with the rest of `ids`."""
        start = parent.start + parent.num_blocks
        blocks = tuple(self._cut_table(table, start, ids) for table in tables)
        for pool, new in zip(self.pools, blocks, strict=True):
            pool.keep(new)
        leaf = PrefixNode(parent.namespace, parent, start, ids[start * self._block_bytes :], blocks)
        leaf.created = self._tick + 1
        parent.add(self._head(ids, start), leaf)
        self._nodes += 1
        self._evictor.push(leaf)
        if self.log:
            self.log.gained(leaf)
        return leaf

    def _head(self, ids: bytes, block: int) -> bytes:
        return ids[block * self._block_bytes : (block + 1) * self._block_bytes]

    def _cut_table(self, table: Sequence[int], start: int, ids: bytes) -> list[int]:
        return list(table[start : blocks_for(len(ids), self._block_bytes)])

    # -- evicting ----------------------------------------------------------------------------------------------

    def evict(self, group: int, n: int) -> int:
        """Frees at least `n` blocks of a group, or all its idle blocks. Returns how many were freed. Blocks of other
        groups may be freed too, and held blocks may leave the tree, but `available` never falls in any pool."""
        before = sum(pool.free for pool in self.pools)
        freed = self._evict_fixed(group, n) if group in self._fixed else self._evictor.evict(group, n)
        self._evicted += sum(pool.free for pool in self.pools) - before
        return freed

    def _evict_fixed(self, group: int, n: int) -> int:
        """Evicts the blocks of whole namespaces, in the policy's order: a part of a group of fixed size is useless."""
        pool = self.pools[group]
        before, idle = pool.free, (root for root in self._roots.values() if self._is_idle(root, group))
        for root in sorted(idle, key=self._policy):
            if pool.free - before >= n:
                break
            self._let_go_fixed(root, group)
        return pool.free - before

    def _let_go_fixed(self, root: PrefixNode, group: int) -> None:
        """Removes a namespace's blocks of one group of fixed size."""
        if self._on_evict is not None and self._is_idle(root, group):
            for named in self._named_fixed(root, group):
                self._on_evict(*named)
        self.pools[group].forget(root.fixed.pop(group))

    def _named_fixed(self, root: PrefixNode, group: int) -> Iterator[tuple[StoredBlock, int, tuple[int, ...]]]:
        """The arguments of `on_evict` for each block that a root holds in a group of fixed size."""
        blocks = root.fixed[group]
        for i, name in enumerate(fixed_chain(root.namespace, len(blocks), self.block_size)):
            yield name, i, tuple(blocks[i] if g == group else SCRATCH for g in range(len(self.pools)))

    def _is_idle(self, root: PrefixNode, group: int) -> bool:
        return group in root.fixed and all(map(self.pools[group].is_idle, root.fixed[group]))

    def let_go(self, node: PrefixNode, index: int, groups: Iterable[int]) -> None:
        """Removes the blocks of some groups at one index of a node; the entries become SCRATCH. Calls `on_evict` for
        the idle ones."""
        if self._on_evict is not None and (name := self._name(node, index)):
            gone = tuple(
                b[index] if g in groups and p.is_idle(b[index]) else SCRATCH
                for g, (b, p) in enumerate(zip(node.blocks, self.pools, strict=True))
            )
            self._on_evict(name, node.start + index, gone)
        for g in groups:
            self.pools[g].forget((node.blocks[g][index],))
            node.blocks[g][index] = SCRATCH

    def _name(self, node: PrefixNode, index: int) -> StoredBlock | None:
        """The name of a block in a tier; None if the block is not full, or if it or a block before it is marked."""
        ids = self._head(node.ids, index)
        if len(ids) < self._block_bytes or marked(ids):
            return None
        parent = node.parent_key(index, self._block_bytes)
        return StoredBlock(node.namespace, parent, ids) if parent else None

    # -- taking out --------------------------------------------------------------------------------------------

    def settle(self, node: PrefixNode) -> None:
        """Removes trailing entries of a leaf that have no block in any group. Removes the leaf if nothing is left, and
        does the same to a parent that this turns into a leaf."""
        while not node.children:
            if node.parent is None:
                self._uproot(node)
                return
            end = node.num_blocks
            while end and not any(blocks[end - 1] for blocks in node.blocks):
                end -= 1
            if end:
                if self.log:
                    self.log.lost(node, end)
                node.shorten(end, self._block_bytes)
                self._evictor.push_end(node)
                return
            parent = node.parent
            parent.remove(node.ids[: self._block_bytes])
            self._bury(node)
            node = parent

    def _uproot(self, root: PrefixNode) -> None:
        """Removes a namespace without tokens, with its blocks of groups of fixed size."""
        for group in list(root.fixed):
            self._let_go_fixed(root, group)
        self._roots.pop(root.namespace, None)

    def _bury(self, node: PrefixNode) -> None:
        if self.log:
            self.log.lost(node, 0)
        node.parent, node.ids = None, b""
        self._nodes -= 1
        self._dead += 1
        if self._dead > self._nodes + 1000:
            self._dead = 0
            self._evictor.sweep()

    def cut(self, node: PrefixNode, num_blocks: int) -> None:
        """Removes everything after the first `num_blocks` of a node from the tree, held or not."""
        below = list(node.tree())[1:]
        node.heads, node.children = [], []
        for lost in below:
            self._forget(lost, 0)
            self._bury(lost)
        self._forget(node, num_blocks)
        self.settle(node)

    def _forget(self, node: PrefixNode, start: int) -> None:
        for pool, blocks in zip(self.pools, node.blocks, strict=True):
            pool.forget(blocks[start:])
            blocks[start:] = [SCRATCH] * len(blocks[start:])

    def drop(self, namespace: bytes) -> None:
        """Removes a namespace and its pins; `match` finds nothing of it. Sequences keep the blocks that they hold."""
        self._pins.drop(namespace)
        if root := self._roots.get(namespace):
            for group, blocks in root.fixed.items():
                self.pools[group].forget(blocks)
            root.fixed = {}
            self.cut(root, 0)

    def clear(self) -> None:
        """Drops all namespaces."""
        for namespace in list(self._roots):
            self.drop(namespace)

    # -- pinning -----------------------------------------------------------------------------------------------

    def pin(self, namespace: bytes, ids: bytes, until: float) -> int:
        """Protects the full blocks of the cached part of a prefix from eviction until `expire` is given a time of at
        least `until`. Pinning the same prefix again can only extend the time. Returns the number of pinned tokens."""
        hit = self.match(namespace, ids)
        hit = self.match(namespace, ids, hit.tokens - hit.tokens % self.block_size)
        if hit.tokens:
            self._pins.add((namespace, ids[: hit.tokens * ID_BYTES]), hit.blocks, until)
        return hit.tokens

    def expire(self, now: float) -> int:
        """Ends the pins that expire at `now` or earlier (`math.inf`: all pins). Returns how many ended."""
        return self._pins.expire(now) if now >= self._pins.expiry else 0

    # -- looking -----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Sizes and counters of the tree."""
        return Stats(
            nodes=self._nodes,
            blocks=sum(pool.cached for pool in self.pools),
            idle=sum(pool.idle for pool in self.pools),
            pinned=sum(len(self.pinned(g)) for g in range(len(self.pools))),
            hits=self._hits,
            hit_tokens=self._hit_tokens,
            evicted=self._evicted,
        )

    def pinned(self, group: int) -> set[int]:
        """Ids of the blocks that pins hold in a group."""
        return {b for blocks in self._pins.held(group) for b in blocks if b != SCRATCH}

    def named(self) -> Iterator[tuple[StoredBlock, int, tuple[int, ...]]]:
        """The arguments of `on_evict` for every block that has a name in a tier, the most recently used first; a block
        never comes before the one that it follows in its sequence."""
        for node in sorted(self.nodes(), key=lambda node: -node.last_used):
            for i in range(len(node.ids) // self._block_bytes):
                if name := self._name(node, i):
                    yield name, node.start + i, tuple(blocks[i] for blocks in node.blocks)
            for group in node.fixed:
                yield from self._named_fixed(node, group)

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, roots included."""
        for root in self._roots.values():
            yield from root.tree()

    def check(self, holders: Sequence[Iterable[Sequence[int]]]) -> None:
        """Recomputes the reference counts of the pools from the tree, its pins and the tables of all sequences
        (`holders`, per group), and checks the invariants of the tree. Raises AssertionError if one is violated."""
        nodes = list(self.nodes())
        for g, (pool, tables) in enumerate(zip(self.pools, holders, strict=True)):
            fixed = [root.fixed[g] for root in self._roots.values() if g in root.fixed]
            pool.check([*tables, *self._pins.held(g)], [*fixed, *(node.blocks[g] for node in nodes)])
        for root in self._roots.values():
            assert root.parent is None and root.children and not root.ids, "a root has ids or no children"
        inner = [node for node in nodes if node.parent is not None]
        assert len(inner) == self._nodes, f"{self._nodes} nodes are counted, {len(inner)} are there"
        for node in nodes:
            node.check(self._block_bytes)
        for node in inner:
            self._evictor.check(node)
            assert all(b != SCRATCH for g in self._full for b in node.blocks[g]), (
                "a group of full attention lacks a block"
            )
        for (namespace, ids), blocks in self._pins:
            assert self.match(namespace, ids).blocks == blocks, "a pinned prefix is lost"
