"""The matrices of a model that adapters may change (slots)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.layers.linear import Head, HeadLinear, Linear
from kvasir.layers.module import Module, Shard
from kvasir.layers.moe import MoE
from kvasir.ops.linear.low_rank import LowRankPair, low_rank
from kvasir.ops.linear.packed import num_segments


class Change(Protocol):
    """What an adapter changes in one matrix: see lora.LowRank. Arrays of floats, magnitude and bias perhaps None."""

    @property
    def a(self) -> np.ndarray: ...
    @property
    def b(self) -> np.ndarray: ...
    @property
    def scale(self) -> float: ...
    @property
    def magnitude(self) -> np.ndarray | None: ...
    @property
    def bias(self) -> np.ndarray | None: ...


class Replaced(Protocol):
    """Rows [n, width] that replace those of ids: see lora.TokenRows."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> np.ndarray: ...


class ModelChanges(Protocol):
    """All that an adapter changes in a model: see lora.Adapter."""

    @property
    def matrices(self) -> Mapping[str, Change]: ...
    @property
    def tables(self) -> Mapping[str, Change]: ...
    @property
    def saved(self) -> Mapping[str, np.ndarray]: ...
    @property
    def tokens(self) -> Mapping[str, Replaced]: ...


class ChangePart(NamedTuple):
    """A rank's part of a Change."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None
    bias: np.ndarray | None = None


# slot name -> (A [rank, inputs], B [outputs, rank], scale)
Pairs = Mapping[str, tuple[Any, Any, float]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A matrix that adapters may change.

    shape: of the whole matrix. shard: this rank's part. reduces: whether ranks may share its sum.
    """

    name: str
    shape: tuple[int, int]
    shard: Shard
    reduces: bool

    @classmethod
    def of(cls, name: str, linear: Linear, part: str) -> Slot:
        return cls(name, (linear.outputs[part], linear.inputs), linear.shard(f"{part}.weight"), linear.reduces)

    @property
    def segments(self) -> int:
        """The segments of the sum A x over this rank's columns. Where ranks may share the sum, there are as many in all
        as for a float matrix."""
        return (num_segments(self.shape[1], "F32") if self.reduces else 1) // self.shard.parts

    def part(self, change: Change) -> ChangePart:
        """This rank's part of a change of the whole matrix, as views. Raises ValueError if the shapes do not match."""
        (outputs, inputs), rank = self.shape, len(change.a)
        if rank < 1 or (change.a.shape, change.b.shape) != ((rank, inputs), (outputs, rank)):
            found = f"{[*change.a.shape]} and {[*change.b.shape]}"
            raise ValueError(f"{self.name} needs A [rank, {inputs}] and B [{outputs}, rank], not {found}")
        columns, rows = slice(*self.shard.columns), slice(*self.shard.rows)
        vectors = (None if v is None else v[rows] for v in (change.magnitude, change.bias))
        return ChangePart(change.a[:, columns], change.b[rows], change.scale, *vectors)

    def take(self, pair: tuple[Any, Any, float]) -> LowRankPair:
        """This rank's part of a pair for the whole matrix. Where ranks may share the sum, a x is computed in as many
        segments as for a float matrix; each rank has the segments of its columns. Raises ValueError if the shapes do
        not match."""
        whole, shard = low_rank(self.name, self.shape, *pair), self.shard
        a, b = whole.a[:, slice(*shard.columns)], whole.b[slice(*shard.rows)]
        return LowRankPair(np.ascontiguousarray(a), np.ascontiguousarray(b), self.segments)


def linears(model: Module) -> dict[str, tuple[Linear, str]]:
    """Every linear layer except the head and those of heads, as (module, part name), by its name in the model's name
    table ("layers.0.attn.qkv.q", "layers.0.mlp.down", "layers.0.mlp.experts.3.down")."""
    found: dict[str, tuple[Linear, str]] = {}
    for path, module in model.walk():
        if isinstance(module, Linear) and not isinstance(module, Head | HeadLinear):
            for part in module.outputs:
                found[f"{path}.{part}" if len(module.outputs) > 1 else path] = module, part
    return found


def slots(model: Module) -> dict[str, tuple[Linear, str]]:
    """The linear layers that adapters may change. The experts of a mixture are excluded: their rows are not the step's
    rows."""
    within = tuple(f"{path}.experts." for path, part in model.walk() if isinstance(part, MoE))
    return {name: linear for name, linear in linears(model).items() if not name.startswith(within)}


def head_slot(model: Any) -> dict[str, tuple[Head, str]]:
    """The head as a slot, by the name "head"; {} for a model without one."""
    head = getattr(model, "head", None)
    return {"head": (head, "weight")} if isinstance(head, Head) else {}


def factors_of(magnitude: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """magnitude / norms, float32; a row of zeros has the factor 0. norms: float64. Raises ModelFileError for norms that
    are not finite."""
    if not np.isfinite(norms).all():
        raise ModelFileError("the norms of a matrix with DoRA are not finite", "the adapter's values are too large")
    factors = np.divide(magnitude.astype(np.float64), norms, out=np.zeros_like(norms), where=norms > 0)
    with np.errstate(over="ignore"):
        return factors.astype(np.float32)


def check_id(adapter: int, end: int) -> None:
    """Raises ValueError for an id below 1 or from `end` on."""
    if not 1 <= adapter < end:
        raise ValueError(f"adapter ids go from 1 to {end - 1}, which leaves out {adapter}")


def check_slots(changes: Iterable[str], slots: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown slots."""
    if unknown := sorted(set(changes) - set(slots)):
        raise ValueError(f"the model has no slot {unknown[0]!r}; it has {', '.join(list(slots)[:3])} ...")


def check_adapter(adapter: int, pairs: Pairs, slots: Mapping[str, Any]) -> None:
    """Raises ValueError for an id below 1 and for unknown slots."""
    if adapter < 1:
        raise ValueError(f"adapter ids begin at 1, not at {adapter}")
    check_slots(pairs, slots)
