"""Batches of sequences that are written by hand, layers with random weights, and ranks that share a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvasir.layers.batch import Batch, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.module import Module
from kvasir.layers.rows import RowArrays
from kvasir.layers.tensors import TensorPlace
from kvasir.parallel.local import LocalRanks
from kvasir.plan import Work

CPU = torch.device("cpu")


class Part(NamedTuple):
    """One sequence's tokens in a step, with a block table per cache group."""

    ids: Sequence[int]
    start: int
    tables: Sequence[Any]
    causal: bool = True


def batch_of(parts: Sequence[Part], cache: KVCache, **options: Any) -> Batch:
    """Each part in a separate row."""
    ends = [part.start + len(part.ids) for part in parts]
    blocks = max((len(table) for part in parts for table in part.tables), default=0)
    rows = RowArrays.empty(len(parts), max(ends, default=0), len(cache.groups), blocks)
    works = []
    for row, part in enumerate(parts):
        rows.ids[row, part.start : ends[row]] = part.ids
        for table, given in zip(rows.tables, part.tables, strict=True):
            table[row, : len(given)] = given
        works.append(Work(row, part.start, len(part.ids), indivisible=not part.causal))
    return make_batch(works, rows, cache, **options)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Gives every leaf random tensors, the same for a layer and for its parts. Returns them by path."""
    tensors = {}
    for path, leaf in layer.walk():
        for i, (name, shape) in enumerate(leaf.expects().items()):
            tensor = randn(*shape, seed=len(tensors) + i) * shape[-1] ** -0.5
            tensors[f"{path}.{name}".lstrip(".")] = tensor
            leaf.put(name, tensor, TensorPlace(dtype))
    return tensors


def on_ranks(size: int, make: Callable[[], Module], use: Callable[[Any], Tensor]) -> list[Tensor]:
    """The result of `use` on each of `size` ranks that share the layer."""
    ranks = LocalRanks(size)
    layers = [make() for _ in range(size)]
    for layer, mesh in zip(layers, ranks.meshes, strict=True):
        layer.split(mesh, lambda linear: linear.segments)
        fill(layer)

    def one(layer: Module) -> Tensor:
        try:
            return use(layer)
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, layers))
