"""The KV cache of the torch ops: the tensors of each kind of cache (kvasir.caches)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kvasir.caches import State
from kvasir.layers.kv_layout import CODED, Bank, KVLayout, Spec, cache_groups
from kvasir.layers.kv_memory import PagedMemory, joined
from kvasir.layers.tensors import dtype_name
from kvasir.ops.attention import store_kv
from kvasir.plan import Bytes

SCRATCH_BLOCK = 0  # never allocated to a sequence; padding rows write there


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which must not be written to afterwards."""
    return tensor.cpu().flatten().view(torch.uint8).numpy().data.toreadonly()


def from_bytes(data: Bytes, dtype: torch.dtype) -> Tensor:
    """A flat tensor with a copy of the bytes."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype)


class KVCache(PagedMemory):
    """Blocks with the fields that their kinds define: keys and values each [layers, 2, blocks, block size, kv heads,
    head dim].

    block_size divides 64 or is a multiple of it. dtype: of keys and values. rows: the number of runner rows, for kinds
    with per-row data.

    Of int8 and float8_e4m3fn, keys and values are codes with a float32 scale per token and head (ops.attention.
    triton_codes), in int8 tensors or, as bits, in uint8 ones. Only the graph executor's kernels compute with them.
    """

    def __init__(
        self,
        spec: Spec | KVLayout,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        rows: int = 0,
    ):
        self.dtype, self.device = dtype, torch.device(device)
        layout = KVLayout.of(spec)
        name = dtype_name(dtype)
        self.coded = name in CODED
        self._stored = torch.uint8 if name == "fp8" else dtype
        super().__init__(layout, cache_groups(layout, block_size, name), num_blocks, block_size, self.coded)
        self._rows = [
            torch.empty((len(bank.layers), rows, *bank.kind.row_shape), device=device) if bank.kind.row_shape else None
            for bank in self.banks
        ]

    def _allocate(self, bank: Bank, num_blocks: int) -> list[Tensor]:
        return [
            torch.empty(
                (len(bank.layers), field.copies, num_blocks, *field.shape),
                dtype=torch.float32 if field.exact else self._stored,
                device=self.device,
            )
            for field in bank.fields
        ]

    def _indices(self, blocks: np.ndarray) -> Tensor:
        return torch.from_numpy(blocks).to(self.device)

    def k(self, layer: int) -> Tensor:
        """[blocks, block size, kv heads, head dim]"""
        return self.spec[layer].keys(self._numbers(layer))

    def v(self, layer: int) -> Tensor:
        return self.spec[layer].values(self._numbers(layer))

    def _numbers(self, layer: int) -> list[Tensor]:
        """The arrays of a layer without those of scales, which are the second half."""
        arrays = self.arrays(layer)
        return arrays[: len(arrays) // 2] if self.coded else arrays

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The scales of the keys and of the values, each [blocks, kv heads, block size]; None if they are no codes."""
        if not self.coded:
            return None
        arrays = self.arrays(layer)
        return arrays[len(arrays) // 2][0], arrays[-1][-1]

    def fill_(self, value: float) -> None:
        """Fills all blocks with a number; those of codes with bytes of 255, of which the scales are NaN."""
        if self.coded:
            for tensor in self.tensors:
                tensor.view(torch.uint8)[...] = 255
        else:
            super().fill_(value)

    def state(self, layer: int) -> Tensor:
        """[blocks, *state]: the state at the start of each block."""
        return cast(State, self.spec[layer]).states(self.arrays(layer))

    def inputs(self, layer: int) -> Tensor:
        """[blocks, before + block size, inputs]"""
        return cast(State, self.spec[layer]).inputs_of(self.arrays(layer))

    def index_keys(self, layer: int) -> Tensor:
        """[blocks, block size, dim]"""
        return self.spec[layer].keys(self.arrays(layer))

    def row_state(self, layer: int) -> Tensor:
        """[rows, *state]: the state after the last token of each runner row."""
        bank, index = self.place(layer)
        found = self._rows[bank]
        assert found is not None, "the layer has no state per row"
        return found[index]

    def store(self, layer: int, slots_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Writes the rows' keys and values to their slots in the layer's group."""
        assert self.owns(layer), "the layer shares the cache of another"
        assert not self.coded, "no torch op makes codes"
        for target, rows in self.spec[layer].writes(self.arrays(layer), k_TKd, v_TKd):
            store_kv(target, rows, slots_T)

    def orders(self, group: int) -> list[tuple[Bank, str]]:
        """For each bank of a group, the axes of its part of an exported block, outermost first."""
        return [(bank, "+".join(field.order for field in bank.fields)) for bank, _ in self.of_group(group)]

    def order(self, group: int) -> str:
        return "+".join(order for _, order in self.orders(group))

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes for all layers of the group, in a format independent of the cache's own layout."""
        return joined([bytes_of(piece.contiguous()) for piece in self.portable(group, block)])

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes a block from the result of `export`."""
        start = 0
        for target in self.portable(group, block):
            part = memoryview(data)[start : (start := start + target.nbytes)]
            target.copy_(from_bytes(part, target.dtype).view(target.shape))

    def portable(self, group: int, block: int) -> list[Tensor]:
        """Views of a block's tensors, with axes in export order."""
        return [
            tensor[:, :, block].permute(0, 1, *(2 + axis for axis in field.exported))
            for bank, tensors in self.of_group(group)
            for field, tensor in zip(bank.fields, tensors, strict=True)
        ]
