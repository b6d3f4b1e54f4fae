"""Adapters of executors that compute low-rank pairs and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from kvasir.errors import UnsupportedModel
from kvasir.layers.adapters import Pairs
from kvasir.lora import Adapter

_WHAT = {"magnitude": "magnitudes of rows (DoRA)", "bias": "biases of low-rank changes (lora_bias)"}


@dataclass(frozen=True, slots=True)
class PackedPairs:
    """An adapter that consists of low-rank pairs. nbytes: of their float32 copies."""

    pairs: Pairs
    nbytes: int


def check_pairs(adapter: Adapter, slots: Collection[str], max_rank: int, executor: str) -> None:
    """Raises UnsupportedModel if an adapter is more than low-rank pairs. slots: of matrices that they may change.
    executor: its name in the message."""
    for name, change in adapter.matrices.items():
        if name not in slots:
            refuse(executor, f"a change of {name}")
        if change.rank > max_rank:
            refuse(executor, f"a rank of {change.rank} for {name}, more than {max_rank}")
        for part, what in _WHAT.items():
            if getattr(change, part) is not None:
                refuse(executor, f"{what}, as {name} has")
    for kind, names in (
        ("low-rank changes of tables", adapter.tables),
        ("tensors that replace the model's", adapter.saved),
        ("rows that replace those of tables", adapter.tokens),
    ):
        if names:
            refuse(executor, f"{kind}, such as of {min(names)}")


def pack_pairs(adapter: Adapter) -> PackedPairs:
    """The pairs of an adapter."""
    pairs = {name: (change.a, change.b, change.scale) for name, change in adapter.matrices.items()}
    return PackedPairs(pairs, sum(4 * (change.a.size + change.b.size) for change in adapter.matrices.values()))


def refuse(executor: str, what: str) -> NoReturn:
    """Raises UnsupportedModel for what an executor cannot compute of an adapter."""
    raise UnsupportedModel(f"the adapter has {what}, which {executor} cannot compute", "choose another executor")
