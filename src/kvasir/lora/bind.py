"""Finds what an adapter changes in a model, and checks all shapes against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.lora.adapter import Adapter, AdapterFile, LowRank, TokenRows, Update
from kvasir.lora.gguf_names import checkpoint_updates
from kvasir.lora.targets import HEAD, STACKED, Place, Targets

_OTHER = "is this an adapter of this model?"
_FIRST_LAYOUT = (0, 21)  # the oldest peft of which it is known that inputs and outputs of experts are not exchanged


def bind(file: AdapterFile, model: Any, config: Mapping[str, Any]) -> Adapter:
    """The adapter by the model's modules. model: with or without weights. config: of the model, in Hugging Face's form.

    Arrays are views of the adapter's files, except where rows are put into another order. Raises ModelFileError, or
    UnsupportedModel, that names what the model does not have, or has in another shape."""
    updates = checkpoint_updates(file, config) if file.kind == "gguf" else file.updates
    binding = _Binding(file, Targets(model))
    for update in updates:
        binding.add(update)
    for name, array in file.saved.items():
        binding.save(name, array)
    for module, (ids, rows) in file.tokens.items():
        binding.put_rows(module, ids, rows)
    return Adapter(
        file.kind, file.content, binding.matrices, binding.tables, binding.saved, binding.tokens, file.invocation,
        file.nbytes,
    )  # fmt: skip


class _Binding:
    def __init__(self, file: AdapterFile, targets: Targets):
        self.file, self.targets = file, targets
        self.matrices: dict[str, LowRank] = {}
        self.tables: dict[str, LowRank] = {}
        self.saved: dict[str, np.ndarray] = {}
        self.tokens: dict[str, TokenRows] = {}

    def add(self, update: Update) -> None:
        """Adds one low-rank change."""
        if update.experts > 1 or update.stacked or update.parameter in STACKED:
            return self._add_experts(update)
        places = self._places(f"{update.module}.{update.parameter or 'weight'}", update.name)
        if update.embedding:
            return self._add_table(update, places)
        if unfit := next((place for place in places if not place.is_matrix), None):
            what = "a table, not a matrix" if unfit.is_table else "computed in another form here"
            raise UnsupportedModel(f"the adapter changes {quoted(update.name)}, which is {what}")
        rows = sum(_rows(place, update.b.shape[0]) for place in places)
        if rows != update.b.shape[0] or update.a.shape[1] != places[0].shape[1]:
            self._misshapen(update, sum(place.shape[0] for place in places), places[0].shape[1])
        for place in places:
            self._put(place, _part(place, update))

    def _add_table(self, update: Update, places: list[Place]) -> None:
        place = places[0]
        if not place.is_table:
            raise UnsupportedModel(f"the adapter changes {quoted(update.name)} as a table, which it is not")
        if (update.b.shape[0], update.a.shape[1]) != place.shape[::-1]:
            self._misshapen(update, *place.shape[::-1])
        if place.path in self.tables:
            self._twice(update.name)
        self.tables[place.path] = LowRank(update.a, update.b, update.scale, update.magnitude)
        if update.tied and self._shared(place):
            self._put(self.targets.places[f"{HEAD}.weight"], LowRank(update.b.T, update.a.T, update.scale))

    def _shared(self, place: Place) -> bool:
        """Whether a table is that of the head, too."""
        return self.targets.tied is not None and self.targets.tied.tied is place.leaf

    def _ties(self, module: str, place: Place) -> bool:
        """Whether the replacement of a table is one of the head, too."""
        return self._shared(place) and module in self.file.tied

    def _add_experts(self, update: Update) -> None:
        found = self.targets.mixture(update.module)
        if found is None:
            self._unknown(update.name)
        path, experts = found
        first = self.targets.expert(path, 0, update.parameter)
        if not first or update.experts != experts:
            raise ModelFileError(
                f"the adapter changes {quoted(update.name)} of {update.experts} experts, the model has "
                f"{experts if first else 'none of these matrices'}",
                _OTHER,
            )
        outputs, inputs = sum(place.shape[0] for place in first), first[0].shape[1]
        a, b = _by_expert(update)
        exchanged = self._exchanged(update, (b.shape[1], a.shape[2]), (outputs, inputs))
        if exchanged:
            a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
        for number in range(experts):
            places, start = self.targets.expert(path, number, update.parameter), 0
            for i, place in enumerate(places):
                size = place.shape[0]
                rows = slice(i, None, len(places)) if self._in_turns(places) else slice(start, start + size)
                self._put(place, LowRank(a[number], b[number][rows], update.scale))
                start += size

    def _in_turns(self, places: list[Place]) -> bool:
        """Whether the rows of gate and up are in turns, as where the checkpoint has the transposed stack."""
        model = self.targets.model
        transposed = getattr(model, "transposed_experts", False)
        return len(places) > 1 and transposed and getattr(model, "experts_in_turns", True)

    def _exchanged(self, update: Update, given: tuple[int, int], expected: tuple[int, int]) -> bool:
        """Whether a has the outputs and b the inputs, as older versions of peft write stacks of [outputs, inputs]."""
        transposed = getattr(self.targets.model, "transposed_experts", False)
        if given == expected:
            clear = expected[0] != expected[1] or transposed or update.stacked
            if not clear and self.file.version < _FIRST_LAYOUT:
                raise UnsupportedModel(
                    f"the adapter's matrices of {quoted(update.name)} are square, and its version of peft is "
                    f"{'.'.join(map(str, self.file.version)) or 'not stated'}: inputs and outputs cannot be told apart",
                    "save the adapter with peft 0.21 or later",
                )
            return False
        if update.stacked or transposed or given != expected[::-1]:
            self._misshapen(update, *expected)
        return True

    def save(self, name: str, array: np.ndarray) -> None:
        """Adds a tensor that replaces one of the model."""
        module, _, kind = name.rpartition(".")
        places = self._places(name, name)
        for place in places:
            try:
                fits = (place.take.shape(array.shape) if place.take else array.shape) == place.shape
            except ValueError:
                fits = False
            if not fits:
                raise ModelFileError(
                    f"the adapter's {quoted(name)} has shape {[*array.shape]}, the model's {[*place.shape]}"
                    + (" is part of it" if place.take else ""),
                    f"a vocabulary of another size cannot be used with the base model; {_OTHER}",
                )
            if place.full in self.saved:
                self._twice(name)
            self.saved[place.full] = place.take.of(array) if place.take else array  # type: ignore[arg-type]
            if kind == "weight" and self._ties(module, place) and not self._has_head():
                self.saved[f"{HEAD}.weight"] = array

    def _has_head(self) -> bool:
        """Whether the adapter has a head of its own."""
        return any(place.path == HEAD for name in self.file.saved for place in self.targets.tensor(name))

    def put_rows(self, module: str, ids: tuple[int, ...], rows: np.ndarray) -> None:
        """Adds rows of a table."""
        place = self._places(f"{module}.weight", module)[0]
        table = place.is_table or place.path == HEAD
        if not table or rows.shape[1:] != place.shape[1:] or max(ids, default=0) >= place.shape[0]:
            raise ModelFileError(
                f"the adapter has rows of shape {[*rows.shape]}, up to id {max(ids, default=0)}, for {quoted(module)}, "
                f"which {f'is {[*place.shape]}' if table else 'is no table'}",
                _OTHER,
            )
        self.tokens[place.path] = TokenRows(ids, rows)
        if self._ties(module, place):
            self.tokens[HEAD] = TokenRows(ids, rows)

    def _places(self, tensor: str, name: str) -> list[Place]:
        return self.targets.tensor(tensor) or self._unknown(name)

    def _put(self, place: Place, change: LowRank) -> None:
        if place.path in self.matrices:
            self._twice(place.path)
        self.matrices[place.path] = change

    def _unknown(self, name: str) -> NoReturn:
        raise ModelFileError(f"the adapter changes {quoted(name)}, which {self.targets.kind} does not have", _OTHER)

    def _twice(self, name: str) -> NoReturn:
        raise ModelFileError(f"the adapter changes {quoted(name)} twice, under two names", "save the adapter again")

    def _misshapen(self, update: Update, outputs: int, inputs: int) -> NoReturn:
        raise ModelFileError(
            f"the adapter's matrices of {quoted(update.name)} have shapes {[*update.a.shape]} and {[*update.b.shape]}, "
            f"but the model's matrix has {outputs} outputs and {inputs} inputs",
            _OTHER,
        )


def _rows(place: Place, outputs: int) -> int:
    """How many of so many rows the place takes; -1 if it needs others."""
    try:
        rows = (
            place.take.shape((outputs, 0) if not place.take.transposed else (0, outputs))[0] if place.take else outputs
        )
    except ValueError:
        return -1
    return rows if rows == place.shape[0] else -1


def _part(place: Place, update: Update) -> LowRank:
    """The part of a change that belongs to a place: rows of b, and of what has a value for each output."""
    take = replace(place.take, transposed=False) if place.take else None
    b, magnitude, bias = (
        rows if rows is None or take is None else take.of_rows(rows)
        for rows in (update.b, update.magnitude, update.bias)
    )
    assert b is not None
    return LowRank(update.a, b, update.scale, magnitude, bias)


def _by_expert(update: Update) -> tuple[np.ndarray, np.ndarray]:
    """a [experts, rank, inputs] and b [experts, outputs, rank] as views."""
    if update.stacked:
        return update.a, update.b
    a = update.a.reshape(update.experts, update.rank, -1)
    return a, update.b.reshape(-1, update.rank, update.experts).transpose(2, 0, 1)
