"""The paged KV cache in the layout of the native kernels (csrc/attention.h), with the interface of `KVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from kvasir.caches import CacheKind
from kvasir.layers.kv_layout import AROUND, Bank, KVLayout, Spec
from kvasir.layers.kv_memory import PagedMemory, joined
from kvasir.layers.pages import paged
from kvasir.ops.attention.native import FORMATS, CacheLayoutStruct, cache_block_bytes
from kvasir.plan import Bytes, CacheGroup
from kvasir.program.native import MAX_GROUPS

_ITEM = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),  # the numbers' bits
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.uint8),  # bytes, stored with their scales
}
TILE = 16  # tokens
_KEY_OFFSET = 128  # of keys in int8 caches: their top bit is flipped
_COMPUTES = ("attention", "recurrent layers", AROUND)  # values of caches.Kind.needs that have kernels
_MOST_DIM = 256


def _padded(dim: int) -> int:
    return -(-dim // 16) * 16


def no_kernel(spec: Spec | KVLayout) -> str:
    """Why the kernels do not support these caches; "" if they do."""
    layout = KVLayout.of(spec)
    if len(layout.groups) > MAX_GROUPS:
        return f"the kernels support {MAX_GROUPS} block tables per sequence, not {len(layout.groups)}"
    for kind in layout.kinds:
        if kind.needs not in _COMPUTES:
            return f"no kernel for {kind.needs}"
        if kind.keeps_starts:
            continue
        if kind.key_dim != kind.value_dim:
            return f"no attention kernel for keys of {kind.key_dim} and values of {kind.value_dim}"
        if kind.key_dim % 2 or kind.key_dim > _MOST_DIM:
            return f"no attention kernel for heads of {kind.key_dim}"
    return ""


def layout_of(kind: CacheKind, block_size: int, kv_dtype: str) -> CacheLayoutStruct:
    """The kernels' description of a block of one layer."""
    return CacheLayoutStruct(FORMATS.index(kv_dtype), kind.heads, kind.key_dim, block_size)


def _layer_bytes(kind: CacheKind, block_size: int, kv_dtype: str) -> int:
    """Bytes of a block in one layer."""
    if kind.keeps_starts:
        return kind.block_bytes(block_size, 4)
    return 2 * cache_block_bytes(layout_of(kind, block_size, kv_dtype))


def cache_groups(spec: Spec | KVLayout, block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """The cache groups for the scheduler; bytes_per_block counts the keys and values of all layers of a group."""
    layout = KVLayout.of(spec)
    return layout.cache_groups(lambda kind: _layer_bytes(kind, block_size, kv_dtype))


class NativeCache(PagedMemory):
    """The KV cache of a program. Each bank is one array: of keys and values [layers, 2, blocks, numbers of a block], of
    recurrent states and their inputs float32 [layers, 1, blocks, numbers] (csrc/delta.h).

    kv_dtype: "float32", "bfloat16", "float16" or "int8". block_size: a multiple of 16. Raises ValueError for a cache
    kind without a kernel.
    """

    def __init__(self, spec: Spec | KVLayout, num_blocks: Sequence[int], block_size: int, kv_dtype: str):
        layout = KVLayout.of(spec)
        if reason := no_kernel(layout):
            raise ValueError(reason)
        self.kv_dtype = kv_dtype
        super().__init__(layout, cache_groups(layout, block_size, kv_dtype), num_blocks, block_size)

    def _allocate(self, bank: Bank, num_blocks: int) -> list[np.ndarray]:
        if bank.kind.keeps_starts:
            size = bank.kind.block_bytes(self.block_size, 4)
            return [paged((len(bank.layers), 1, num_blocks, size // 4), np.dtype(np.float32))]
        item = _ITEM[self.kv_dtype]
        size = cache_block_bytes(layout_of(bank.kind, self.block_size, self.kv_dtype))
        return [paged((len(bank.layers), 2, num_blocks, size // item.itemsize), item)]

    def layout_at(self, layer: int) -> CacheLayoutStruct:
        """The kernels' description of a layer's blocks."""
        return layout_of(self.spec[layer], self.block_size, self.kv_dtype)

    def address(self, layer: int, values: bool) -> int:
        """The address of block 0 of the layer's keys or, with `values`, of its values."""
        (array,) = self.arrays(layer)
        return array[int(values)].ctypes.data

    def orders(self, group: int) -> list[tuple[Bank, str]]:
        """Each bank of a group with the axes of its part of an exported block, outermost first."""
        scale = "+scale" if self.kv_dtype == "int8" else ""
        return [
            (bank, bank.fields[0].order + (", columns last" if bank.kind.keeps_starts else scale))
            for bank, _ in self.of_group(group)
        ]

    def order(self, group: int) -> str:
        """The axes of an exported block of a group: those of its banks, joined by "+"."""
        return "+".join(order for _, order in self.orders(group))

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes in all layers of the group: for each bank [layers, 2, heads, tokens, dim]. In int8
        caches the numbers of each token are followed by its float32 scale."""
        return joined([self._export(bank, array, block) for bank, (array,) in self.of_group(group)])

    def _export(self, bank: Bank, array: np.ndarray, block: int) -> memoryview:
        if bank.kind.keeps_starts:
            return np.ascontiguousarray(array[:, :, block]).reshape(-1).view(np.uint8).data.toreadonly()
        kind, parts = bank.kind, []
        for keys, values in self._numbers(kind, array, block):
            part = np.empty((*self._shape(bank), values[0, 0].size // self.block_size), array.dtype)
            part[:, 0].view(keys.dtype).reshape(keys.shape)[...] = keys  # a view: only axes of a token's are divided
            part[:, 1].reshape(values.shape)[...] = values
            parts.append(part)
        found = parts[0][..., : kind.key_dim]
        if self.kv_dtype == "int8":
            parts[0][:, 0] ^= _KEY_OFFSET
            found = np.concatenate([found, parts[1]], -1)
        return np.ascontiguousarray(found).reshape(-1).view(np.uint8).data.toreadonly()

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes bytes from `export` into a block."""
        rest = memoryview(data)
        for bank, (array,) in self.of_group(group):
            if bank.kind.keeps_starts:
                size = array[:, :, block].nbytes
                array[:, :, block] = np.frombuffer(rest[:size], np.float32).reshape(array[:, :, block].shape)
                rest = rest[size:]
                continue
            width = bank.kind.key_dim + 4 * (self.kv_dtype == "int8")
            size = prod(self._shape(bank)) * width * array.itemsize
            self._import(bank, array, block, rest[:size])
            rest = rest[size:]

    def _import(self, bank: Bank, array: np.ndarray, block: int, data: Bytes) -> None:
        dim = bank.kind.key_dim
        found = np.frombuffer(data, array.dtype).reshape(*self._shape(bank), -1)
        if self.kv_dtype == "int8":
            found = found.copy()
            found[:, 0, ..., :dim] ^= _KEY_OFFSET
        parts = (_widened(found[..., :dim], _padded(dim)), found[..., dim:])
        for (keys, values), part in zip(self._numbers(bank.kind, array, block), parts, strict=False):
            keys[...] = part[:, 0].view(keys.dtype).reshape(keys.shape)
            _copy_halves(values, part[:, 1].reshape(values.shape))

    def _shape(self, bank: Bank) -> tuple[int, ...]:
        return len(bank.layers), 2, bank.kind.heads, self.block_size

    def _numbers(self, kind: CacheKind, array: np.ndarray, block: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of a block's keys and values and, for int8, of their scales: [layers, heads, tiles, 16 tokens or 8
        pairs, numbers of a token], as in the tiles (csrc/attention_layout.h). Adjacent dimensions of a key are viewed
        as one 32-bit number: copying them like this is several times faster."""
        dim, tiles = _padded(kind.key_dim), self.block_size // TILE
        view = array[:, :, block].reshape(len(array), 2, kind.heads, tiles, -1)
        keys, values = view[:, 0], view[:, 1]
        size = TILE * dim
        k, v = keys[..., :size], values[..., :size]
        if self.kv_dtype in ("bfloat16", "int8"):
            k = k.view(np.int32)
        k = k.reshape(*k.shape[:-1], -1, TILE).swapaxes(3, 4)
        if self.kv_dtype == "bfloat16":
            v = v.reshape(*v.shape[:-1], TILE // 2, dim, 2).swapaxes(4, 5)
        found = [(k, v)]
        if self.kv_dtype == "int8":
            found.append((keys[..., size:], values[..., size:]))
        return found

    def fill_(self, value: float) -> None:
        """Fills all blocks with a number that the dtype can hold; int8 caches are filled with bytes of 255, which makes
        their scales NaN."""
        bits = {"int8": 255, "bfloat16": np.float32(value).view(np.uint32) >> 16}
        for tensor in self.tensors:
            tensor[...] = value if tensor.dtype == np.float32 else bits.get(self.kv_dtype, value)


def _copy_halves(target: np.ndarray, source: np.ndarray) -> None:
    """Copies values; those of pairs of tokens one half at a time, because the innermost loop of NumPy's own order would
    run over the two tokens."""
    if target.ndim < 6:
        target[...] = source
        return
    for half in range(2):
        target[..., half, :] = source[..., half, :]


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    """The rows with zeros after their numbers."""
    if rows.shape[-1] == width:
        return rows
    wide = np.zeros((*rows.shape[:-1], width), rows.dtype)
    wide[..., : rows.shape[-1]] = rows
    return wide
