"""The kinds of KV cache that a layer can have, one class for each.

kind       a block holds, for each layer           to continue from token t, a sequence needs
PagedKV    keys and values of its tokens           all blocks of [0, t)
Window     the same                                the blocks of the last tokens that t sees
Chunked    the same                                the blocks of the chunk that t lies in
Around     the same                                all blocks: only whole texts are computed
Latent     one row per token, shared by all heads  all blocks of [0, t)
IndexKeys  a row per token, for an indexer         all blocks of [0, t)
State      a state at its start, the inputs since  the block of token t - 1
Cross      keys and values of an encoder's output  all its blocks, for any t

No other module depends on the set of kinds: block tables, prefix tree and tiers ask a kind which blocks a sequence
needs, and the executors' memories ask it what a block consists of. So a new kind is a new class.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Field:
    """A component of a block in each layer: `copies` arrays of one shape.

    exported: the permutation of the shape's axes in which a block is exported. axes: names of the axes in that order.
    exact: float32, regardless of the dtype of keys and values.
    """

    name: str
    shape: tuple[int, ...]
    exported: tuple[int, ...]
    axes: tuple[str, ...] = ()
    copies: int = 1
    exact: bool = False

    def num_bytes(self, item: int) -> int:
        """Bytes in one layer. item: bytes per number of keys and values."""
        return self.copies * prod(self.shape) * (4 if self.exact else item)

    @property
    def scales(self) -> Field:
        """A float32 scale for each row along the last axis, which is exported last too; laid out as exported."""
        shape = tuple(self.shape[axis] for axis in self.exported[:-1])
        return Field(f"{self.name} scale", shape, tuple(range(len(shape))), self.axes[:-1], self.copies, exact=True)

    @property
    def order(self) -> str:
        """The axes of the exported arrays, outermost first."""
        return ",".join(("layer", self.name, *self.axes))


class CacheKind:
    """The base of all cache kinds; a kind is a frozen value. Positions and counts are in tokens; `size` is the block
    size.

    name: for display. needs: what an executor must be able to compute. reach: how many of the last positions, the next
    one included, suffice to continue, 0 for all. window: how many of the last positions a token attends to, 0 for all,
    -n for those in its own chunk of n.
    distance: how far before and after a token the positions lie that it attends to, 0 for all.
    causal: tokens attend to earlier ones only, also where those of a step attend to each other in other layers.
    fixed: number of positions if it is constant from the first step on, 0 if the cache grows with the sequence.
    keeps_starts: a block also holds the state at its start. plain: a block is float32 in every executor, without
    keys and values. latent: a value is the beginning of its key. heads,
    key_dim, value_dim: what attention reads per position, 0 if it reads nothing. row_shape: shape of the float32 array
    that each row of the runner has in addition.
    """

    owns = True  # has memory of its own, unlike Shared
    name: str = ""
    needs: str = ""
    reach: int = 0
    window: int = 0
    distance: int = 0
    causal: bool = False
    fixed: int = 0
    keeps_starts: bool = False
    plain: bool = False
    latent: bool = False
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    row_shape: tuple[int, ...] = ()

    def source(self, model: str, layer: int) -> tuple[str, int]:
        """The owner (model, layer) of the memory that a layer with this kind uses."""
        return model, layer

    # -- where its blocks lie in a sequence --------------------------------------------------------------------

    @property
    def table(self) -> Hashable:
        """A key: layers whose kinds have equal keys share a block table."""
        return self

    @property
    def forgets(self) -> bool:
        """Whether blocks are no longer needed once the sequence is far beyond them."""
        return self.reach > 0

    @property
    def bound(self) -> int:
        """The greatest number of positions whose blocks are needed, 0 for the whole sequence."""
        return self.fixed or self.reach

    def low(self, tokens: int) -> int:
        """The first position needed to continue from `tokens`; it never decreases as `tokens` increases."""
        return max(0, tokens - self.reach + 1) if self.reach else 0

    def first(self, tokens: int, size: int) -> int:
        """Index of the first block needed to continue from `tokens`. The last block is always needed."""
        return max(0, min(self.low(tokens), tokens - 1)) // size

    def blocks(self, tokens: int, size: int) -> int:
        """Length of the block table of a sequence with `tokens` tokens."""
        return -(-(self.fixed or tokens) // size)

    def needed(self, tokens: int, size: int) -> range:
        """The table entries needed to continue from `tokens`."""
        return range(self.first(tokens, size), self.blocks(tokens, size))

    def added(self, first: int, end: int, size: int) -> range:
        """The table entries needed to continue from block `end`, without those that a sequence with its first `first`
        blocks already has."""
        if self.fixed:
            return range(0 if first else self.blocks(0, size))
        return range(max(first, self.first(end * size, size)), end)

    def kept(self, tokens: int, size: int) -> int:
        """The number of table entries that a sequence continuing from `tokens` does not write to."""
        return self.blocks(tokens, size) if self.fixed else tokens // size

    def most(self, tokens: int, chunk: int, size: int) -> int:
        """The greatest number of blocks held at once while `tokens` are computed in chunks of `chunk`."""
        return self.blocks(min(tokens, self.reach + chunk + size) if self.reach else tokens, size)

    def comes_to(self, blocks: int, tokens: int, chunk: int, size: int) -> int:
        """How many of `tokens` a sequence can compute in chunks of `chunk` with this number of blocks."""
        if blocks >= self.most(tokens, chunk, size):
            return tokens
        return 0 if self.fixed else blocks * size

    # -- what lies in a block ----------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Numbers that attention reads per position."""
        return self.heads * (self.key_dim + self.value_dim)

    def fields(self, size: int) -> tuple[Field, ...]:
        """The components of a block of one layer. Raises AssertionError for an invalid block size."""
        raise NotImplementedError

    def keys(self, arrays: Sequence[Any]) -> Any:
        """The keys [blocks, size, heads, key_dim]. arrays: one tensor [copies, blocks, *shape] per field. Raises
        NotImplementedError for a kind without keys."""
        raise NotImplementedError(f"{self.name} caches have no keys")

    def values(self, arrays: Sequence[Any]) -> Any:
        """The values [blocks, size, heads, value_dim]; see `keys`."""
        raise NotImplementedError(f"{self.name} caches have no values")

    def writes(self, arrays: Sequence[Any], k: Any, v: Any) -> tuple[tuple[Any, Any], ...]:
        """The writes (array, rows) that store the keys `k` and values `v` of tokens."""
        return (self.keys(arrays), k), (self.values(arrays), v)

    def stored(self, size: int, coded: bool) -> tuple[Field, ...]:
        """The `fields`; if keys and values are stored as codes, followed by the fields of their scales."""
        fields = self.fields(size)
        return (*fields, *(field.scales for field in fields if coded and not field.exact))

    def block_bytes(self, size: int, item: int, coded: bool = False) -> int:
        """Bytes of a block of one layer. item: bytes per number of keys and values. coded: see `stored`."""
        return sum(field.num_bytes(item) for field in self.stored(size, coded))

    @property
    def row_bytes(self) -> int:
        """Bytes of the additional array of a row of the runner, in one layer."""
        return 4 * prod(self.row_shape) if self.row_shape else 0

    @property
    def facts(self) -> str:
        """The dimensions that distinguish its bytes from those of other kinds with the same name."""
        dims = f"{self.key_dim}" if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        return f"heads={self.heads} dim={dims}"


@dataclass(frozen=True)
class PagedKV(CacheKind):
    """Keys and values of all tokens. value_dim: 0 for that of keys."""

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    name = "full"
    needs = "attention"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.key_dim)

    @property
    def table(self) -> Hashable:
        return "all tokens"

    def fields(self, size: int) -> tuple[Field, ...]:
        if self.key_dim == self.value_dim:
            return (_rows("key/value", size, self.heads, self.key_dim, copies=2),)
        return _rows("key", size, self.heads, self.key_dim), _rows("value", size, self.heads, self.value_dim)

    def keys(self, arrays: Sequence[Any]) -> Any:
        return arrays[0][0]

    def values(self, arrays: Sequence[Any]) -> Any:
        return arrays[-1][-1]


def _rows(name: str, size: int, heads: int, dim: int, copies: int = 1) -> Field:
    return Field(name, (size, heads, dim), (1, 0, 2), ("head", "token", "dim"), copies)


@dataclass(frozen=True)
class Window(PagedKV):
    """Keys and values of the last `window` tokens, the current one included. A window of 1 keeps the block of the token
    before it as well, so that there is always a block to continue from."""

    window: int = 1

    name = "window"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.window > 0, "a window without a token"

    @property
    def reach(self) -> int:  # type: ignore[override]
        return max(2, self.window)

    @property
    def table(self) -> Hashable:
        return "last tokens", self.reach


@dataclass(frozen=True)
class CausalWindow(Window):
    """A Window of a model whose other layers attend in both directions."""

    causal = True


@dataclass(frozen=True)
class Chunked(PagedKV):
    """Keys and values of the chunk of `chunk` tokens that the row lies in. At its start, the block of the token before
    is kept, so that there is always a block to continue from."""

    chunk: int = 1

    name = "chunked"
    needs = "attention within chunks"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.chunk > 0, "a chunk without a token"

    @property
    def reach(self) -> int:  # type: ignore[override]
        return max(2, self.chunk)

    @property
    def window(self) -> int:  # type: ignore[override]
        return -self.chunk

    @property
    def table(self) -> Hashable:
        return "chunk", self.chunk

    def low(self, tokens: int) -> int:
        return tokens // self.chunk * self.chunk


@dataclass(frozen=True)
class Around(PagedKV):
    """Keys and values of all tokens of a text that attend in both directions, each to those that lie at most `distance`
    positions before or after it."""

    distance: int = 1

    name = "around"
    needs = "attention within a distance in both directions"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.distance > 0, "a token that attends to itself alone"


@dataclass(frozen=True)
class Latent(CacheKind):
    """One row of `key_dim` numbers per token, which all heads read as their key; its first `value_dim` numbers are
    their value."""

    key_dim: int = 0
    value_dim: int = 0

    name = "latent"
    needs = "latent attention"
    latent = True
    heads = 1

    def __post_init__(self) -> None:
        assert 0 <= self.value_dim <= self.key_dim, "a value is the beginning of a key"

    @property
    def table(self) -> Hashable:
        return "all tokens"

    def fields(self, size: int) -> tuple[Field, ...]:
        return (_rows("row", size, 1, self.key_dim),)

    def keys(self, arrays: Sequence[Any]) -> Any:
        return arrays[0][0]

    def values(self, arrays: Sequence[Any]) -> Any:
        return arrays[0][0][..., : self.value_dim]

    def writes(self, arrays: Sequence[Any], k: Any, v: Any) -> tuple[tuple[Any, Any], ...]:
        return ((self.keys(arrays), k),)


@dataclass(frozen=True)
class IndexKeys(CacheKind):
    """One row of `dim` numbers per token, float32, which an indexer compares with a query to select the tokens that
    attention sees."""

    dim: int = 0

    name = "index keys"
    needs = "sparse attention"
    plain = True

    @property
    def table(self) -> Hashable:
        return "all tokens"

    @property
    def facts(self) -> str:
        return f"dim={self.dim}"

    def fields(self, size: int) -> tuple[Field, ...]:
        return (Field(f"(token,{self.dim}) index keys", (size * self.dim,), (0,), exact=True),)

    def keys(self, arrays: Sequence[Any]) -> Any:
        """The keys [blocks, size, dim]."""
        return arrays[0][0].unflatten(1, (-1, self.dim))


@dataclass(frozen=True)
class State(CacheKind):
    """A recurrent state at the start of the block and the inputs of its tokens, from which the later states follow. So
    a token is computed with the same arithmetic wherever a chunk begins. Everything is float32.

    state: shape of the state. inputs: numbers per token that update the state. before: the number of tokens before the
    block whose inputs the block keeps too (the reach of a convolution). running: each row of the runner also has the
    state after its last token, so that decoding does not start again at the block's start.
    """

    state: tuple[int, ...] = ()
    inputs: int = 0
    before: int = 0
    running: bool = False

    name = "state"
    needs = "recurrent layers"
    reach = 2  # a state is computed from the start of the block that holds the token before
    keeps_starts = True
    plain = True

    @property
    def table(self) -> Hashable:
        return "state"

    @property
    def row_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.state if self.running else ()

    def fields(self, size: int) -> tuple[Field, ...]:
        assert self.before <= size, "what a block keeps of the tokens before it lies in the one before"
        numbers = prod(self.state) + (self.before + size) * self.inputs
        order = f"state {self.state}+(token,{self.inputs}) of {self.before} before and its own"
        return (Field(order, (numbers,), (0,), exact=True),)

    def states(self, arrays: Sequence[Any]) -> Any:
        """The states at the start of each block, [blocks, *state]."""
        return arrays[0][0][:, : prod(self.state)].unflatten(1, self.state)

    def inputs_of(self, arrays: Sequence[Any]) -> Any:
        """The inputs of each block's tokens and of those before it, [blocks, before + size, inputs]."""
        return arrays[0][0][:, prod(self.state) :].unflatten(1, (-1, self.inputs))


@dataclass(frozen=True)
class Cross(PagedKV):
    """Keys and values of the `length` positions of an encoder's output: written once, in the sequence's first step, and
    read by all its tokens. They depend only on the namespace of the sequence."""

    length: int = 1

    name = "cross"
    needs = "cross-attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.length > 0, "an encoder's output without a position"

    @property
    def fixed(self) -> int:  # type: ignore[override]
        return self.length

    @property
    def table(self) -> Hashable:
        return "encoder", self.length


@dataclass(frozen=True, slots=True)
class Shared:
    """Replaces a kind for a layer without memory of its own: it reads the memory of `layer`, in its own model or in the
    `model` that it shares a cache layout with."""

    layer: int
    model: str | None = None

    owns = False

    def source(self, model: str, layer: int) -> tuple[str, int]:
        """See CacheKind.source."""
        return model if self.model is None else self.model, self.layer


def attention(heads: int, dim: int, window: int = 0, value_dim: int = 0) -> PagedKV:
    """The cache kind of a self-attention layer. dim: of keys. window: in tokens, 0 for all. value_dim: 0 for that of
    keys."""
    return Window(heads, dim, value_dim, window=window) if window else PagedKV(heads, dim, value_dim)
