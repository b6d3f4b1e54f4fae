"""Which blocks go when a pool needs some: nodes wait in queues, in the order of a policy.

In groups that need all blocks of a prefix they go one by one from the ends of leaves, in those that forget anywhere,
but from the beginnings of nodes first: their ends are where most sequences continue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol

from kvasir.caches import Kind
from kvasir.kv.node import Node
from kvasir.kv.policy import Policy, Rank
from kvasir.kv.pool import SCRATCH, BlockPool


class Queue:
    """Nodes in the order of a policy, each at most once, the lowest rank first.

    Ranks rise while nodes wait, and nodes leave the tree: both are noticed when an entry comes up.
    """

    def __init__(self, rank: Policy):
        self._rank = rank
        self._heap: list[tuple[Rank, int, Node]] = []
        self._inside: set[Node] = set()
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: Node) -> bool:
        return node in self._inside

    def push(self, node: Node) -> None:
        if node not in self._inside:
            self._inside.add(node)
            heapq.heappush(self._heap, (self._rank(node), next(self._serial), node))

    def pop(self) -> Node | None:
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            self._inside.remove(node)
            if node.parent is None:
                continue
            if self._rank(node) == rank:
                return node
            self.push(node)
        return None

    def put_back(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.parent is not None:
                self.push(node)

    def sweep(self) -> None:
        """Drops the entries of nodes that left the tree."""
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        self._inside = {entry[2] for entry in self._heap}
        heapq.heapify(self._heap)


class Tree(Protocol):
    """What nodes are taken out of: radix.PrefixTree, which documents these."""

    def nodes(self) -> Iterable[Node]: ...

    def let_go(self, node: Node, index: int, groups: Iterable[int]) -> None: ...

    def settle(self, node: Node) -> None: ...

    def cut(self, node: Node, num_blocks: int) -> None: ...


class Evictor:
    """Owns the queues; the tree takes out what is to go. forgetting: the kind of each group that forgets; full:
    those that need all blocks."""

    def __init__(
        self,
        tree: Tree,
        pools: Sequence[BlockPool],
        forgetting: Mapping[int, Kind],
        full: Sequence[int],
        block_size: int,
        policy: Policy,
    ):
        self._tree = tree
        self._pools = pools
        self._forgetting = forgetting
        self._full = full
        self._block_size = block_size
        self._leaves = Queue(policy)  # all leaves, when there is a full group, but for
        self._held: list[Node] = []  # those that end in a block that is held, since
        self._held_at = (-1, -1)  # this group and its pool's count of `idled`
        # Per group that forgets: nodes with blocks that only a branch before their end would need; all.
        self._middles = {g: Queue(policy) for g in forgetting}
        self._ends = {g: Queue(policy) for g in forgetting}

    def push(self, leaf: Node) -> None:
        """A leaf that is new, or has new blocks."""
        self.push_end(leaf)
        for g in self._forgetting:
            self.push_window(leaf, g)

    def push_end(self, leaf: Node) -> None:
        """A node that ends in another block now, and is a leaf."""
        if self._full:
            self._leaves.push(leaf)

    def push_window(self, node: Node, group: int) -> None:
        """A node with blocks of a group that forgets."""
        self._middles[group].push(node)
        self._ends[group].push(node)

    def sweep(self) -> None:
        """Forgets the nodes that left the tree; the queues notice those that come up, but not all do."""
        for queue in (self._leaves, *self._middles.values(), *self._ends.values()):
            queue.sweep()
        self._held = [leaf for leaf in self._held if leaf.parent is not None]

    def evict(self, group: int, n: int) -> int:
        """See PrefixTree.evict."""
        pool = self._pools[group]
        before = pool.free
        target = pool.free + min(n, pool.idle)
        if group in self._full:
            self._evict_leaves(group, target)
            while pool.free < target:
                self._cut_below_idle(group)
                self._evict_leaves(group, target)
        else:
            self._evict_window(group, target, self._middles[group], middle=True)
            self._evict_window(group, target, self._ends[group], middle=False)
        return pool.free - before

    def _evict_leaves(self, group: int, target: int) -> None:
        """Block by block from the ends of leaves."""
        pool = self._pools[group]
        if self._held_at != (group, pool.idled):
            self._leaves.put_back(self._held)
            self._held, self._held_at = [], (group, pool.idled)
        while pool.free < target and (leaf := self._leaves.pop()):
            if leaf.children:
                continue
            end, blocks = leaf.num_blocks, leaf.blocks[group]
            while end and pool.free < target and pool.is_idle(blocks[end - 1]):
                end -= 1
                self._tree.let_go(leaf, end, range(len(self._pools)))
            if end == leaf.num_blocks:
                self._held.append(leaf)
            else:
                self._tree.settle(leaf)

    def _cut_below_idle(self, group: int) -> None:
        """All leaves end in blocks that a sequence holds, which had computed its own copy of an idle block above them.
        The tree lets go of what is below the deepest such block, so that this one is the end of a leaf."""
        pool = self._pools[group]
        depth, node = -1, None
        for candidate in self._tree.nodes():
            blocks = candidate.blocks[group]
            idle = next((i for i in range(len(blocks) - 1, -1, -1) if pool.is_idle(blocks[i])), None)
            if idle is not None and candidate.start + idle > depth:
                depth, node = candidate.start + idle, candidate
        assert node is not None, "idle blocks are not in the tree"
        self._tree.cut(node, depth - node.start + 1)

    def _evict_window(self, group: int, target: int, queue: Queue, middle: bool) -> None:
        """Single blocks, from the beginnings of nodes: their ends are where most sequences continue."""
        pool = self._pools[group]
        rest: list[Node] = []
        while pool.free < target and (node := queue.pop()):
            blocks = node.blocks[group]
            stop = self._last_window(node, group) if middle else len(blocks)
            low = node.low[group]
            while low < stop and blocks[low] == SCRATCH:
                low += 1
            node.low[group] = low
            for i in range(low, stop):
                if pool.is_idle(blocks[i]):
                    self._tree.let_go(node, i, (group,))
                    if pool.free == target:
                        break
            if any(blocks[low:stop]):
                rest.append(node)
            self._tree.settle(node)
        queue.put_back(rest)

    def _last_window(self, node: Node, group: int) -> int:
        """Index in the node of the first block needed to go on from its end, or from one token before, as a prompt
        does that is sent again."""
        first = self._forgetting[group].first(node.end(self._block_size) - 1, self._block_size)
        return min(max(0, first - node.start), node.num_blocks)

    def check(self, node: Node) -> None:
        """Proves that the node waits where it should. Raises AssertionError."""
        assert node.children or not self._full or node in self._leaves or node in self._held, "a leaf is in no queue"
        for g in self._forgetting:
            blocks = node.blocks[g]
            assert not any(blocks) or node in self._ends[g], "blocks of a group that forgets are in no queue"
            assert not any(blocks[: self._last_window(node, g)]) or node in self._middles[g], "a middle is in no queue"
