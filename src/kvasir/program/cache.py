"""The paged keys and values as the native kernels lay them out (csrc/attention.h), behind the face of `KVCache`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir.layers.kv_cache import EXPORT_ORDER, LayerCache, bytes_of, from_bytes, group_layers
from kvasir.ops.attention.native import FORMATS, CacheLayout, cache_block_bytes
from kvasir.plan import Bytes, CacheGroup

_ITEM = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.uint8,  # bytes with a scale beside them
}


TILE = 16  # tokens
_KEY_OFFSET = 128  # of keys in int8 caches: the top bit is turned over


def _padded(dim: int) -> int:
    return -(-dim // 16) * 16


def layout_of(cache: LayerCache, block_size: int, kv_dtype: str) -> CacheLayout:
    return CacheLayout(FORMATS.index(kv_dtype), cache.kv_heads, cache.head_dim, block_size)


def cache_groups(spec: Sequence[LayerCache], block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """The groups as the scheduler plans them; bytes_per_block counts keys and values of all their layers."""
    return tuple(
        CacheGroup(
            cache.kind,
            layers,
            2 * len(layers) * cache_block_bytes(layout_of(cache, block_size, kv_dtype)),
            cache.reach,
        )
        for cache, layers in group_layers(spec)
    )


class NativeCache:
    """Owns the memory, each group one [layers, 2, blocks, bytes of a block]. It starts undefined: what no sequence
    wrote is never read.

    kv_dtype: "float32", "bfloat16", "float16" or "int8". block_size: a multiple of 16.
    """

    def __init__(self, spec: Sequence[LayerCache], num_blocks: Sequence[int], block_size: int, kv_dtype: str):
        groups = group_layers(spec)
        if len(num_blocks) != len(groups):
            raise ValueError(f"{len(num_blocks)} sizes for {len(groups)} groups of layers")
        self.spec = tuple(spec)
        self.groups = cache_groups(spec, block_size, kv_dtype)
        self.block_size, self.kv_dtype = block_size, kv_dtype
        self.num_blocks = tuple(num_blocks)
        item = _ITEM[kv_dtype]
        self.layouts = [layout_of(cache, block_size, kv_dtype) for cache, _ in groups]
        self.block_bytes = [cache_block_bytes(layout) for layout in self.layouts]
        self.tensors = [
            torch.empty((len(layers), 2, blocks, size // item.itemsize), dtype=item)
            for (_, layers), blocks, size in zip(groups, num_blocks, self.block_bytes, strict=True)
        ]
        self._place = {layer: (g, i) for g, (_, layers) in enumerate(groups) for i, layer in enumerate(layers)}

    def group_of(self, layer: int) -> int:
        return self._place[layer][0]

    def address(self, layer: int, values: bool) -> int:
        """Where block 0 of the layer's keys, or of its values, lies."""
        group, index = self._place[layer]
        return self.tensors[group][index, int(values)].data_ptr()

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) blocks of a group, in all its layers; all are read before any is written."""
        if pairs:
            sources, targets = torch.tensor(pairs).T
            self.tensors[group][:, :, targets] = self.tensors[group][:, :, sources]

    def order(self, group: int) -> str:
        """The axes of an exported block, outermost first."""
        return EXPORT_ORDER + ("+scale" if self.kv_dtype == "int8" else "")

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes in all layers of the group, [layers, 2, heads, tokens, dim]. Of int8 each token has
        its float32 scale after its numbers."""
        layout, tensor = self.layouts[group], self.tensors[group]
        shape = len(tensor), 2, layout.kv_heads, layout.block_size
        parts = []
        for keys, values in self._numbers(group, block):
            part = torch.empty((*shape, values[0, 0].numel() // layout.block_size), dtype=tensor.dtype)
            part[:, 0].view(keys.dtype).view(keys.shape).copy_(keys)
            part[:, 1].view(values.shape).copy_(values)
            parts.append(part)
        found = parts[0][..., : layout.head_dim]
        if self.kv_dtype == "int8":
            found = torch.cat([found, parts[1]], -1)
            found[:, 0, ..., : layout.head_dim] ^= _KEY_OFFSET
        return bytes_of(found.contiguous())

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes what `export` gave."""
        layout, dim = self.layouts[group], self.layouts[group].head_dim
        found = from_bytes(data, self.tensors[group].dtype)
        found = found.view(-1, 2, layout.kv_heads, layout.block_size, dim + 4 * (self.kv_dtype == "int8"))
        if self.kv_dtype == "int8":
            found[:, 0, ..., :dim] ^= _KEY_OFFSET
        parts = (torch.nn.functional.pad(found[..., :dim], (0, _padded(dim) - dim)), found[..., dim:])
        for (keys, values), part in zip(self._numbers(group, block), parts, strict=False):
            keys.copy_(part[:, 0].contiguous().view(keys.dtype).view(keys.shape))
            values.copy_(part[:, 1].reshape(values.shape))

    def _numbers(self, group: int, block: int) -> list[tuple[Tensor, Tensor]]:
        """Views of a block's keys and values, and of int8 of their scales: [layers, heads, tiles, 16 tokens or 8 pairs,
        numbers of a token], as the tiles have them (csrc/attention_layout.h). Dimensions of a key that lie side by side
        are one number of 32 bits: to move them so is several times faster."""
        layout = self.layouts[group]
        dim, tiles = _padded(layout.head_dim), layout.block_size // TILE
        view = self.tensors[group][:, :, block].unflatten(-1, (layout.kv_heads, tiles, -1))
        keys, values = view.unbind(1)
        size = TILE * dim
        k, v = keys[..., :size], values[..., :size]
        if self.kv_dtype in ("bfloat16", "int8"):
            k = k.view(torch.int32)
        k = k.unflatten(-1, (-1, TILE)).transpose(3, 4)
        if self.kv_dtype == "bfloat16":
            v = v.unflatten(-1, (TILE // 2, dim, 2)).transpose(4, 5)
        found = [(k, v)]
        if self.kv_dtype == "int8":
            found.append((keys[..., size:], values[..., size:]))
        return found

    def fill_(self, value: float) -> None:
        """With a number everywhere; bytes of int8 caches all become 255, which makes their scales NaN."""
        for tensor in self.tensors:
            tensor.fill_(255 if tensor.dtype == torch.uint8 else value)

    def bytes_per_block(self, group: int) -> int:
        return self.groups[group].bytes_per_block
