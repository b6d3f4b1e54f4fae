"""Assigns layers to block tables and memory, for one model or for several in one pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

from kvasir.caches import CacheKind, Field, Shared
from kvasir.plan import CacheGroup

Spec = Sequence[CacheKind | Shared]
AROUND = "attention within a distance in both directions"
CHUNKED = "attention within chunks"
LATENT = "latent attention"
SPARSE = "sparse attention"
# The values of caches.Kind.needs that the eager executor supports.
_COMPUTES = ("attention", "recurrent layers", AROUND, CHUNKED, LATENT, SPARSE)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
CODED = ("int8", "fp8")  # types of keys and values that are stored as codes with scales


@dataclass(frozen=True, slots=True)
class Bank:
    """The layers of a group that share a storage format. fields: the fields of a block, per layer. kind: of the first
    layer."""

    group: int
    kind: CacheKind
    layers: tuple[int, ...]
    fields: tuple[Field, ...]


class KVLayout:
    """The caches of all layers of one model or several. Layers are numbered consecutively across models.

    kinds: per layer, its own kind or that of the layer whose memory it reads. owners: that layer's number, or its own.
    groups: the layers of each block table, in order of first appearance, without layers that have no memory of their
    own. held: those of which there is memory here: all, unless other processes hold the rest. Raises ValueError for a
    layer that shares a nonexistent cache.
    """

    def __init__(self, specs: Mapping[str, Spec]):
        starts = accumulate((len(spec) for spec in specs.values()), initial=0)
        self.models = {name: range(start, start + len(specs[name])) for name, start in zip(specs, starts, strict=False)}
        entries = [entry for spec in specs.values() for entry in spec]
        places = ((name, i, entry) for name, spec in specs.items() for i, entry in enumerate(spec))
        self.owners = tuple(self._owner(entries, name, i, entry) for name, i, entry in places)
        self.kinds: tuple[CacheKind, ...] = tuple(entries[owner] for owner in self.owners)  # type: ignore[misc]
        tables: dict[Hashable, list[int]] = {}
        for layer, kind in enumerate(self.kinds):
            if self.owners[layer] == layer:
                tables.setdefault(kind.table, []).append(layer)
        self.groups = tuple(map(tuple, tables.values()))
        self.held: frozenset[int] = frozenset(range(len(self.kinds)))

    @classmethod
    def of(cls, spec: Spec | KVLayout) -> KVLayout:
        """The layout of a single model."""
        return spec if isinstance(spec, KVLayout) else cls({"": spec})

    def holding(self, layers: Collection[int]) -> KVLayout:
        """The same layout, with memory for these layers only."""
        part = copy(self)
        part.held = frozenset(layers)
        return part

    def _owner(self, entries: Sequence[CacheKind | Shared], name: str, layer: int, entry: CacheKind | Shared) -> int:
        model, index = entry.source(name, layer)
        there = self.models.get(model, range(0))
        shares = f"layer {layer} of the model {name!r} shares layer {index} of {model!r}"
        if index not in range(len(there)):
            raise ValueError(f"{shares}, which does not exist")
        if not entries[there[index]].owns:
            raise ValueError(f"{shares}, which has no cache of its own")
        return there[index]

    def group_of(self, layer: int) -> int:
        owner = self.owners[layer]
        return next(g for g, layers in enumerate(self.groups) if owner in layers)

    def cache_groups(self, block_bytes: Callable[[CacheKind], int]) -> tuple[CacheGroup, ...]:
        """The groups as the scheduler plans them. block_bytes: bytes of a block of one layer."""
        return tuple(
            CacheGroup(
                self.kinds[layers[0]],
                layers,
                sum(block_bytes(self.kinds[layer]) for layer in layers if layer in self.held),
            )
            for layers in self.groups
        )

    def banks(self, block_size: int, coded: bool = False) -> list[Bank]:
        """All banks, ordered by group. coded: see `CacheKind.stored`."""
        found: list[Bank] = []
        for group, layers in enumerate(self.groups):
            alike: dict[tuple, list[int]] = {}
            for layer in filter(self.held.__contains__, layers):
                kind = self.kinds[layer]
                alike.setdefault((kind.stored(block_size, coded), kind.row_shape), []).append(layer)
            found += [Bank(group, self.kinds[own[0]], tuple(own), fields) for (fields, _), own in alike.items()]
        return found

    @property
    def row_bytes(self) -> int:
        """Bytes of per-row data of one runner row, not counting its blocks."""
        return sum(self.kinds[layer].row_bytes for layers in self.groups for layer in layers)


def cache_groups(spec: Spec | KVLayout, block_size: int, dtype: str) -> tuple[CacheGroup, ...]:
    """The groups of a `KVCache` as the scheduler plans them, for keys and values of a dtype; bytes_per_block is the sum
    over a group's layers."""
    return KVLayout.of(spec).cache_groups(lambda kind: kind.block_bytes(block_size, _BYTES[dtype], dtype in CODED))


def no_op(spec: Spec | KVLayout) -> str:
    """Why the torch ops cannot compute with these caches; "" if they can."""
    missing = [kind.needs for kind in KVLayout.of(spec).kinds if kind.needs not in _COMPUTES]
    return f"no op computes {missing[0]}" if missing else ""
