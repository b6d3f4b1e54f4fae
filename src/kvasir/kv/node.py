"""Nodes of the prefix tree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from kvasir.kv.tiers.block import Block, marked, root_key

ID_BYTES = 4
LOWEST = -(2**63)  # priority of what no request has left yet


def common(a: bytes, b: bytes) -> int:
    """How many leading token ids of two packed runs are equal. Halving: linear in the length, at memcmp's speed."""
    low, high = 0, min(len(a), len(b))
    if a[:ID_BYTES] != b[:ID_BYTES]:
        return 0
    if a[:high] == b[:high]:
        return high // ID_BYTES
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low // ID_BYTES


class Node:
    """A run of tokens that starts at a block boundary, with the blocks that hold them.

    ids: the run, packed. Whole blocks of it; only the run of a leaf may end inside a block.
    blocks: per cache group one id for each begun block of the run, SCRATCH where a window group has none.
    start: blocks before the run. low: per group, so many of the first entries are known to be SCRATCH.
    heads, children: sorted; heads[i] is the first block of children[i].ids, or all of it when that is shorter. No head
    is the beginning of another, so children with a common beginning of any length are neighbours.
    fixed: of a root, per group whose size is fixed all its blocks, the same for all sequences of the namespace.
    digests: keys of the first whole blocks (tiers.block), as far as anybody asked; b"" from the first marked one on.
    A node that was taken out of its tree has no parent and no ids.
    """

    __slots__ = (
        *("blocks", "children", "created", "digests", "fixed", "heads", "hits", "ids"),
        *("last_used", "low", "namespace", "parent", "priority", "start"),
    )

    def __init__(self, namespace: bytes, parent: Node | None, start: int, ids: bytes, blocks: tuple[list[int], ...]):
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.ids = ids
        self.blocks = blocks
        self.low = [0] * len(blocks)
        self.fixed: dict[int, list[int]] = {}
        self.heads: list[bytes] = []
        self.children: list[Node] = []
        self.digests: list[bytes] = []
        self.created = self.last_used = self.hits = 0
        self.priority = LOWEST

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])

    def end(self, block_size: int) -> int:
        """Tokens up to the end of the run."""
        return self.start * block_size + len(self.ids) // ID_BYTES

    def find(self, block: bytes) -> Node | None:
        """The child whose run has most in common with `block`, the ids of at most one block; None when none begins
        alike."""
        i = bisect_left(self.heads, block)
        if i < len(self.heads) and self.heads[i] == block:
            return self.children[i]
        near = [j for j in (i, i - 1) if 0 <= j < len(self.heads)]
        shared, j = max(((common(self.heads[j], block), j) for j in near), default=(0, 0))
        return self.children[j] if shared else None

    def add(self, head: bytes, child: Node) -> None:
        i = bisect_left(self.heads, head)
        self.heads.insert(i, head)
        self.children.insert(i, child)

    def remove(self, head: bytes) -> None:
        i = self.slot(head)
        del self.heads[i], self.children[i]

    def slot(self, head: bytes) -> int:
        i = bisect_left(self.heads, head)
        assert self.heads[i] == head, "a child is not where it belongs"
        return i

    def split(self, num_blocks: int, head: bytes) -> Node:
        """Gives the first blocks of the run to a new node above, which takes this one's place. Returns it."""
        assert self.parent is not None and 0 < num_blocks < self.num_blocks
        cut = num_blocks * len(head)
        upper = Node(
            self.namespace, self.parent, self.start, self.ids[:cut], tuple(b[:num_blocks] for b in self.blocks)
        )
        upper.created, upper.last_used, upper.hits = self.created, self.last_used, self.hits
        upper.priority = self.priority
        upper.low = [min(low, num_blocks) for low in self.low]
        upper.digests = self.digests[:num_blocks]
        self.parent.children[self.parent.slot(head)] = upper
        self.parent, self.start, self.ids = upper, self.start + num_blocks, self.ids[cut:]
        self.low = [max(0, low - num_blocks) for low in self.low]
        for b in self.blocks:
            del b[:num_blocks]
        del self.digests[:num_blocks]
        upper.add(self.ids[: len(head)], self)
        return upper

    def shorten(self, num_blocks: int, block_bytes: int) -> None:
        """Ends the run of a leaf after its first blocks."""
        if num_blocks < self.num_blocks:
            self.ids = self.ids[: num_blocks * block_bytes]
            del self.digests[num_blocks:]
            for blocks in self.blocks:
                del blocks[num_blocks:]

    def parent_key(self, index: int, block_bytes: int) -> bytes:
        """Key (tiers.block) of the block before the one at `index`; b"" after a marked one."""
        above: list[Node] = [self]
        while (parent := above[-1].parent) is not None and len(parent.digests) < parent.num_blocks:
            above.append(parent)
        for ancestor in above[:0:-1]:
            ancestor._digest(ancestor.num_blocks, block_bytes)
        self._digest(index, block_bytes)
        return self._key_before(index)

    def _digest(self, num_blocks: int, block_bytes: int) -> None:
        """Completes the digests up to `num_blocks`; the nodes above have theirs."""
        for i in range(len(self.digests), num_blocks):
            self.digests.append(self._named(self._key_before(i), i, block_bytes))

    def _named(self, parent: bytes, index: int, block_bytes: int) -> bytes:
        ids = self.ids[index * block_bytes : (index + 1) * block_bytes]
        return Block(self.namespace, parent, ids).key if parent and not marked(ids) else b""

    def _key_before(self, index: int) -> bytes:
        if index:
            return self.digests[index - 1]
        return self.parent.digests[-1] if self.parent and self.parent.digests else root_key(self.namespace)

    def tree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def check(self, block_bytes: int) -> None:
        """Raises AssertionError."""
        heads = [child.ids[:block_bytes] for child in self.children]
        assert self.heads == heads == sorted(heads), "children are not in order"
        assert not any(b.startswith(a) for a, b in pairwise(heads)), "a child is the beginning of another"
        for child in self.children:
            assert child.parent is self and child.namespace == self.namespace, "a child has another parent"
            assert child.start == self.start + self.num_blocks, "a child starts in the wrong place"
        if self.parent is None:
            return
        num_blocks = -(-len(self.ids) // block_bytes)
        assert num_blocks and all(len(blocks) == num_blocks for blocks in self.blocks), "blocks and ids differ"
        assert not self.children or len(self.ids) % block_bytes == 0, "a partly filled block is not at the end"
        assert self.children or any(b[-1] for b in self.blocks), "a leaf ends without a block"
        for blocks, low in zip(self.blocks, self.low, strict=True):
            assert not any(blocks[:low]), "there are blocks below the lowest"
        for i, digest in enumerate(self.digests):
            assert digest == self._named(self.parent_key(i, block_bytes), i, block_bytes), "a digest of other ids"
