"""What a prefix tree holds, for others to follow: hashes of its full blocks, as numbered changes after a snapshot.

The hash of a block covers all that its keys and values depend on up to its end: hash[-1] of the namespace, and hash[i]
of hash[i - 1], the ids of block i, and the marks of inputs that begin in it. So anyone who has a request can compute
the hashes of its blocks (`block_hash`) without this process. They serve to predict, never to take contents: 128 bits.

A follower starts from a snapshot and applies changes in the order of their numbers. If one is missing, it asks for
another snapshot.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvasir.kv.node import ID_BYTES, PrefixNode

HASH_BYTES = 16
MOST_SCOPES = 1 << 16  # namespaces that a log remembers
Mark = tuple[int, bytes]  # index in the block, hash of the inputs that begin there


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What a namespace stands for. adapters: names of those in effect from the first token on, in order, with their
    scales unless 1; salt: of the cache; inputs: hash of other inputs of the whole sequence. Empty for none."""

    adapters: str = ""
    salt: str = ""
    inputs: bytes = b""


@dataclass(frozen=True, slots=True)
class RunContents:
    """What blocks were computed from. ids: packed, of all blocks. marks: by index in the run. first: whether the run is
    at the beginning of a sequence."""

    ids: bytes
    scope: CacheScope = CacheScope()
    marks: tuple[Mark, ...] = ()
    first: bool = False


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks that follow one another in a sequence. hashes: of each, one after another. stored: they came, otherwise
    they went. parent: hash of the block before them; only if they came. contents: only if they came, and are asked
    for."""

    hashes: bytes
    stored: bool = True
    parent: bytes = b""
    contents: RunContents | None = None

    def each(self) -> Iterator[bytes]:
        """The hashes."""
        return (self.hashes[i : i + HASH_BYTES] for i in range(0, len(self.hashes), HASH_BYTES))


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes of a prefix cache, in order. number: one more than that of the changes before. snapshot: the runs are all
    blocks that there are. block_size: in tokens."""

    number: int
    block_size: int
    runs: tuple[BlockRun, ...] = ()
    snapshot: bool = False


def root_hash(namespace: bytes) -> bytes:
    """What the hash of a first block follows."""
    return sha256(b"root" + namespace).digest()[:HASH_BYTES]


def block_hash(parent: bytes, ids: bytes, marks: Iterable[Mark] = ()) -> bytes:
    """The hash of a full block. ids: packed. marks: those that begin in it, in order."""
    found = sha256(parent + ids)
    for index, mark in marks:
        found.update(struct.pack("<i", index) + mark)
    return found.digest()[:HASH_BYTES]


class ChangeLog:
    """Collects the changes of one tree, from the moment at which it is attached to it (`PrefixTree.log`).

    pair: gives the id and the mark that a negative id stands for, None if that is not known any more; such blocks, and
    those after them, are not reported. reports: whether blocks of a namespace are. contents: whether runs have their
    contents; those of namespaces that were not `named` since the log was made are not reported then."""

    def __init__(
        self,
        block_size: int,
        pair: Callable[[int], tuple[int, bytes] | None],
        reports: Callable[[bytes], bool] = lambda namespace: True,
        contents: bool = False,
    ):
        self._block_size, self._block_bytes = block_size, block_size * ID_BYTES
        self._pair, self._reports = pair, reports
        self.contents = contents
        self._scopes: OrderedDict[bytes, CacheScope] = OrderedDict()  # the least recently named first
        self._runs: list[BlockRun] = []
        self._number = 0

    def name(self, namespace: bytes, scope: Callable[[], CacheScope]) -> None:
        """Called before blocks of a namespace come, if the log has contents."""
        self._scopes[namespace] = self._scopes.pop(namespace, None) or scope()
        if len(self._scopes) > MOST_SCOPES:
            self._scopes.popitem(last=False)

    def snapshot(self, nodes: Iterable[PrefixNode]) -> CacheChanges:
        """All blocks of a tree, parents first. Discards the changes that were not taken."""
        self._runs = []
        for node in nodes:
            node.hashes = []
            self.gained(node)
        return self._taken(True)

    def take(self) -> CacheChanges | None:
        """The changes since the last call; None if there are none."""
        return self._taken(False) if self._runs else None

    def _taken(self, snapshot: bool) -> CacheChanges:
        runs, self._runs = tuple(self._runs), []
        self._number += 1
        return CacheChanges(self._number, self._block_size, runs, snapshot)

    def gained(self, node: PrefixNode) -> None:
        """Reports the full blocks of a node that have not been reported."""
        first, parent = len(node.hashes), self._before(node)
        before = parent
        for i in range(first, len(node.ids) // self._block_bytes):
            before = before and self._hash(before, node.ids[i * self._block_bytes : (i + 1) * self._block_bytes])
            node.hashes.append(before)
        if new := b"".join(node.hashes[first:]):
            end = first + len(new) // HASH_BYTES
            contents = self._contents(node, first, end) if self.contents else None
            self._runs.append(BlockRun(new, True, parent, contents))

    def _contents(self, node: PrefixNode, first: int, end: int) -> RunContents:
        """Of the blocks of a node from `first` to `end`, whose marks are known."""
        ids = array("i", node.ids[first * self._block_bytes : end * self._block_bytes])
        marks = self._unmarked(ids) or []
        return RunContents(ids.tobytes(), self._scopes[node.namespace], tuple(marks), not node.start + first)

    def lost(self, node: PrefixNode, num_blocks: int) -> None:
        """Reports that all blocks of a node after the first `num_blocks` are gone."""
        if gone := b"".join(node.hashes[num_blocks:]):
            self._runs.append(BlockRun(gone, False))
        del node.hashes[num_blocks:]

    def _before(self, node: PrefixNode) -> bytes:
        """The hash before the first block that was not reported; b"" if there is none."""
        if node.hashes:
            return node.hashes[-1]
        if node.parent is not None and node.parent.parent is not None:
            return node.parent.hashes[-1]
        known = not self.contents or node.namespace in self._scopes
        return root_hash(node.namespace) if known and self._reports(node.namespace) else b""

    def _hash(self, parent: bytes, ids: bytes) -> bytes:
        """b"" if the block has a mark that is not known."""
        numbers = array("i", ids)
        marks = self._unmarked(numbers)
        return b"" if marks is None else block_hash(parent, numbers.tobytes() if marks else ids, marks)

    def _unmarked(self, ids: array[int]) -> list[Mark] | None:
        """The marks of ids, which get the ids that the marks replace; None if one is not known."""
        marks: list[Mark] = []
        for i, number in enumerate(ids if min(ids) < 0 else ()):
            if number < 0:
                pair = self._pair(number)
                if pair is None:
                    return None
                ids[i], mark = pair
                marks.append((i, mark))
        return marks


def chain(namespace: bytes, ids: Sequence[int], marks: dict[int, bytes], block_size: int) -> Iterator[bytes]:
    """The hashes of the full blocks of a sequence. marks: by position, ascending."""
    packed, parent, starts = array("i", ids).tobytes(), root_hash(namespace), sorted(marks)
    size, at = block_size * ID_BYTES, 0
    for i in range(len(ids) // block_size):
        end, inside = (i + 1) * block_size, []
        while at < len(starts) and starts[at] < end:
            inside.append((starts[at] - i * block_size, marks[starts[at]]))
            at += 1
        parent = block_hash(parent, packed[i * size : (i + 1) * size], inside)
        yield parent
