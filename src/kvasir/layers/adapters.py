"""Where adapters touch a model: a slot for each linear part, and what the eager executor keeps there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.linear import Head, Linear
from kvasir.layers.module import Module, Shard
from kvasir.layers.moe import MoE
from kvasir.ops.linear.low_rank import LowRank, low_rank
from kvasir.ops.linear.packed import num_segments

# (A [rank, inputs], B [outputs, rank], scale) by the name of the slot
Pairs = Mapping[str, tuple[Any, Any, float]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A matrix that adapters may touch. shape: of all of it. shard: what of it is here."""

    name: str
    shape: tuple[int, int]
    shard: Shard
    reduces: bool

    @classmethod
    def of(cls, name: str, linear: Linear, part: str) -> Slot:
        return cls(name, (linear.outputs[part], linear.inputs), linear.shard(f"{part}.weight"), linear.reduces)

    def take(self, pair: tuple[Any, Any, float]) -> LowRank:
        """What is here of a pair for the whole matrix. Where ranks may share the sum, a x is cut in segments as for a
        float matrix, of which each rank has those of its columns. Raises ValueError where shapes do not fit."""
        whole, shard = low_rank(self.name, self.shape, *pair), self.shard
        segments = num_segments(self.shape[1], "F32") if self.reduces else 1
        a, b = whole.a[:, slice(*shard.columns)], whole.b[slice(*shard.rows)]
        return LowRank(a.contiguous(), b.contiguous(), segments // shard.parts)


def linears(model: Module) -> dict[str, tuple[Linear, str]]:
    """Every linear but the head, as a module and the name of its part, by its name in the model's name table
    ("layers.0.attn.qkv.q", "layers.0.mlp.down", "layers.0.mlp.experts.3.down")."""
    found: dict[str, tuple[Linear, str]] = {}
    for path, module in model.walk():
        if isinstance(module, Linear) and not isinstance(module, Head):
            for part in module.outputs:
                found[f"{path}.{part}" if len(module.outputs) > 1 else path] = module, part
    return found


def slots(model: Module) -> dict[str, tuple[Linear, str]]:
    """The linears that adapters may touch: not a mixture's experts, whose rows are no rows of the step."""
    within = tuple(f"{path}.experts." for path, part in model.walk() if isinstance(part, MoE))
    return {name: linear for name, linear in linears(model).items() if not name.startswith(within)}


def check_adapter(adapter: int, pairs: Pairs, slots: Mapping[str, Any]) -> None:
    """Raises ValueError for an id that none can have and for slots that are not there."""
    if adapter < 1:
        raise ValueError(f"adapter ids begin at 1, not at {adapter}")
    if unknown := sorted(set(pairs) - set(slots)):
        raise ValueError(f"the model has no slot {unknown[0]!r}; it has {', '.join(list(slots)[:3])} ...")


def set_adapter(model: Module, adapter: int, pairs: Pairs) -> None:
    """Gives the rows of an adapter id what is added to products, in the place of what it had; of no pairs, nothing.
    Raises ValueError for an id, a slot or a shape that cannot be."""
    found = slots(model)
    check_adapter(adapter, pairs, found)
    made = {name: Slot.of(name, *found[name]).take(pair) for name, pair in pairs.items()}
    for slot, (module, part) in found.items():
        held = module.adapters.setdefault(part, {})
        held.pop(adapter, None)
        if slot in made:
            held[adapter] = made[slot]
