"""The keys and values of a model: which layers share a block table, and the tensors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.ops.attention import store_kv
from kvasir.plan import CacheGroup

SCRATCH_BLOCK = 0  # never given to a sequence: padding rows write there


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer remembers. kind: "full" (every token) or "window" (the last `window` tokens)."""

    kind: str
    kv_heads: int
    head_dim: int
    window: int = 0


def group_layers(spec: Sequence[LayerCache]) -> list[tuple[LayerCache, tuple[int, ...]]]:
    """Layers that remember alike, in order of first appearance, with their numbers."""
    groups: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(spec):
        groups.setdefault(cache, []).append(layer)
    return [(cache, tuple(layers)) for cache, layers in groups.items()]


def cache_groups(spec: Sequence[LayerCache], block_size: int, dtype: torch.dtype) -> tuple[CacheGroup, ...]:
    """The groups as the scheduler plans them; bytes_per_block counts keys and values of all their layers."""
    return tuple(
        CacheGroup(
            cache.kind,
            layers,
            2 * len(layers) * block_size * cache.kv_heads * cache.head_dim * dtype.itemsize,
            cache.window,
        )
        for cache, layers in group_layers(spec)
    )


class KVCache:
    """Owns the tensors, each group one [layers, 2, blocks, block size, kv heads, head dim].

    block_size divides 64 or is a multiple of it. The memory starts undefined: what no sequence wrote is never
    read.
    """

    def __init__(
        self,
        spec: Sequence[LayerCache],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        groups = group_layers(spec)
        if len(num_blocks) != len(groups):
            raise ValueError(f"{len(num_blocks)} sizes for {len(groups)} groups of layers")
        self.spec = tuple(spec)
        self.groups = cache_groups(spec, block_size, dtype)
        self.block_size = block_size
        self.num_blocks = tuple(num_blocks)
        self.device = torch.device(device)
        self.tensors = [
            torch.empty(
                (len(layers), 2, blocks, block_size, cache.kv_heads, cache.head_dim),
                dtype=dtype,
                device=self.device,
            )
            for (cache, layers), blocks in zip(groups, num_blocks, strict=True)
        ]
        self._place = {layer: (g, i) for g, (_, layers) in enumerate(groups) for i, layer in enumerate(layers)}

    def group_of(self, layer: int) -> int:
        return self._place[layer][0]

    def k(self, layer: int) -> Tensor:
        """[blocks, block size, kv heads, head dim]"""
        group, index = self._place[layer]
        return self.tensors[group][index, 0]

    def v(self, layer: int) -> Tensor:
        group, index = self._place[layer]
        return self.tensors[group][index, 1]

    def store(self, layer: int, slots_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Writes the rows' keys and values; slots are of the layer's group."""
        store_kv(self.k(layer), k_TKd, slots_T)
        store_kv(self.v(layer), v_TKd, slots_T)

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) blocks of a group, in all its layers; all are read before any is written."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.device).T
            self.tensors[group][:, :, targets] = self.tensors[group][:, :, sources]

    def fill_(self, value: float) -> None:
        for tensor in self.tensors:
            tensor.fill_(value)

    def bytes_per_block(self, group: int) -> int:
        return self.groups[group].bytes_per_block
