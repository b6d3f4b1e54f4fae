"""The matrices of a model that adapters may change (slots)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.layers.linear import Head, HeadLinear, Linear
from kvasir.layers.module import Module, Shard
from kvasir.layers.moe import MoE
from kvasir.ops.linear.low_rank import LowRankPair, low_rank
from kvasir.ops.linear.packed import num_segments

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

    def take(self, pair: tuple[Any, Any, float]) -> LowRankPair:
        """This rank's part of a pair for the whole matrix. Where ranks may share the sum, a x is computed in as many
        segments as for a float matrix; each rank has the segments of its columns. Raises ValueError if the shapes do
        not match."""
        whole, shard = low_rank(self.name, self.shape, *pair), self.shard
        segments = num_segments(self.shape[1], "F32") if self.reduces else 1
        a, b = whole.a[:, slice(*shard.columns)], whole.b[slice(*shard.rows)]
        return LowRankPair(np.ascontiguousarray(a), np.ascontiguousarray(b), segments // shard.parts)


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


def check_adapter(adapter: int, pairs: Pairs, slots: Mapping[str, Any]) -> None:
    """Raises ValueError for an id below 1 and for unknown slots."""
    if adapter < 1:
        raise ValueError(f"adapter ids begin at 1, not at {adapter}")
    check_slots(pairs, slots)


def check_slots(names: Iterable[str], slots: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown slots."""
    if unknown := sorted(set(names) - set(slots)):
        raise ValueError(f"the model has no slot {unknown[0]!r}; it has {', '.join(list(slots)[:3])} ...")
