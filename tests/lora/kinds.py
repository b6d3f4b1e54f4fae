"""Adapters that change something of every kind that a model has."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir.layers.adapters import head_slot, linears
from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.linear import Head, HeadLinear, Linear
from kvasir.layers.norm import RMSNorm
from kvasir.lora import Adapter, LowRank, TokenRows
from tests.layers.adapted import adapter_of


def everything(model: Any, seed: int, rank: int = 5) -> Adapter:
    """A random adapter of all linear layers, experts, router and head, of the table, half of the norms, all biases, a
    matrix and rows of tokens."""
    rng = np.random.default_rng(seed)

    def randn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def change(outputs: int, inputs: int, **vectors: Any) -> LowRank:
        return LowRank(randn(rank, inputs) * inputs**-0.5, randn(outputs, rank) * rank**-0.5, 0.3, **vectors)

    matrices, saved, tokens = {}, {}, {}
    for i, (name, (linear, part)) in enumerate((linears(model) | head_slot(model)).items()):
        outputs = linear.outputs[part]
        bias = 0.1 * randn(outputs) if i % 3 == 0 else None
        magnitude = (1 + 0.2 * rng.random(outputs, np.float32)) if i % 5 == 1 else None
        matrices[name] = change(outputs, linear.inputs, bias=bias, magnitude=magnitude)
    norms = 0
    for path, leaf in model.walk():
        shapes = {f"{path}.{name}".lstrip("."): shape for name, shape in leaf.expects().items()}
        if isinstance(leaf, RMSNorm) and (norms := norms + 1) % 2:
            saved |= {name: around(name) + 0.1 * randn(*shape) for name, shape in shapes.items()}
        elif isinstance(leaf, Linear) and not isinstance(leaf, HeadLinear) and ".experts." not in path:
            saved |= {name: 0.1 * randn(*shape) for name, shape in shapes.items() if name.endswith("bias")}
    first = next(name for name in matrices if name.endswith(("q", "gate", "up", "weight", "router", "inputs.x")))
    linear, part = linears(model)[first]
    saved[f"{first}.weight"] = randn(linear.outputs[part], linear.inputs) * linear.inputs**-0.5
    table = model.embed
    assert isinstance(table, VocabularyEmbedding)
    ids = tuple(rng.permutation(table.size)[:20].tolist())
    tokens["embed"] = TokenRows(ids, randn(20, table.width))
    if isinstance(getattr(model, "head", None), Head):
        tokens["head"] = TokenRows(ids, randn(20, model.head.inputs) * model.head.inputs**-0.5)
    tables = {"embed": change(table.width, table.size)}
    return adapter_of({}, matrices=matrices, tables=tables, saved=saved, tokens=tokens)


def around(name: str) -> float:
    """What the values of a norm's tensor are close to."""
    return 0.0 if name.endswith("bias") else 1.0
