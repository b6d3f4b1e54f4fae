"""Names of blocks outside the pool, and the facts that say who may use a store's bytes.

A block is named by all ids before it: key[-1] = SHA-256(namespace), key[i] = SHA-256(key[i-1] + ids of block i). Each
cache group's bytes of a block are a *part* of their own, (key, group): a window group is loaded for the last blocks of
a prefix only.
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

Name = tuple[bytes, int]  # of a part: key and group


@dataclass(frozen=True, slots=True)
class Block:
    """One block's tokens in their place. `ids`: plan.pack_ids of exactly block_size tokens; `parent`: a key."""

    namespace: bytes
    parent: bytes
    ids: bytes
    key: bytes = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "key", sha256(self.parent + self.ids).digest())


def root_key(namespace: bytes) -> bytes:
    """The parent of the first block. The namespace names the model, the tenant or salt, what holds for all tokens."""
    return sha256(namespace).digest()


def marked(ids: bytes) -> bool:
    """Whether there are numbers below 0, which stand for what has no name beyond this process."""
    return max(ids[ID_BYTES - 1 :: ID_BYTES], default=0) > 0x7F


def chain(namespace: bytes, ids: bytes, block_size: int) -> list[Block]:
    """The whole blocks of `ids` (packed) up to the first that is marked; a last block that is not full has no name."""
    step = block_size * ID_BYTES
    pieces = (ids[start : start + step] for start in range(0, len(ids) - step + 1, step))
    return _chain(namespace, itertools.takewhile(lambda piece: not marked(piece), pieces))


def fixed_chain(namespace: bytes, count: int, block_size: int) -> list[Block]:
    """The blocks of a group whose size is fixed. No token has an id of -1, so no other block is named so."""
    return _chain(namespace, itertools.repeat(b"\xff" * ID_BYTES * block_size, count))


def _chain(namespace: bytes, pieces: Iterable[bytes]) -> list[Block]:
    blocks: list[Block] = []
    parent = root_key(namespace)
    for ids in pieces:
        blocks.append(Block(namespace, parent, ids))
        parent = blocks[-1].key
    return blocks


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One cache group of a store: `layout` says what its `num_bytes` bytes of a block are."""

    layout: str
    num_bytes: int


def layout(kind: str, dtype: str, layers: Sequence[int], facts: str, order: str) -> str:
    """The canonical description of layers' bytes. facts: their sizes. order: names the axes, outermost first."""
    numbers = ",".join(map(str, layers))
    return f"{kind} {dtype} layers={numbers} {facts} order={order}"


def short(text: str) -> str:
    """The text, or its digest where it is too long."""
    return text if len(text) <= MAX_TEXT else f"sha256 {sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What all bytes of a store have in common; a part of other facts is never served.

    model: identity of the weights. numerics: version of the arithmetic. Raises ValueError beyond the bounds above.
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
        return sha256(msgspec.msgpack.encode(self)).digest()

    def admits(self, block: Block, group: int) -> bool:
        """Whether the sizes of a part's name, which may come from outside, are those of this store."""
        return (
            0 <= group < len(self.groups)
            and len(block.namespace) <= MAX_NAMESPACE
            and len(block.parent) == KEY_BYTES
            and len(block.ids) == self.block_size * ID_BYTES
        )
