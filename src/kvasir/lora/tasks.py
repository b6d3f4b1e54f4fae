"""The adapters in a model's own checkpoint, one for each task, as Jina embeddings v3 has them (arXiv:2409.10173): a
parametrization of torch, W + lora_alpha / lora_rank * B A, with the tasks along the first axis.

    <module>.parametrizations.weight.0.lora_A [tasks, r, in], .lora_B [tasks, out, r]
    <table>.parametrizations.weight.0.lora_A [tasks, V, r], .lora_B [tasks, r, H]

Named FOLDER#TASK; config.json has the tasks in `lora_adaptations`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.json_file import read_json_object
from kvasir.lora.adapter import (
    MAX_RANK,
    MAX_SCALE,
    AdapterFile,
    Update,
    check_dtype,
    check_scale,
    content_hash,
    pair_rank,
)
from kvasir.weights.safetensors import SafetensorsFolder

_TENSOR = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<part>[AB])")
_UNUSED = re.compile(r"(.*\.)?pooler\.dense")  # the model's rows are pooled without it
_WORDS, _TYPES = "word_embeddings", "token_type_embeddings"
_HINT = "the file is damaged: download the model again"


def split_task(path: Path) -> tuple[Path, str] | None:
    """(folder, task) of a path FOLDER#TASK; None for any other."""
    folder, mark, task = str(path).rpartition("#")
    return (Path(folder), task) if mark and task and not path.exists() and Path(folder).is_dir() else None


def read_task(folder: Path, task: str) -> AdapterFile:
    """The adapter of a task. Raises ModelFileError, UnsupportedModel."""
    path = folder / "config.json"
    config = read_json_object(path)
    tasks = config.get("lora_adaptations")
    if not isinstance(tasks, list) or task not in tasks:
        known = f"expected one of {quoted(tasks)}" if tasks else "this model has none"
        raise ModelFileError(f"{folder}: there is no task {quoted(task)}", known)
    rank, scale = _scale(path, config)
    source = SafetensorsFolder(folder)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name in source.names():
        match = _TENSOR.fullmatch(name)
        if match and not _UNUSED.fullmatch(match["module"]):
            check_dtype(name, source.info(name).dtype)
            pairs.setdefault(match["module"], {})[match["part"]] = _of_task(
                name, source.array(name), len(tasks), tasks.index(task)
            )
    if not pairs:
        raise ModelFileError(f"{folder}: there is no tensor of an adapter", _HINT)
    updates = _joined({module: _update(module, parts, rank, scale) for module, parts in pairs.items()})
    tensors = {f"{u.module}.{part}": array for u in updates for part, array in (("a", u.a), ("b", u.b))}
    content, nbytes = content_hash(["task", scale], tensors.items())
    return AdapterFile("task", folder, content, {"name": folder.name}, updates, {}, {}, frozenset(), (), nbytes)


def _scale(path: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    rank, alpha = config.get("lora_rank"), config.get("lora_alpha", 1)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"{path}: lora_rank is {quoted(rank)}, expected a rank from 1 to {MAX_RANK}", _HINT)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or abs(alpha) > MAX_SCALE * rank:
        raise ModelFileError(f"{path}: lora_alpha is {quoted(alpha)}, expected a number of moderate size", _HINT)
    return rank, check_scale(f"{path}: lora_alpha", float(alpha) / rank)


def _of_task(name: str, array: np.ndarray, tasks: int, index: int) -> np.ndarray:
    if array.ndim != 3 or len(array) != tasks:
        raise ModelFileError(f"tensor {quoted(name)} has shape {[*array.shape]}, expected [{tasks}, ...]", _HINT)
    return array[index]


def _joined(updates: dict[str, Update]) -> tuple[Update, ...]:
    """The updates; what is added to the only token type, and so to each row of tokens, is one more rank of their
    table's. Raises UnsupportedModel for several types, ModelFileError for types of another width."""
    for name, types in list(updates.items()):
        words = updates.get(f"{name.removesuffix(_TYPES)}{_WORDS}")
        if not name.endswith(_TYPES) or words is None:
            continue
        if types.a.shape[1] != 1:
            raise UnsupportedModel(f"the adapter changes {quoted(name)}, which has {types.a.shape[1]} types")
        if len(types.b) != len(words.b):
            message = (
                f"the adapter's {quoted(name)} has width {len(types.b)}, and {quoted(words.module)} {len(words.b)}"
            )
            raise ModelFileError(message, _HINT)
        wide = [array.astype(np.float32) for array in (words.a, words.b, types.b, types.a)]
        a = np.concatenate([wide[0], np.ones((1, words.a.shape[1]), np.float32)])
        b = np.concatenate([wide[1], wide[2] @ wide[3]], axis=1)
        updates[words.module] = replace(words, a=a, b=b, rank=words.rank + 1)
        del updates[name]
    return tuple(updates.values())


def _update(module: str, parts: Mapping[str, np.ndarray], rank: int, scale: float) -> Update:
    if len(parts) < 2:
        raise ModelFileError(f"the adapter of {quoted(module)} has only lora_{min(parts)}", _HINT)
    a, b = parts["A"], parts["B"]
    embedding = a.shape[0] != rank or b.shape[1] != rank
    a, b = (a.T, b.T) if embedding else (a, b)
    return Update(module, a, b, pair_rank(module, a, b), scale, embedding=embedding)
