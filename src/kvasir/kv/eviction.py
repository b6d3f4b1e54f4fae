"""Eviction from the prefix tree: candidate nodes wait in queues, in the order of a policy.

In full groups, which need all blocks of a prefix, blocks are evicted one by one from the ends of leaves. In groups that
forget, a block anywhere can be evicted, the first blocks of a node before the last ones: most sequences continue at a
node's end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol

from kvasir.caches import CacheKind
from kvasir.kv.node import PrefixNode
from kvasir.kv.policy import Policy, Rank
from kvasir.kv.pool import SCRATCH, BlockPool


class Queue:
    """A priority queue of nodes, each at most once, the lowest rank first.

    Entries are updated lazily: when `pop` reaches one whose node has left the tree or has a higher rank by then, it
    drops or requeues it.
    """

    def __init__(self, rank: Policy):
        self._rank = rank
        self._heap: list[tuple[Rank, int, PrefixNode]] = []
        self._inside: set[PrefixNode] = set()
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: PrefixNode) -> bool:
        return node in self._inside

    def push(self, node: PrefixNode) -> None:
        """Adds a node unless it is queued already."""
        if node not in self._inside:
            self._inside.add(node)
            heapq.heappush(self._heap, (self._rank(node), next(self._serial), node))

    def pop(self) -> PrefixNode | None:
        """Removes and returns the node of the tree with the lowest rank; None if the queue is empty."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            self._inside.remove(node)
            if node.parent is None:
                continue
            if self._rank(node) == rank:
                return node
            self.push(node)
        return None

    def put_back(self, nodes: Iterable[PrefixNode]) -> None:
        """Queues popped nodes again, except those that have left the tree."""
        for node in nodes:
            if node.parent is not None:
                self.push(node)

    def sweep(self) -> None:
        """Drops the entries of nodes that left the tree."""
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        self._inside = {entry[2] for entry in self._heap}
        heapq.heapify(self._heap)


class Tree(Protocol):
    """The part of radix.PrefixTree that eviction uses; the methods are documented there."""

    def nodes(self) -> Iterable[PrefixNode]:
        """All nodes, roots included."""
        ...

    def let_go(self, node: PrefixNode, index: int, groups: Iterable[int]) -> None:
        """Removes the blocks of some groups at one index of a node."""
        ...

    def settle(self, node: PrefixNode) -> None:
        """Shortens or removes a leaf whose last entries have no block."""
        ...

    def cut(self, node: PrefixNode, num_blocks: int) -> None:
        """Removes everything after the first `num_blocks` of a node."""
        ...


class Evictor:
    """Chooses blocks to evict and owns the queues; the tree removes the blocks. forgetting: the kind of each group that
    forgets. full: the groups that need all blocks of a prefix."""

    def __init__(
        self,
        tree: Tree,
        pools: Sequence[BlockPool],
        forgetting: Mapping[int, CacheKind],
        full: Sequence[int],
        block_size: int,
        policy: Policy,
    ):
        self._tree = tree
        self._pools = pools
        self._forgetting = forgetting
        self._full = full
        self._block_size = block_size
        self._leaves = Queue(policy)  # all leaves except `_held`; used only if there is a full group
        self._held: list[PrefixNode] = []  # leaves whose last block was held at the time of `_held_at`
        self._held_at = (-1, -1)  # (group, its pool's `idled` count)
        # Per group that forgets: nodes with blocks that only a branch before their end would need; all nodes with
        # blocks.
        self._middles = {g: Queue(policy) for g in forgetting}
        self._ends = {g: Queue(policy) for g in forgetting}

    def push(self, leaf: PrefixNode) -> None:
        """Queues a leaf that is new or has new blocks."""
        self.push_end(leaf)
        for g in self._forgetting:
            self.push_window(leaf, g)

    def push_end(self, leaf: PrefixNode) -> None:
        """Queues a leaf whose last block has changed."""
        if self._full:
            self._leaves.push(leaf)

    def push_window(self, node: PrefixNode, group: int) -> None:
        """Queues a node that has blocks of a group that forgets."""
        self._middles[group].push(node)
        self._ends[group].push(node)

    def sweep(self) -> None:
        """Drops all nodes that have left the tree; `Queue.pop` drops only those that it reaches."""
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
        """Evicts idle blocks of a full group from the ends of leaves until `target` blocks are free."""
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
        """Handles the case that every leaf ends in a held block although blocks above are idle: the holding sequence
        computed its own copy of such a block. Cuts the tree below the deepest idle block, which then ends a leaf."""
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
        """Evicts idle blocks of a group that forgets until `target` are free, from the start of each node of the queue:
        most sequences continue at a node's end. middle: spares the blocks from `_last_window` on."""
        pool = self._pools[group]
        rest: list[PrefixNode] = []
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

    def _last_window(self, node: PrefixNode, group: int) -> int:
        """Index in the node of the first block needed to continue from its end, or from one token before it, as an
        identical prompt does."""
        first = self._forgetting[group].first(node.end(self._block_size) - 1, self._block_size)
        return min(max(0, first - node.start), node.num_blocks)

    def check(self, node: PrefixNode) -> None:
        """Raises AssertionError if the node is missing from a queue that it belongs in."""
        assert node.children or not self._full or node in self._leaves or node in self._held, "a leaf is in no queue"
        for g in self._forgetting:
            blocks = node.blocks[g]
            assert not any(blocks) or node in self._ends[g], "evictable blocks of a group are in no queue"
            assert not any(blocks[: self._last_window(node, g)]) or node in self._middles[g], (
                "an inner node is in no queue"
            )
