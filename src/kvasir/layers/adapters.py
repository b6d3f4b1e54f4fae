"""Where adapters touch a model: a slot for each linear part, and what the eager executor keeps there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.layers.linear import Head, Linear
from kvasir.layers.module import Module
from kvasir.layers.moe import MoE
from kvasir.ops.linear.low_rank import low_rank

# (A [rank, inputs], B [outputs, rank], scale) by the name of the slot
Pairs = Mapping[str, tuple[Any, Any, float]]


def slots(model: Module) -> dict[str, tuple[Linear, str]]:
    """Every slot by its name, as in the model's name table ("layers.0.attn.qkv.q", "layers.0.mlp.down"), with the part
    that it stands for. The head has none, nor have a mixture's experts, whose rows are no rows of the step."""
    within = tuple(f"{path}.experts." for path, part in model.walk() if isinstance(part, MoE))
    found: dict[str, tuple[Linear, str]] = {}
    for path, module in model.walk():
        if isinstance(module, Linear) and not isinstance(module, Head) and not path.startswith(within):
            for part in module.outputs:
                found[f"{path}.{part}" if len(module.outputs) > 1 else path] = module, part
    return found


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
    made = {
        slot: low_rank(slot, (module.outputs[part], module.inputs), *pairs[slot])
        for slot, (module, part) in found.items()
        if slot in pairs
    }
    for slot, (module, part) in found.items():
        held = module.adapters.setdefault(part, {})
        held.pop(adapter, None)
        if slot in made:
            held[adapter] = made[slot]
