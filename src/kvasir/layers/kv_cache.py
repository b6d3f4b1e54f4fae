"""What a model remembers: which layers share a block table, and the tensors themselves.

kind      a block holds of each of its layers              blocks that a sequence keeps
full      keys and values of its tokens                    all
window    the same                                         those that the window reaches
state     a recurrent state at its start, inputs since     the one that the last token lies in
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.attention import store_kv
from kvasir.plan import Bytes, CacheGroup

EXPORT_ORDER = "layer,key/value,head,token,dim"
SCRATCH_BLOCK = 0  # never given to a sequence: padding rows write there


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer remembers. kind: "full" (every token), "window" (the last `window` tokens) or "state".

    state: the shape of a recurrent state. inputs: numbers of a token that bring the state from one token to the
    next; before: how many tokens before a block they are kept of beside its own (the reach of a convolution). All
    of it float32, whatever the type of keys and values.
    """

    kind: str
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    state: tuple[int, ...] = ()
    inputs: int = 0
    before: int = 0

    def shape(self, block_size: int) -> tuple[int, ...]:
        """Of a block: keys and values each [block size, kv heads, head dim], or all of a state's in a row."""
        if self.kind == "state":
            return 1, prod(self.state) + (self.before + block_size) * self.inputs
        return 2, block_size, self.kv_heads, self.head_dim

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What is stored where keys and values are of type `dtype`."""
        return torch.float32 if self.kind == "state" else dtype

    @property
    def reach(self) -> int:
        """Tokens whose blocks are still needed, the next one included; 0 for all. A state is reached from the start of
        the block that the token before lies in. A window of 1 keeps the token before too, so that there is always a
        last block to go on from."""
        return 2 if self.kind == "state" or self.window == 1 else self.window


def group_layers(spec: Sequence[LayerCache]) -> list[tuple[LayerCache, tuple[int, ...]]]:
    """Layers that remember alike, in order of first appearance, with their numbers."""
    groups: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(spec):
        groups.setdefault(cache, []).append(layer)
    return [(cache, tuple(layers)) for cache, layers in groups.items()]


def cache_groups(spec: Sequence[LayerCache], block_size: int, dtype: torch.dtype) -> tuple[CacheGroup, ...]:
    """The groups as the scheduler plans them; bytes_per_block counts all their layers."""
    return tuple(
        CacheGroup(
            cache.kind,
            layers,
            len(layers) * prod(cache.shape(block_size)) * cache.dtype(dtype).itemsize,
            cache.reach,
        )
        for cache, layers in group_layers(spec)
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor that no one writes to any more."""
    return tensor.cpu().flatten().view(torch.uint8).numpy().data.toreadonly()


def from_bytes(data: Bytes, dtype: torch.dtype) -> Tensor:
    """A flat tensor with a copy of the bytes."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype)


class KVCache:
    """Owns the tensors, each group one [layers, 2, blocks, block size, kv heads, head dim], of states one [layers,
    1, blocks, numbers of a block].

    block_size divides 64 or is a multiple of it. dtype: of keys and values. The memory starts undefined: what no
    sequence wrote is never read.
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
        self.block_size, self.dtype = block_size, dtype
        self.num_blocks = tuple(num_blocks)
        self.device = torch.device(device)
        self.tensors = []
        for (cache, layers), blocks in zip(groups, num_blocks, strict=True):
            assert cache.before <= block_size, "what a block keeps of the tokens before it lies in the one before"
            parts, *shape = cache.shape(block_size)
            tensor = torch.empty((len(layers), parts, blocks, *shape), dtype=cache.dtype(dtype), device=self.device)
            self.tensors.append(tensor)
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

    def state(self, layer: int) -> Tensor:
        """[blocks, *state]: at the start of each block."""
        shape = self.spec[layer].state
        return self._numbers(layer)[:, : prod(shape)].unflatten(1, shape)

    def inputs(self, layer: int) -> Tensor:
        """[blocks, before + block size, inputs]"""
        cache = self.spec[layer]
        return self._numbers(layer)[:, prod(cache.state) :].unflatten(1, (-1, cache.inputs))

    def _numbers(self, layer: int) -> Tensor:
        group, index = self._place[layer]
        return self.tensors[group][index, 0]

    def store(self, layer: int, slots_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Writes the rows' keys and values; slots are of the layer's group."""
        store_kv(self.k(layer), k_TKd, slots_T)
        store_kv(self.v(layer), v_TKd, slots_T)

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) blocks of a group, in all its layers; all are read before any is written."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.device).T
            self.tensors[group][:, :, targets] = self.tensors[group][:, :, sources]

    def order(self, group: int) -> str:
        """The axes of an exported block, outermost first."""
        cache = self.spec[self.groups[group].layers[0]]
        if cache.kind != "state":
            return EXPORT_ORDER
        return f"layer,state {cache.state}+(token,{cache.inputs}) of {cache.before} before and its own"

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes in all layers of the group, the same whatever the cache's own layout."""
        return bytes_of(self.portable(group, block).contiguous())

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes what `export` gave."""
        target = self.portable(group, block)
        target.copy_(from_bytes(data, target.dtype).view(target.shape))

    def portable(self, group: int, block: int) -> Tensor:
        """A view of a block in the order of its export."""
        view = self.tensors[group][:, :, block]
        return view if self.groups[group].kind == "state" else view.transpose(2, 3)

    def fill_(self, value: float) -> None:
        for tensor in self.tensors:
            tensor.fill_(value)

    def bytes_per_block(self, group: int) -> int:
        return self.groups[group].bytes_per_block
