"""Filling a model from a checkpoint, tensor by tensor, so that little more than the result is ever in memory.

Every tensor that the model waits for must be there with the shape it expects, and every tensor of the checkpoint must be
used or be known to hold nothing: a checkpoint that is not what its config says never runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvasir.errors import ConfigError, ModelFileError
from kvasir.weights.source import WeightSource

Progress = Callable[[int, int], None]  # bytes of the file read so far, and in all

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN = 5


class Leaf(Protocol):
    """What is asked of a part of a model (kvasir.layers.module.Module)."""

    def expects(self) -> dict[str, tuple[int, ...]]: ...
    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class Fillable(Protocol):
    """What is asked of a model. `names` is its table, `prefix` and `ignored` (patterns) say what may differ."""

    prefix: str
    ignored: Iterable[str]

    def walk(self) -> Iterator[tuple[str, Any]]: ...
    def names(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor that a part of the model waits for, and where it lies in the checkpoint."""

    leaf: Leaf
    name: str
    shape: tuple[int, ...]
    stored: str
    take: Any


def choose_dtype(asked: str, source: WeightSource, device: str = "cpu") -> torch.dtype:
    """The type of the weights: "auto" is float32 where all matrices are stored so, else bfloat16.

    Raises ConfigError for a type that the device has no exact arithmetic for.
    """
    if asked == "auto":
        infos = [source.info(name) for name in source.names()]
        matrices = {info.dtype for info in infos if len(info.shape) > 1}
        return torch.float32 if matrices <= {"F32", "F64"} else torch.bfloat16
    if asked not in DTYPES:
        raise ConfigError(f"dtype {asked!r} is not known", f"choose auto, {', '.join(DTYPES)}")
    if asked == "float16" and device == "cpu":
        raise ConfigError("float16 has no fast arithmetic on most processors", "use --dtype bfloat16")
    return DTYPES[asked]


def fill(
    model: Fillable,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> int:
    """Gives every part of the model its tensors; returns how many parameters there are.

    Raises ModelFileError that names the tensor: missing, of another shape, or left over.
    """
    wanted = list(_wanted(model, source))
    _check_all_used(model, source, {item.stored for item in wanted})
    total, done, parameters = sum(source.info(name).nbytes for name in {w.stored for w in wanted}), 0, 0
    seen: set[str] = set()
    for item in wanted:
        stored = source.tensor(item.stored, torch.float32 if len(item.shape) == 1 else dtype)
        kept = item.leaf.put(item.name, item.take.of(stored) if item.take else stored, dtype, torch.device(device))
        if not _same_memory(kept, source.tensor(item.stored)):
            source.drop(item.stored)
        parameters += math.prod(item.shape)
        if item.stored not in seen:
            seen.add(item.stored)
            done += source.info(item.stored).nbytes
            if progress:
                progress(done, total)
    return parameters
