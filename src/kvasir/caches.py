"""What a layer remembers of a sequence: a class for each kind of cache.

kind      a block holds, of each layer              to continue from token t, a sequence needs
PagedKV   keys and values of its tokens             all blocks of [0, t)
Window    the same                                  the blocks of the last tokens that t sees
Latent    one row of each token, for all heads      all blocks of [0, t)
State     a state at its start, the inputs since    the block of token t - 1
Cross     keys and values of an encoder's output    all its blocks, wherever t is

No other module knows which kinds there are: the block tables, the prefix tree and the tiers ask a kind where its blocks
lie in a sequence, and the executors' memories ask it what lies in a block. So a new kind is a new class.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Field:
    """Arrays that a block has of each layer, `copies` of one shape.

    exported: the axes of the shape in the order in which they leave the cache; axes: their names, in this order. exact:
    float32, whatever the type of keys and values.
    """

    name: str
    shape: tuple[int, ...]
    exported: tuple[int, ...]
    axes: tuple[str, ...] = ()
    copies: int = 1
    exact: bool = False

    def num_bytes(self, item: int) -> int:
        """item: bytes of a number of the type of keys and values."""
        return self.copies * prod(self.shape) * (4 if self.exact else item)

    @property
    def order(self) -> str:
        """The axes of the exported numbers, outermost first."""
        return ",".join(("layer", self.name, *self.axes))


class Kind:
    """What is common to all kinds; a kind is a frozen value. Positions and counts are in tokens, `size` is that of a
    block.

    name: for people. needs: what an executor must be able to compute. reach: so many of the last positions, the next
    one included, are enough to continue, 0 for all. window: so many of them a row sees, 0 for all. fixed: positions
    that it has from the first step on, 0 where it grows with the sequence. keeps_starts: a block also holds what was at
    its start. heads, key_dim, value_dim: what attention reads of a position, 0 where it reads nothing. row_shape: of
    what a row of the runner has beside the blocks, float32.
    """

    owns = True  # memory, which a layer that shares has not
    name: str = ""
    needs: str = ""
    reach: int = 0
    window: int = 0
    fixed: int = 0
    keeps_starts: bool = False
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    row_shape: tuple[int, ...] = ()

    def source(self, model: str, layer: int) -> tuple[str, int]:
        """Whose memory a layer with this kind uses: (model, layer)."""
        return model, layer

    # -- where its blocks lie in a sequence --------------------------------------------------------------------

    @property
    def table(self) -> Hashable:
        """Layers whose kinds have equal values here share a block table."""
        return self

    @property
    def forgets(self) -> bool:
        """Whether blocks are of no more use once the sequence is far beyond them."""
        return self.reach > 0

    @property
    def bound(self) -> int:
        """Positions whose blocks are of use at most, 0 for all of the sequence."""
        return self.fixed or self.reach

    def low(self, tokens: int) -> int:
        """The first position that is needed to continue from `tokens`; it never falls when `tokens` rises."""
        return max(0, tokens - self.reach + 1) if self.reach else 0

    def first(self, tokens: int, size: int) -> int:
        """Index of the first block that is needed to continue from `tokens`. The last one always is."""
        return max(0, min(self.low(tokens), tokens - 1)) // size

    def blocks(self, tokens: int, size: int) -> int:
        """Entries of the block table of a sequence that holds `tokens`."""
        return -(-(self.fixed or tokens) // size)

    def needed(self, tokens: int, size: int) -> range:
        """The entries that are needed to continue from `tokens`."""
        return range(self.first(tokens, size), self.blocks(tokens, size))

    def added(self, first: int, end: int, size: int) -> range:
        """The entries that are needed to continue from block `end`, without those needed to continue from `first`."""
        if self.fixed:
            return range(0 if first else self.blocks(0, size))
        return range(max(first, self.first(end * size, size)), end)

    def kept(self, tokens: int, size: int) -> int:
        """Entries that a sequence that continues from `tokens` does not write to."""
        return self.blocks(tokens, size) if self.fixed else tokens // size

    def most(self, tokens: int, chunk: int, size: int) -> int:
        """Blocks that are held at once while `tokens` are computed, `chunk` a step."""
        return self.blocks(min(tokens, self.reach + chunk + size) if self.reach else tokens, size)

    def comes_to(self, blocks: int, tokens: int, chunk: int, size: int) -> int:
        """How far of `tokens` a sequence comes in so many blocks, computed `chunk` a step."""
        if blocks >= self.most(tokens, chunk, size):
            return tokens
        return 0 if self.fixed else blocks * size

    # -- what lies in a block ----------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Numbers that attention reads of a position."""
        return self.heads * (self.key_dim + self.value_dim)

    def fields(self, size: int) -> tuple[Field, ...]:
        """What a block of one layer consists of. Raises AssertionError for a block size that cannot be."""
        raise NotImplementedError

    def keys(self, arrays: Sequence[Any]) -> Any:
        """Of tensors [copies, blocks, *shape], one of each field: the keys [blocks, size, heads, key_dim]."""
        raise NotImplementedError(f"{self.name} caches have no keys")

    def values(self, arrays: Sequence[Any]) -> Any:
        """The same of the values, [blocks, size, heads, value_dim]."""
        raise NotImplementedError(f"{self.name} caches have no values")

    def writes(self, arrays: Sequence[Any], k: Any, v: Any) -> tuple[tuple[Any, Any], ...]:
        """What storing keys and values of tokens writes: (array, rows)."""
        return (self.keys(arrays), k), (self.values(arrays), v)

    def block_bytes(self, size: int, item: int) -> int:
        """Of a block of one layer; item: bytes of a number of the type of keys and values."""
        return sum(field.num_bytes(item) for field in self.fields(size))

    @property
    def row_bytes(self) -> int:
        """Of what a row of the runner has beside the blocks, in one layer."""
        return 4 * prod(self.row_shape) if self.row_shape else 0

    @property
    def facts(self) -> str:
        """What tells its bytes from those of others of its name."""
        dims = f"{self.key_dim}" if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        return f"heads={self.heads} dim={dims}"


@dataclass(frozen=True)
class PagedKV(Kind):
    """Keys and values of every token. value_dim: as wide as keys if not given."""

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
    """Keys and values of the last `window` tokens, the row's own included. A window of 1 keeps the block of the token
    before, so that there is always one to continue from."""

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
class Latent(Kind):
    """One row of each token, `key_dim` wide, that all heads read as their key; its first `value_dim` numbers are their
    value."""

    key_dim: int = 0
    value_dim: int = 0

    name = "latent"
    needs = "latent attention"
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
class State(Kind):
    """A recurrent state at the start of the block and the inputs that lead from there to each of its tokens, so that a
    row is computed with the same arithmetic wherever a chunk begins. All of it is float32.

    state: the shape of the state. inputs: numbers of a token that bring the state from one token to the next; before:
    how many tokens before the block they are kept of as well (the reach of a convolution). running: each row of the
    runner also has the state after its last token, so that decoding need not start at the block's beginning.
    """

    state: tuple[int, ...] = ()
    inputs: int = 0
    before: int = 0
    running: bool = False

    name = "state"
    needs = "recurrent layers"
    reach = 2  # a state is reached from the start of the block that the token before lies in
    keeps_starts = True

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
        """[blocks, *state]: at the start of each block."""
        return arrays[0][0][:, : prod(self.state)].unflatten(1, self.state)

    def inputs_of(self, arrays: Sequence[Any]) -> Any:
        """[blocks, before + size, inputs]"""
        return arrays[0][0][:, prod(self.state) :].unflatten(1, (-1, self.inputs))


@dataclass(frozen=True)
class Cross(PagedKV):
    """Keys and values of the `length` positions of an encoder's output: written once, in the sequence's first step, and
    read by all its tokens. What they are follows from the namespace of the sequence alone."""

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
    """In the place of a kind: the layer has no memory of its own and reads that of `layer`, in its own model or in the
    one of that name beside which it is laid out."""

    layer: int
    model: str | None = None

    owns = False

    def source(self, model: str, layer: int) -> tuple[str, int]:
        return model if self.model is None else self.model, self.layer


def attention(heads: int, dim: int, window: int = 0) -> PagedKV:
    """What a layer of self-attention remembers; window: 0 for all tokens."""
    return Window(heads, dim, window=window) if window else PagedKV(heads, dim)
