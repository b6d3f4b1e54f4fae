"""Adapters in mlx-lm's form: a folder with adapter_config.json and adapters.safetensors (mlx-lm's `tuner/lora.py` and
`tuner/dora.py`).

    <module>.lora_a [in, r], .lora_b [r, out], .m [out] for DoRA; of a table lora_a [V, r], lora_b [r, H]
    <stack of experts>.lora_a [E, r, in], .lora_b [E, out, r]

`lora_parameters.scale` is the factor itself. fine_tune_type "full": whole tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.json_file import read_json_object
from kvasir.lora.adapter import (
    MAX_RANK,
    AdapterFile,
    Update,
    check_dtype,
    check_scale,
    check_vector,
    content_hash,
    pair_rank,
    stack_rank,
)
from kvasir.lora.config import CONFIG, MAX_CONFIG_BYTES
from kvasir.weights.safetensors import SafetensorsFile

WEIGHTS = "adapters.safetensors"
_KINDS = ("lora", "dora", "full")
_PARAMETERS = ("rank", "scale", "dropout", "keys")
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_a|lora_b|m)")
_STACK = re.compile(r"(?P<mlp>.+)\.switch_mlp\.(?P<part>gate_proj|up_proj|down_proj)")
_TABLES = ("embed_tokens", "wte")


def read_mlx(folder: Path) -> AdapterFile:
    """Reads an adapter's folder. Raises ModelFileError for what is damaged or does not fit together, UnsupportedModel
    for what has no code."""
    path = folder / CONFIG
    config = read_json_object(path, MAX_CONFIG_BYTES)
    kind = config.get("fine_tune_type", "lora")
    if kind not in _KINDS:
        raise UnsupportedModel(f"{path}: fine_tune_type is {quoted(kind)}, expected one of {', '.join(_KINDS)}")
    scale = 1.0 if kind == "full" else _scale(path, config)
    file = SafetensorsFile(folder / WEIGHTS)
    for name, info in file.tensors.items():
        check_dtype(name, info.dtype)
    arrays = {name: file.array(name) for name in file.tensors}
    updates, saved = _read(arrays, kind, scale)
    if not (updates or saved):
        raise ModelFileError(f"{folder / WEIGHTS}: there is no tensor of an adapter", "save the adapter again")
    tables = {u.module for u in updates if u.embedding} | {
        module for name in saved if (module := name.rpartition(".")[0]).rpartition(".")[2] in _TABLES
    }
    content, nbytes = content_hash(["mlx", kind, scale], arrays.items())
    base = {"name": config["model"]} if isinstance(config.get("model"), str) else {}
    return AdapterFile("mlx", folder, content, base, updates, saved, {}, frozenset(tables), (), nbytes)


def _scale(path: Path, config: Mapping[str, Any]) -> float:
    values = config.get("lora_parameters")
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: lora_parameters is {quoted(values)}, expected an object with rank and scale")
    if unknown := sorted(name for name, value in values.items() if value and name not in _PARAMETERS):
        raise UnsupportedModel(
            f"{path}: lora_parameters.{quoted(unknown[0])} is {quoted(values[unknown[0]])}, which is not supported",
            "save the adapter with a current mlx-lm",
        )
    rank, scale = values.get("rank"), values.get("scale")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"{path}: lora_parameters.rank is {quoted(rank)}, expected a rank from 1 to {MAX_RANK}")
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise ModelFileError(f"{path}: lora_parameters.scale is {quoted(scale)}, expected a number")
    return check_scale(f"{path}: lora_parameters.scale", float(scale))


def _read(
    arrays: Mapping[str, np.ndarray], kind: str, scale: float
) -> tuple[tuple[Update, ...], dict[str, np.ndarray]]:
    modules: dict[str, dict[str, np.ndarray]] = {}
    saved: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        match = _TENSOR.fullmatch(name)
        if match and kind != "full":
            modules.setdefault(match["module"], {})[match["kind"]] = array
        elif kind == "full":
            saved[name] = array
        else:
            raise UnsupportedModel(f"the adapter has the unknown tensor {quoted(name)}")
    return tuple(_update(module, parts, kind, scale) for module, parts in modules.items()), saved


def _update(module: str, parts: Mapping[str, np.ndarray], kind: str, scale: float) -> Update:
    if missing := {"lora_a", "lora_b", *(["m"] if kind == "dora" else [])} ^ parts.keys():
        state = "no" if missing - parts.keys() else "the unexpected"
        raise ModelFileError(f"the adapter has {state} tensor {quoted(f'{module}.{min(missing)}')}")
    a, b, magnitude = parts["lora_a"], parts["lora_b"], parts.get("m")
    if stack := _STACK.fullmatch(module):
        return _stacked(f"{stack['mlp']}.experts", stack["part"], a, b, scale, magnitude)
    embedding = module.rpartition(".")[2] in _TABLES
    if embedding and magnitude is not None:
        raise UnsupportedModel(f"the adapter has the norms of a table's rows, {quoted(f'{module}.m')}")
    rank = pair_rank(module, a.T, b.T)
    check_vector(module, "magnitude", magnitude, b.shape[1])
    return Update(module, a.T, b.T, rank, scale, embedding=embedding, tied=embedding, magnitude=magnitude)


def _stacked(
    module: str, part: str, a: np.ndarray, b: np.ndarray, scale: float, magnitude: np.ndarray | None
) -> Update:
    name = f"{module}.{part}"
    if magnitude is not None:
        raise UnsupportedModel(f"the adapter has magnitudes of the experts {quoted(name)}")
    return Update(module, a, b, stack_rank(name, a, b), scale, part, a.shape[0], stacked=True)
