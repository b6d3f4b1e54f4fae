"""Nodes of the prefix tree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from kvasir.kv.tiers.block import StoredBlock, marked, root_key

ID_BYTES = 4
LOWEST = -(2**63)  # priority of a node that no request has inserted yet


def common(a: bytes, b: bytes) -> int:
    """The number of leading token ids that two packed runs share. Bisection: linear in the length, at memcmp speed."""
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


class PrefixNode:
    """A run of tokens that starts at a block boundary, and the blocks that hold it.

    ids: the packed token ids of the run. Only the run of a leaf may end inside a block.
    blocks: per cache group, one id for each full or partial block of the run; SCRATCH where a group that forgets has
    none. start: number of blocks before the run. low: per group, a number of leading entries known to be SCRATCH.
    heads, children: sorted; heads[i] is the first block of children[i].ids, or all of it if that is shorter. No head is
    a prefix of another, so children that share a prefix of any length are neighbours.
    fixed: only in a root; for each group of fixed size, the blocks that all sequences of the namespace share.
    digests: keys of the leading full blocks (tiers.block), computed on demand; b"" from the first marked block on.
    hashes: of the full blocks that a ChangeLog has reported; see there.
    A node removed from its tree has no parent and no ids.
    """

    __slots__ = (
        *("blocks", "children", "created", "digests", "fixed", "hashes", "heads", "hits", "ids"),
        *("last_used", "low", "namespace", "parent", "priority", "start"),
    )

    def __init__(
        self, namespace: bytes, parent: PrefixNode | None, start: int, ids: bytes, blocks: tuple[list[int], ...]
    ):
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.ids = ids
        self.blocks = blocks
        self.low = [0] * len(blocks)
        self.fixed: dict[int, list[int]] = {}
        self.heads: list[bytes] = []
        self.children: list[PrefixNode] = []
        self.digests: list[bytes] = []
        self.hashes: list[bytes] = []
        self.created = self.last_used = self.hits = 0
        self.priority = LOWEST

    @property
    def num_blocks(self) -> int:
        """Blocks of the run, a partial last one included."""
        return len(self.blocks[0])

    def end(self, block_size: int) -> int:
        """Tokens from the start of the sequence to the end of the run."""
        return self.start * block_size + len(self.ids) // ID_BYTES

    def find(self, block: bytes) -> PrefixNode | None:
        """The child whose run shares the longest prefix with `block`, the packed ids of at most one block; None if no
        child shares a token."""
        i = bisect_left(self.heads, block)
        if i < len(self.heads) and self.heads[i] == block:
            return self.children[i]
        near = [j for j in (i, i - 1) if 0 <= j < len(self.heads)]
        shared, j = max(((common(self.heads[j], block), j) for j in near), default=(0, 0))
        return self.children[j] if shared else None

    def add(self, head: bytes, child: PrefixNode) -> None:
        """Inserts a child at its place in the order."""
        i = bisect_left(self.heads, head)
        self.heads.insert(i, head)
        self.children.insert(i, child)

    def remove(self, head: bytes) -> None:
        """Removes the child with this head."""
        i = self.slot(head)
        del self.heads[i], self.children[i]

    def slot(self, head: bytes) -> int:
        """The index of the child with this head."""
        i = bisect_left(self.heads, head)
        assert self.heads[i] == head, "a child has the wrong key"
        return i

    def split(self, num_blocks: int, head: bytes) -> PrefixNode:
        """Moves the first `num_blocks` of the run to a new parent node, which replaces this one in the old parent.
        Returns the new node. head: the first block of the run."""
        assert self.parent is not None and 0 < num_blocks < self.num_blocks
        cut = num_blocks * len(head)
        upper = PrefixNode(
            self.namespace, self.parent, self.start, self.ids[:cut], tuple(b[:num_blocks] for b in self.blocks)
        )
        upper.created, upper.last_used, upper.hits = self.created, self.last_used, self.hits
        upper.priority = self.priority
        upper.low = [min(low, num_blocks) for low in self.low]
        upper.digests, upper.hashes = self.digests[:num_blocks], self.hashes[:num_blocks]
        self.parent.children[self.parent.slot(head)] = upper
        self.parent, self.start, self.ids = upper, self.start + num_blocks, self.ids[cut:]
        self.low = [max(0, low - num_blocks) for low in self.low]
        for b in self.blocks:
            del b[:num_blocks]
        del self.digests[:num_blocks], self.hashes[:num_blocks]
        upper.add(self.ids[: len(head)], self)
        return upper

    def shorten(self, num_blocks: int, block_bytes: int) -> None:
        """Truncates the run of a leaf to its first `num_blocks`."""
        if num_blocks < self.num_blocks:
            self.ids = self.ids[: num_blocks * block_bytes]
            del self.digests[num_blocks:]
            for blocks in self.blocks:
                del blocks[num_blocks:]

    def parent_key(self, index: int, block_bytes: int) -> bytes:
        """The key (tiers.block) of the block before the one at `index`; b"" if any block before `index` is marked."""
        above: list[PrefixNode] = [self]
        while (parent := above[-1].parent) is not None and len(parent.digests) < parent.num_blocks:
            above.append(parent)
        for ancestor in above[:0:-1]:
            ancestor._digest(ancestor.num_blocks, block_bytes)
        self._digest(index, block_bytes)
        return self._key_before(index)

    def _digest(self, num_blocks: int, block_bytes: int) -> None:
        """Computes the missing digests of the first `num_blocks`; the ancestors have theirs already."""
        for i in range(len(self.digests), num_blocks):
            self.digests.append(self._named(self._key_before(i), i, block_bytes))

    def _named(self, parent: bytes, index: int, block_bytes: int) -> bytes:
        ids = self.ids[index * block_bytes : (index + 1) * block_bytes]
        return StoredBlock(self.namespace, parent, ids).key if parent and not marked(ids) else b""

    def _key_before(self, index: int) -> bytes:
        if index:
            return self.digests[index - 1]
        return self.parent.digests[-1] if self.parent and self.parent.digests else root_key(self.namespace)

    def tree(self) -> Iterator[PrefixNode]:
        """This node and all its descendants, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def check(self, block_bytes: int) -> None:
        """Raises AssertionError if an invariant of the node or of its children is violated."""
        heads = [child.ids[:block_bytes] for child in self.children]
        assert self.heads == heads == sorted(heads), "children are out of order"
        assert not any(b.startswith(a) for a, b in pairwise(heads)), "a child is a prefix of another"
        for child in self.children:
            assert child.parent is self and child.namespace == self.namespace, "a child has another parent"
            assert child.start == self.start + self.num_blocks, "a child starts in the wrong place"
        if self.parent is None:
            return
        num_blocks = -(-len(self.ids) // block_bytes)
        assert num_blocks and all(len(blocks) == num_blocks for blocks in self.blocks), (
            "the number of blocks does not match the ids"
        )
        assert not self.children or len(self.ids) % block_bytes == 0, "a partly filled block is not at the end"
        assert self.children or any(b[-1] for b in self.blocks), "a leaf ends without a block"
        for blocks, low in zip(self.blocks, self.low, strict=True):
            assert not any(blocks[:low]), "there are blocks before the first"
        for i, digest in enumerate(self.digests):
            assert digest == self._named(self.parent_key(i, block_bytes), i, block_bytes), (
                "the digest does not match the ids"
            )
