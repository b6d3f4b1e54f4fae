"""Adapters on the eager executor: their tensors on the device, and their places in the modules of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvasir.errors import UnsupportedModel, quoted
from kvasir.layers.adapters import Slot, check_slots, linears
from kvasir.layers.changes import Changes, MatrixChange, TableChange, Uses
from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import Head, Linear
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.tensors import TensorPlace
from kvasir.lora import Adapter, LowRank, TokenRows
from kvasir.lora.targets import HEAD
from kvasir.ops.linear.low_rank import LowRankTensors
from kvasir.plan import Adapted

_ONE = "use one rank"
_WEIGHT = "weight"  # the part of a table, of a norm, and of a linear layer with one matrix


class Seat(NamedTuple):
    """Where a change belongs: a part of a module."""

    module: Module
    part: str


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The changes of one adapter, with tensors on the device. nbytes: of these."""

    changes: tuple[tuple[Seat, Any], ...]
    nbytes: int


class EagerAdapters:
    """The adapters of a model. Packing reads the model's weights only; the other methods may not run during a forward.

    uses: which of them are in effect, for the modules."""

    def __init__(self, model: Any, device: torch.device | str):
        self._model, self._device = model, device
        self.uses = Uses()
        self._kept: dict[int, Packed] = {}

    def check(self, adapter: Adapter) -> None:
        """Raises UnsupportedModel, by name, for a change that modules cannot apply, ValueError for unknown slots."""
        _Packing(self._model, self._device).check(adapter)

    def pack(self, adapter: Adapter) -> Packed:
        """The adapter's tensors, as modules apply them. Raises as `check` does, and ValueError for other shapes."""
        packing = _Packing(self._model, self._device)
        packing.check(adapter)
        for slot, change in adapter.matrices.items():
            packing.add_matrix(slot, change)
        for path, change in adapter.tables.items():
            packing.add_table(path, change)
        for name, array in adapter.saved.items():
            packing.save(name, array)
        for path, rows in adapter.tokens.items():
            packing.put_rows(path, rows)
        return packing.packed()

    def set(self, adapter: int, packed: Packed | None) -> None:
        """Puts the changes into the modules, for the rows of this adapter id; None removes it. Raises ValueError for an
        id below 1."""
        if adapter < 1:
            raise ValueError(f"adapter ids begin at 1, not at {adapter}")
        if old := self._kept.pop(adapter, None):
            for (module, part), _ in old.changes:
                del module.changes[part].by_id[adapter]
        if packed is None:
            return
        for (module, part), change in packed.changes:
            if part not in module.changes:
                module.changes = {**module.changes, part: Changes(self.uses)}
            module.changes[part].by_id[adapter] = change
        self._kept[adapter] = packed

    @contextmanager
    def use(self, rows: Sequence[Sequence[tuple[int, float]]]) -> Iterator[None]:
        """Within it, these adapters, as (id, scale), are in effect in the rows of a forward, or of logits."""
        self.uses.set(rows, self._device)
        try:
            yield
        finally:
            self.uses.clear()


def in_effect(adapters: Sequence[Adapted], first: int, count: int) -> list[tuple[tuple[int, float], ...]]:
    """(id, scale) of the adapters that are in effect at each of `count` positions from `first` on."""
    return [
        tuple((a.adapter, a.scale) for a in adapters if a.start <= position)
        for position in (range(first, first + count) if adapters else ())
    ] or [()] * count


class _Packing:
    def __init__(self, model: Any, device: torch.device | str):
        self.place = TensorPlace(torch.float32, device)
        self.paths = dict(model.walk())
        self.linears: dict[str, tuple[Linear, str]] = linears(model)
        self.leaves = {f"{path}.{name}": (leaf, name) for path, leaf in self.paths.items() for name in leaf.expects()}
        if isinstance(head := getattr(model, HEAD, None), Head):
            self.linears[HEAD] = head, _WEIGHT
            self.leaves[f"{HEAD}.{_WEIGHT}"] = head, _WEIGHT  # a tied one expects no tensor
        self.changes: dict[tuple[int, str], tuple[Seat, Any]] = {}

    def check(self, adapter: Adapter) -> None:
        """As `EagerAdapters.check`."""
        check_slots(adapter.matrices, self.linears)
        for slot, change in adapter.matrices.items():
            linear, part = self.linears[slot]
            if linear.sum_parts > 1 and (".experts." in slot or change.magnitude is not None):
                raise UnsupportedModel(f"the adapter changes {quoted(slot)}, whose sum is split over ranks", _ONE)
        for path in (*adapter.tables, *adapter.tokens):
            leaf = self.linears[HEAD][0] if path == HEAD else self.paths[path]
            self._check_leaf(f"{path}.{_WEIGHT}", leaf)
        for name in adapter.saved:
            leaf, tensor = self.leaves[name]
            self._check_leaf(name, leaf)
            if isinstance(leaf, Linear):
                part = tensor.rpartition(".")[0] or next(iter(leaf.outputs))
                if ".experts." in name or part in leaf.scales or part in leaf.rounding:
                    self._refuse(name)

    def _check_leaf(self, name: str, leaf: Any) -> None:
        if not leaf.adaptable:
            self._refuse(name)
        whole = leaf.rows[_WEIGHT] == (0, leaf.outputs[_WEIGHT]) if isinstance(leaf, Head) else True
        if not whole or (isinstance(leaf, Embedding) and leaf.rows != (0, leaf.size)):
            raise UnsupportedModel(f"the adapter changes {quoted(name)}, which is split over ranks", _ONE)

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedModel(
            f"the adapter changes {quoted(name)}, which the eager executor cannot change for some requests only",
            "use an adapter of linear layers, embeddings and norms",
        )

    def packed(self) -> Packed:
        """All changes that were added."""
        changes = tuple(self.changes.values())
        tensors = {t.data_ptr(): t.numel() * t.element_size() for _, change in changes for t in _tensors(change)}
        return Packed(changes, sum(tensors.values()))

    def _update(self, seat: Seat, empty: Any, **values: Any) -> None:
        key = id(seat.module), seat.part
        _, change = self.changes.get(key, (seat, empty))
        self.changes[key] = seat, replace(change, **values)

    def add_matrix(self, slot: str, change: LowRank) -> None:
        """Adds a low-rank change of a linear layer, the router, the head or an expert."""
        linear, part = self.linears[slot]
        taken = Slot.of(slot, linear, part).take((change.a, change.b, change.scale))
        rows = slice(*linear.rows[part])
        bias, magnitude = (None if x is None else x[rows] for x in (change.bias, change.magnitude))
        mine = LowRank(change.a, change.b[rows], change.scale, magnitude, bias)
        factor = None if magnitude is None else mine.factor(lambda: _rows_of(linear, part))
        pair = self._pair(mine, taken.a, taken.b, taken.segments, factor)
        self._update(Seat(linear, part), MatrixChange(), pair=pair)

    def add_table(self, path: str, change: LowRank) -> None:
        """Adds a low-rank change of a table."""
        table: Any = self.paths[path]
        scaled = change.b.astype(np.float32) * np.float32(change.scale)
        factor = None if change.magnitude is None else change.factor(lambda: _columns_of(table))
        pair = self._pair(change, change.a, scaled, 1, factor)
        self._update(Seat(table, _WEIGHT), TableChange(), pair=pair)

    def _pair(
        self, change: LowRank, a: np.ndarray, b: np.ndarray, segments: int, factor: np.ndarray | None
    ) -> LowRankTensors:
        if change.bias is not None:
            bias = change.bias.astype(np.float32) * np.float32(change.scale)
            b = np.concatenate([b, bias[:, None]], 1)
        exact = self.place.exact
        a_SRk = exact(a).unflatten(1, (segments, -1)).transpose(0, 1).contiguous()
        factor_N = None if factor is None else exact(factor)
        return LowRankTensors(a_SRk, exact(b).unsqueeze(0), change.bias is not None, factor_N)

    def save(self, name: str, array: np.ndarray) -> None:
        """Adds a tensor that replaces one of a linear layer, a table or a norm."""
        leaf, tensor = self.leaves[name]
        if isinstance(leaf, Linear):
            part, _, kind = tensor.rpartition(".")
            part = part or next(iter(leaf.outputs))
            twin = copy(leaf)
            twin.weights, twin.biases = {}, {}
            kept = twin.put(tensor, array, self._like(_weight_of(leaf, part)))
            self._update(Seat(leaf, part), MatrixChange(), **{kind: kept})
        elif isinstance(leaf, Embedding):
            table = copy(leaf).put(tensor, array, self._like(leaf.weight))
            self._update(Seat(leaf, _WEIGHT), TableChange(), table=table)
        else:
            _, twin = self.changes.setdefault((id(leaf), _WEIGHT), (Seat(leaf, _WEIGHT), copy(leaf)))
            twin.put(tensor, array, self.place)

    def put_rows(self, path: str, rows: TokenRows) -> None:
        """Adds rows of a table or of the head."""
        order = np.argsort(rows.ids)
        ids_m = torch.from_numpy(np.array(rows.ids, np.int64)[order]).to(self.place.device)
        values = rows.rows[order]
        if path != HEAD:
            tokens = ids_m, self.place.exact(values)
            return self._update(Seat(self.paths[path], _WEIGHT), TableChange(), tokens=tokens)
        head, part = self.linears[HEAD]
        weight = self._like(_weight_of(head, part)).segmented(values, 1)
        self._update(Seat(head, part), MatrixChange(), tokens=(ids_m, weight))

    def _like(self, weight: Any) -> TensorPlace:
        return TensorPlace(weight.dtype, self.place.device)


def _weight_of(linear: Linear, part: str) -> Tensor:
    return linear.weight if isinstance(linear, Head) else linear.weights[part]


def _rows_of(linear: Linear, part: str, most: int = 1 << 22) -> Iterator[np.ndarray]:
    """The rows of a matrix of the model, float32, some at a time."""
    weight_SNk, inputs = _weight_of(linear, part), linear.inputs
    step = max(1, most // inputs)
    for n in range(0, weight_SNk.shape[1], step):
        segments = weight_SNk[:, n : n + step, : inputs // len(weight_SNk)].float()
        yield (segments.transpose(0, 1).flatten(1) * linear.scales.get(part, 1.0)).cpu().numpy()


def _columns_of(table: Any, most: int = 1 << 22) -> Iterator[np.ndarray]:
    """The columns of a table, float32, some at a time."""
    step = max(1, most // len(table.weight))
    for n in range(0, table.width, step):
        yield table.weight[:, n : n + step].float().T.cpu().numpy()


def _tensors(change: Any) -> Iterator[Tensor]:
    """All tensors of a change."""
    if isinstance(change, Tensor):
        yield change
    elif isinstance(change, RMSNorm):
        yield from (value for value in vars(change).values() if isinstance(value, Tensor))
    elif isinstance(change, MatrixChange | TableChange):
        for name in change.__slots__:
            yield from _tensors(getattr(change, name))
    elif isinstance(change, tuple):
        for value in change:
            yield from _tensors(value)
