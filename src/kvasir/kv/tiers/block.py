"""Names of blocks outside the pool, and the facts that a store and its readers must agree on.

The name of a block depends on all ids up to its end: key[-1] = SHA-256(namespace), key[i] = SHA-256(key[i-1] + ids of
block i). The bytes of a block in one cache group are a *part*, named (key, group): a window group loads only the last
blocks of a prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

KEY_BYTES = 32
MAX_NAMESPACE = 4096  # bytes
MAX_TEXT = 1024  # characters of an identity, a version, a layout
MAX_BLOCK_SIZE = 4096  # tokens
MAX_GROUPS = 64
MAX_PART = 1 << 32  # bytes
ID_BYTES = 4

Name = tuple[bytes, int]  # of a part: (key, group)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The identity of a full block. ids: plan.pack_ids of exactly block_size tokens. parent: key of the block before
    it. key: its own key."""

    namespace: bytes
    parent: bytes
    ids: bytes
    key: bytes = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "key", sha256(self.parent + self.ids).digest())


def root_key(namespace: bytes) -> bytes:
    """The parent key of a first block. The namespace identifies the tenant or salt, and all inputs that apply to
    every token; the model is part of a store's facts."""
    return sha256(namespace).digest()


def marked(ids: bytes) -> bool:
    """Whether there are negative ids (packed): they stand for content that has no name outside this process."""
    return max(ids[ID_BYTES - 1 :: ID_BYTES], default=0) > 0x7F


def chain(namespace: bytes, ids: bytes, block_size: int) -> list[StoredBlock]:
    """The full blocks of `ids` (packed) before the first marked one; a partial last block has no name."""
    size = block_size * ID_BYTES
    pieces = (ids[start : start + size] for start in range(0, len(ids) - size + 1, size))
    return _chain(namespace, itertools.takewhile(lambda piece: not marked(piece), pieces))


def fixed_chain(namespace: bytes, count: int, block_size: int) -> list[StoredBlock]:
    """The blocks of a group of fixed size. Their ids are all -1, which no token has, so the names are unique."""
    return _chain(namespace, itertools.repeat(b"\xff" * ID_BYTES * block_size, count))


def _chain(namespace: bytes, pieces: Iterable[bytes]) -> list[StoredBlock]:
    blocks: list[StoredBlock] = []
    parent = root_key(namespace)
    for ids in pieces:
        blocks.append(StoredBlock(namespace, parent, ids))
        parent = blocks[-1].key
    return blocks


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One cache group of a store. layout: describes the `num_bytes` bytes of a block in this group."""

    layout: str
    num_bytes: int


def layout(kind: str, dtype: str, layers: Sequence[int], facts: str, order: str) -> str:
    """The canonical description of the bytes of some layers. facts: their dimensions. order: the axes, outermost
    first."""
    numbers = ",".join(map(str, layers))
    return f"{kind} {dtype} layers={numbers} {facts} order={order}"


def short(text: str) -> str:
    """The text, or its SHA-256 digest if it is longer than MAX_TEXT."""
    return text if len(text) <= MAX_TEXT else f"sha256 {sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Properties that all parts of a store share; a part with other facts is never served.

    model: identity of the weights. numerics: the numerics version. Raises ValueError if a value exceeds the bounds
    above.
    """

    model: str
    numerics: str
    block_size: int
    groups: tuple[GroupFacts, ...]

    def __post_init__(self):
        texts = (self.model, self.numerics, *(g.layout for g in self.groups))
        if any(len(text) > MAX_TEXT for text in texts):
            raise ValueError(f"a store's identity, version and layouts have at most {MAX_TEXT} characters each")
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"a block has 1 to {MAX_BLOCK_SIZE} tokens, got {self.block_size}")
        if not 1 <= len(self.groups) <= MAX_GROUPS or not all(0 < g.num_bytes <= MAX_PART for g in self.groups):
            raise ValueError(f"a store has 1 to {MAX_GROUPS} groups, each of 1 to {MAX_PART} bytes a block")

    def digest(self) -> bytes:
        """SHA-256 of all facts; peers compare it."""
        return sha256(msgspec.msgpack.encode(self)).digest()

    def admits(self, block: StoredBlock, group: int) -> bool:
        """Whether the name of a part, which may come from another process, has the sizes that this store expects."""
        return (
            0 <= group < len(self.groups)
            and len(block.namespace) <= MAX_NAMESPACE
            and len(block.parent) == KEY_BYTES
            and len(block.ids) == self.block_size * ID_BYTES
        )
