"""The paged KV cache in the layout of the native kernels (csrc/attention.h), with the interface of `KVCache`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from kvasir.caches import CacheKind
from kvasir.layers.kv_layout import AROUND, CHUNKED, LATENT, SPARSE, Bank, KVLayout, Spec
from kvasir.layers.kv_memory import PagedMemory, joined
from kvasir.layers.pages import paged
from kvasir.ops.attention.native import FORMATS, MAX_HEAD_DIM, CacheLayoutStruct, cache_block_bytes
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
_COMPUTES = (
    "attention",
    "recurrent layers",
    AROUND,
    CHUNKED,
    LATENT,
    SPARSE,
)  # values of caches.Kind.needs that have kernels


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
        if kind.plain:
            continue
        if kind.key_dim % 2 or max(kind.key_dim, kind.value_dim) > MAX_HEAD_DIM:
            return f"no attention kernel for heads of {kind.key_dim} and values of {kind.value_dim}"
    return ""


def layout_of(kind: CacheKind, block_size: int, kv_dtype: str) -> CacheLayoutStruct:
    """The kernels' description of a block of one layer."""
    return CacheLayoutStruct(
        FORMATS.index(kv_dtype), kind.heads, kind.key_dim, block_size, kind.value_dim, kind.latent
    )  # fmt: skip


def _layer_bytes(kind: CacheKind, block_size: int, kv_dtype: str) -> int:
    """Bytes of a block in one layer."""
    if kind.plain:
        return kind.block_bytes(block_size, 4)
    layout = layout_of(kind, block_size, kv_dtype)
    return cache_block_bytes(layout, False) + cache_block_bytes(layout, True)


def cache_groups(spec: Spec | KVLayout, block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """The cache groups for the scheduler; bytes_per_block counts the keys and values of all layers of a group."""
    layout = KVLayout.of(spec)
    return layout.cache_groups(lambda kind: _layer_bytes(kind, block_size, kv_dtype))


class LayerRange(NamedTuple):
    """Some layers of a group's exported blocks: those with indices [first, last) in a bank, in one of the bank's parts
    (see `NativeCache.export`). They are `num_bytes` contiguous bytes from `offset` on."""

    bank: int
    part: int
    first: int
    last: int
    offset: int
    num_bytes: int


class NativeCache(PagedMemory):
    """The KV cache of a program. A bank of keys and values is one array [layers, 2, blocks, numbers of a block], or two
    arrays [layers, 1, blocks, numbers] if their dimensions differ; of recurrent states and their inputs, and of index
    keys, it is float32 [layers, 1, blocks, numbers] (csrc/delta.h, csrc/indexer.h). A latent row is stored twice: as a
    key, and its beginning as a value.

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
        if bank.kind.plain:
            size = bank.kind.block_bytes(self.block_size, 4)
            return [paged((len(bank.layers), 1, num_blocks, size // 4), np.dtype(np.float32))]
        item = _ITEM[self.kv_dtype]
        layout = layout_of(bank.kind, self.block_size, self.kv_dtype)
        keys, values = (cache_block_bytes(layout, half) // item.itemsize for half in (False, True))
        if not _is_split(bank.kind):
            return [paged((len(bank.layers), 2, num_blocks, keys), item)]
        return [paged((len(bank.layers), 1, num_blocks, numbers), item) for numbers in (keys, values)]

    def layout_at(self, layer: int) -> CacheLayoutStruct:
        """The kernels' description of a layer's blocks."""
        return layout_of(self.spec[layer], self.block_size, self.kv_dtype)

    def address(self, layer: int, values: bool) -> int:
        """The address of block 0 of the layer's keys or, with `values`, of its values."""
        arrays = self.arrays(layer)
        return (arrays[-1][-1] if values else arrays[0][0]).ctypes.data

    def orders(self, group: int) -> list[tuple[Bank, str]]:
        """Each bank of a group with the axes of its part of an exported block, outermost first."""
        scale = "+scale" if self.kv_dtype == "int8" else ""
        return [
            (bank, "+".join(f.order + (", columns last" if bank.kind.plain else scale) for f in bank.fields))
            for bank, _ in self.of_group(group)
        ]

    def order(self, group: int) -> str:
        """The axes of an exported block of a group: those of its banks, joined by "+"."""
        return "+".join(order for _, order in self.orders(group))

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes in all layers of the group: for each bank [layers, 2, heads, tokens, dim]; the keys
        before the values if their dimensions differ; only the keys of latent rows. In int8 caches the numbers of each
        token are followed by its float32 scale."""
        return joined([part for bank, arrays in self.of_group(group) for part in self._export(bank, arrays, block)])

    def _export(self, bank: Bank, arrays: list[np.ndarray], block: int) -> list[memoryview]:
        if bank.kind.plain:
            return [_bytes_of(arrays[0][:, :, block])]
        return [self._read(bank.kind, halves, block) for halves in _exported(bank.kind, arrays)]

    def layer_ranges(self, group: int, most: int) -> Iterator[LayerRange]:
        """Divides the exported blocks of a group without plain banks into ranges, at most `most` for each part of a
        bank."""
        offset = 0
        for number, bank in enumerate(self.banks):
            if bank.group != group:
                continue
            count, arrays = len(bank.layers), self._banked[number]
            step = -(-count // most)
            for part, halves in enumerate(_exported(bank.kind, arrays)):
                size = self._layer_bytes(bank.kind, halves, arrays)
                for first in range(0, count, step):
                    last = min(first + step, count)
                    yield LayerRange(number, part, first, last, offset + first * size, (last - first) * size)
                offset += count * size

    def _layer_bytes(self, kind: CacheKind, halves: list[tuple[np.ndarray, bool]], arrays: list[np.ndarray]) -> int:
        """Bytes of a layer in a part of an exported block."""
        width = _dim(kind, halves[0][1]) + 4 * (self.kv_dtype == "int8")
        return prod((len(halves), kind.heads, self.block_size, width)) * arrays[0].itemsize

    def export_range(self, block: int, layers: LayerRange) -> memoryview:
        """A copy of a block's bytes in some layers."""
        kind = self.banks[layers.bank].kind
        halves = _exported(kind, self._banked[layers.bank])[layers.part]
        return self._read(kind, [(array[layers.first : layers.last], values) for array, values in halves], block)

    def _read(self, kind: CacheKind, halves: list[tuple[np.ndarray, bool]], block: int) -> memoryview:
        shape = len(halves[0][0]), len(halves), kind.heads, self.block_size
        dim, item = _dim(kind, halves[0][1]), _ITEM[self.kv_dtype]
        numbers: np.ndarray = np.empty((*shape, _padded(dim)), item)
        scales = np.empty((*shape, 4), item) if self.kv_dtype == "int8" else None
        for i, (array, values) in enumerate(halves):
            stored, *scale = self._views(kind, array, block, values)
            numbers[:, i].view(stored.dtype).reshape(stored.shape)[...] = stored  # a view: only tokens are divided
            if scales is not None:
                scales[:, i].reshape(scale[0].shape)[...] = scale[0]
                if not values:
                    np.bitwise_xor(numbers[:, i], _KEY_OFFSET, out=numbers[:, i])
        found = numbers[..., :dim]
        return _bytes_of(found if scales is None else np.concatenate([found, scales], -1))

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes bytes from `export` into a block."""
        rest = memoryview(data)
        for bank, arrays in self.of_group(group):
            if bank.kind.plain:
                target = arrays[0][:, :, block]
                target[...] = np.frombuffer(rest[: target.nbytes], np.float32).reshape(target.shape)
                rest = rest[target.nbytes :]
                continue
            for halves in _exported(bank.kind, arrays):
                size = len(bank.layers) * self._layer_bytes(bank.kind, halves, arrays)
                shape = len(bank.layers), len(halves), bank.kind.heads, self.block_size, -1
                found = np.frombuffer(rest[:size], arrays[0].dtype).reshape(shape)
                rest = rest[size:]
                for i, (array, values) in enumerate(halves):
                    self._write(bank.kind, array, block, values, found[:, i])
                if bank.kind.latent:
                    self._write(bank.kind, arrays[1][:, 0], block, True, found[:, 0])

    def _write(self, kind: CacheKind, array: np.ndarray, block: int, values: bool, found: np.ndarray) -> None:
        """found: the numbers of keys or values [layers, heads, tokens, dim or more], followed by scales if int8."""
        dim = _dim(kind, values)
        stored, *scale = self._views(kind, array, block, values)
        numbers = _widened(found[..., :dim], _padded(dim))
        if scale:
            scale[0][...] = np.ascontiguousarray(found[..., -4:]).reshape(scale[0].shape)
            if not values:
                numbers = numbers ^ np.uint8(_KEY_OFFSET)
        if values:
            _copy_halves(stored, numbers.reshape(stored.shape))
        else:
            stored[...] = np.ascontiguousarray(numbers).view(stored.dtype).reshape(stored.shape)

    def _views(self, kind: CacheKind, array: np.ndarray, block: int, values: bool) -> list[np.ndarray]:
        """Views of a block's keys or values and, for int8, of their scales: [layers, heads, tiles, 16 tokens or 8
        pairs, numbers of a token], as in the tiles (csrc/attention_layout.h). Adjacent dimensions of a key are viewed
        as one 32-bit number: copying them like this is several times faster. array: [layers, blocks, numbers]."""
        dim, tiles = _padded(_dim(kind, values)), self.block_size // TILE
        view = array[:, block].reshape(len(array), kind.heads, tiles, -1)
        size = TILE * dim
        stored = view[..., :size]
        if not values:
            if self.kv_dtype in ("bfloat16", "int8"):
                stored = stored.view(np.int32)
            stored = stored.reshape(*stored.shape[:-1], -1, TILE).swapaxes(3, 4)
        elif self.kv_dtype == "bfloat16":
            stored = stored.reshape(*stored.shape[:-1], TILE // 2, dim, 2).swapaxes(4, 5)
        return [stored, view[..., size:]] if self.kv_dtype == "int8" else [stored]

    def fill_(self, value: float) -> None:
        """Fills all blocks with a number that the dtype can hold; int8 caches are filled with bytes of 255, which makes
        their scales NaN."""
        bits = {"int8": 255, "bfloat16": np.float32(value).view(np.uint32) >> 16}
        for tensor in self.tensors:
            tensor[...] = value if tensor.dtype == np.float32 else bits.get(self.kv_dtype, value)


def _is_split(kind: CacheKind) -> bool:
    """Whether keys and values are stored in two arrays."""
    return kind.key_dim != kind.value_dim or kind.latent


def _dim(kind: CacheKind, values: bool) -> int:
    return kind.value_dim if values else kind.key_dim


def _exported(kind: CacheKind, arrays: list[np.ndarray]) -> list[list[tuple[np.ndarray, bool]]]:
    """The parts of an exported block: each has the arrays [layers, blocks, numbers] of keys, of values (True), or of
    both."""
    halves = [(arrays[0][:, 0], False), (arrays[-1][:, -1], True)]
    if not _is_split(kind):
        return [halves]
    return [[half] for half in halves[: 1 if kind.latent else 2]]


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()


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
