"""The memory of a pool's blocks, for any kind of cache and any executor's block layout."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from kvasir.caches import CacheKind
from kvasir.layers.kv_layout import Bank, KVLayout
from kvasir.plan import CacheGroup

Array = Any  # NumPy's, or a tensor of the executor


def joined(parts: Sequence[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class PagedMemory:
    """Owns the arrays of a cache. The layers of a bank share them: for each field one [layers, copies, blocks, ...].
    Contents start undefined; blocks are read only after a sequence has written them.

    groups: as the scheduler plans them. spec: the kind of each layer. Layers are numbered as in their model (`of`).
    coded: whether scales are fields of their own, see `CacheKind.stored`.
    """

    def __init__(
        self,
        layout: KVLayout,
        groups: tuple[CacheGroup, ...],
        num_blocks: Sequence[int],
        block_size: int,
        coded: bool = False,
    ):
        if len(num_blocks) != len(groups):
            raise ValueError(f"{len(num_blocks)} sizes for {len(groups)} groups of layers")
        self.layout, self.groups = layout, groups
        self.num_blocks, self.block_size = tuple(num_blocks), block_size
        self.banks = layout.banks(block_size, coded)
        self._banked = [self._allocate(bank, num_blocks[bank.group]) for bank in self.banks]
        self.tensors = [tensor for tensors in self._banked for tensor in tensors]
        places = {layer: (b, i) for b, bank in enumerate(self.banks) for i, layer in enumerate(bank.layers)}
        self._places = [places.get(owner, (-1, -1)) for owner in layout.owners]  # -1: of another process
        self._arrays = [[tensor[i] for tensor in self._banked[b]] if b >= 0 else [] for b, i in self._places]
        self._groups = tuple(layout.group_of(layer) for layer in range(len(layout.kinds)))
        self._layers = range(len(layout.kinds))
        self.spec: tuple[CacheKind, ...] = layout.kinds

    def _allocate(self, bank: Bank, num_blocks: int) -> list[Array]:
        """Allocates the arrays of a bank, of any type that is indexed like NumPy's."""
        raise NotImplementedError

    def of(self, model: str) -> Self:
        """A view of the same memory, with the layers of one model under their own numbers."""
        view = copy(self)
        view._layers = self.layout.models[model]
        view.spec = tuple(self.layout.kinds[layer] for layer in view._layers)
        return view

    def group_of(self, layer: int) -> int:
        return self._groups[self._layers[layer]]

    def owns(self, layer: int) -> bool:
        """Whether the layer has memory of its own, rather than reading another layer's."""
        number = self._layers[layer]
        return self.layout.owners[number] == number

    def place(self, layer: int) -> tuple[int, int]:
        """(bank, index in the bank) of the memory that a layer reads."""
        return self._places[self._layers[layer]]

    def arrays(self, layer: int) -> list[Array]:
        """For each field, [copies, blocks, ...]."""
        return self._arrays[self._layers[layer]]

    def of_group(self, group: int) -> list[tuple[Bank, list[Array]]]:
        return [(bank, own) for bank, own in zip(self.banks, self._banked, strict=True) if bank.group == group]

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) blocks of a group in all its layers. All sources are read before any target is
        written."""
        if pairs:
            sources, targets = self._indices(np.array(pairs).T)
            for _, tensors in self.of_group(group):
                for tensor in tensors:
                    tensor[:, :, targets] = tensor[:, :, sources]

    def _indices(self, blocks: np.ndarray) -> Array:
        """Block numbers as the arrays of this memory are indexed."""
        return blocks

    def fill_(self, value: float) -> None:
        for tensor in self.tensors:
            tensor[...] = value

    def bytes_per_block(self, group: int) -> int:
        return self.groups[group].bytes_per_block
