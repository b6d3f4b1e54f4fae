"""Fills a model from a checkpoint, one tensor at a time, so that memory use is little more than the result's.

Every tensor that the model expects must be present with the expected shape, and every tensor of the checkpoint must be
used or be in the model's list of ignored tensors: a checkpoint that does not match its config never runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvasir.errors import ConfigError, ModelFileError, UnsupportedModel, quoted
from kvasir.weights.adapted import WithoutAdapters
from kvasir.weights.flat_experts import FlatExpertsView
from kvasir.weights.head_norms import HeadNormsView
from kvasir.weights.source import WeightSource
from kvasir.weights.stacks import ExpertsView

Progress = Callable[[int, int], None]  # bytes of the file read so far, and in total
# (module, its tensor's name, source, name in the source, Take or None) -> whether it has stored the tensor
Hold = Callable[[Any, str, WeightSource, str, Any], bool]

DTYPES = ("float32", "bfloat16", "float16")  # of weights
_SHOWN = 5
_VIEWS = ("F32", "F16", "BF16", "F64")  # types of which sources give views of the file
ROUNDED_ROWS = "BITNET"  # the type of matrices whose input rows are rounded to int8, by one scale for a row
_LAYER = re.compile(r"layers\.(\d+)\.")
_NO_WEIGHTS = re.compile(r"BOOL|[UI]\d+|C64")  # dtypes that are not real-valued weights


class Leaf(Protocol):
    """The methods of a module that the loader uses (kvasir.layers.module.Module)."""

    def expects(self) -> dict[str, tuple[int, ...]]: ...
    def put(self, name: str, array: Any, place: Any) -> Any: ...
    def round_rows(self, name: str) -> None: ...


class Fillable(Protocol):
    """The attributes of a model that the loader uses. names: its name table. prefix, ignored (patterns): the allowed
    differences between the table and the checkpoint."""

    prefix: str
    ignored: Iterable[str]

    def walk(self) -> Iterator[tuple[str, Any]]: ...
    def names(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Filled:
    """parameters: their number. bytes: of the tensors that the modules hold, `mapped` of them in the file's pages;
    tensors that `hold` stored are not counted."""

    parameters: int
    bytes: int
    mapped: int

    def __add__(self, other: Filled) -> Filled:
        return Filled(self.parameters + other.parameters, self.bytes + other.bytes, self.mapped + other.mapped)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor that a module expects, and its place in the checkpoint."""

    leaf: Leaf
    name: str
    shape: tuple[int, ...]
    stored: str
    take: Any


def choose_dtype(asked: str, source: WeightSource, device: str = "cpu") -> str:
    """The dtype of the weights. "auto" is float32 if all matrices are stored as F32 or F64, else bfloat16.

    Raises ConfigError for an unknown dtype, or float16 on the CPU.
    """
    if asked == "auto":
        infos = [source.info(name) for name in source.names()]
        matrices = {info.dtype for info in infos if len(info.shape) > 1}
        return "float32" if matrices <= {"F32", "F64"} else "bfloat16"
    if asked not in DTYPES:
        raise ConfigError(f"unknown dtype {asked!r}", f"choose auto, {', '.join(DTYPES)}")
    if asked == "float16" and device == "cpu":
        raise ConfigError("float16 has no fast arithmetic on most processors", "use --dtype bfloat16")
    return asked


def fill(
    model: Fillable,
    source: WeightSource,
    place: Any,
    progress: Progress | None = None,
    hold: Hold | None = None,
) -> Filled:
    """Gives every module of the model its tensors. place: where modules keep them (kvasir.layers.places), unused if
    `hold` takes all.

    hold: called first for each tensor; it returns True if it has stored the tensor in the module in another format.
    Raises ModelFileError that names a missing, misshapen or unused tensor.
    """
    transposed, in_turns = getattr(model, "transposed_experts", False), getattr(model, "experts_in_turns", True)
    source = ExpertsView(source, transposed, in_turns)
    if getattr(model, "leaves_adapters", False):
        source = WithoutAdapters(source)
    if flat := getattr(model, "flat_experts", 0):
        source = FlatExpertsView(source, flat)
    if getattr(model, "norms_by_head", False):
        source = HeadNormsView(source)
    wanted = list(_wanted(model, source))
    sizes = {item.stored: source.info(item.stored).nbytes for item in wanted}
    _check_all_used(model, source, sizes.keys())
    total, done, parameters, held, mapped = sum(sizes.values()), 0, 0, 0, 0
    for item in wanted:
        parameters += math.prod(item.shape)
        if hold and hold(item.leaf, item.name, source, item.stored, item.take):
            done += sizes.pop(item.stored, 0)
            if progress:
                progress(done, total)
            continue
        array = source.array(item.stored)
        if source.info(item.stored).dtype == ROUNDED_ROWS:
            item.leaf.round_rows(item.name)
        kept = item.leaf.put(item.name, item.take.of(array) if item.take else array, place)
        held += kept.nbytes
        if _is_within(kept, array) and source.info(item.stored).dtype in _VIEWS:
            mapped += kept.nbytes
        else:
            source.drop(item.stored)
        done += sizes.pop(item.stored, 0)
        if progress:
            progress(done, total)
    return Filled(parameters, held, mapped)


def _wanted(model: Fillable, source: WeightSource) -> Iterator[_Wanted]:
    """Every tensor of the model, layer by layer, found in the checkpoint and checked for dtype and shape."""
    stored = set(source.names())
    table = model.names()
    for path, leaf in sorted(model.walk(), key=lambda item: _layer(item[0])):
        for name, shape in leaf.expects().items():
            take, found = _find(spellings(table, f"{path}.{name}"), stored, model.prefix)
            _check_type(found, source.info(found).dtype)
            _check_shape(found, tuple(source.info(found).shape), shape, take)
            yield _Wanted(leaf, name, shape, found, take)


def _layer(path: str) -> int:
    """The number of the layer that a module is in; -1 for none."""
    found = _LAYER.match(path)
    return int(found[1]) if found else -1


def spellings(table: Mapping[str, Any], path: str) -> list[tuple[Any, str]]:
    """The table's entry for "layers.3.attn.out.weight": the tensor's possible names, each with a Take, or None for the
    whole tensor.

    The numbers in the path, of the layer and of the expert if any, replace the stars in the names in order.
    """
    module, _, kind = path.rpartition(".")
    numbers = re.findall(r"\.(\d+)(?=\.)", module)
    entry = table[re.sub(r"\.\d+(?=\.)", ".*", module)]
    takes = [(None, one) if isinstance(one, str) else (one, one.name) for one in _several(entry)]
    return [(take, f"{name.replace('*', '{}').format(*numbers)}.{kind}") for take, name in takes]


def _several(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _find(asked: list[tuple[Any, str]], stored: set[str], prefix: str) -> tuple[Any, str]:
    for take, name in asked:
        for spelled in (name, name.removeprefix(prefix), prefix + name):
            if spelled in stored:
                return take, spelled
    raise ModelFileError(
        f"the checkpoint has no tensor {' or '.join(name for _, name in asked)}",
        "is the download complete, and does config.json belong to these weights?",
    )


def _check_type(name: str, stored: str) -> None:
    """Raises UnsupportedModel for integer dtypes: without the scales of a quantization their values are not the
    weights."""
    if _NO_WEIGHTS.fullmatch(stored):
        raise UnsupportedModel(
            f"tensor {quoted(name)} is stored as {stored}, which is not a supported weight type",
            "use the model's checkpoint in float32, float16 or bfloat16, or a GGUF file of it",
        )


def _check_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...], take: Any) -> None:
    try:
        given = take.shape(stored) if take else stored
    except ValueError as error:
        raise ModelFileError(f"tensor {name} of shape {list(stored)} is too small: {error}") from error
    if given != expected:
        raise ModelFileError(
            f"tensor {name} has shape {list(stored)}, expected {list(expected)}" + (" of it" if take else ""),
            "does config.json belong to these weights?",
        )


def _check_all_used(model: Fillable, source: WeightSource, used: Iterable[str]) -> None:
    ignored = [re.compile(pattern) for pattern in model.ignored]
    left = sorted(set(source.names()) - set(used))
    left = [name for name in left if not any(pattern.fullmatch(name) for pattern in ignored)]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise ModelFileError(
            f"the checkpoint has tensors that {type(model).__name__} does not use: {', '.join(left[:_SHOWN])}{more}",
            "ignoring them would compute another model; does config.json belong to these weights?",
        )


def _is_within(kept: Any, array: np.ndarray) -> bool:
    """Whether a module keeps the memory of the array rather than a copy. kept: an array or a tensor."""
    if hasattr(kept, "data_ptr"):
        return array.ctypes.data <= kept.data_ptr() < array.ctypes.data + max(array.nbytes, 1)
    return np.may_share_memory(kept, array)
