"""Pools the hidden rows of a text into its embedding: which rows to use, and whether to normalise the result.

Sources: the `modules.json`, `1_Pooling/config.json` and `sentence_bert_config.json` of sentence-transformers folders
(https://sbert.net/docs/package_reference/sentence_transformer/models.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.json_file import read_json, read_json_object
from kvasir.models.config import MAX_CONFIG_BYTES, MAX_POSITIONS, Fields

KINDS = ("mean", "cls", "last", "none")
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_MAX_MODULES = 16


@dataclass(frozen=True, slots=True)
class Pooling:
    """kind: "mean" of all rows, "cls" for the first row, "last" for the last; "none" if the model is not meant for
    embeddings.

    normalize: whether the embedding is scaled to length 1. max_length: maximum tokens of a text, 0 if only the model's
    own limit applies.
    """

    kind: str = "last"
    normalize: bool = True
    max_length: int = 0

    @np.errstate(all="ignore")  # faulty rows give infinities and NaN
    def __call__(self, hidden_nD: np.ndarray) -> np.ndarray:
        """float32 [n, D], the rows of one text, to float32 [D]. The bits depend only on these rows. Raises
        UnsupportedModel for the kind "none"."""
        if self.kind == "none":
            raise UnsupportedModel("the model is not meant for embeddings: its pooling is none", "use another model")
        if self.kind == "mean":
            pooled_D = _tree_sum(hidden_nD) / np.float32(len(hidden_nD))
        else:
            pooled_D = hidden_nD[0 if self.kind == "cls" else -1]
        return _normalized(pooled_D) if self.normalize else pooled_D


def _tree_sum(x_nD: np.ndarray) -> np.ndarray:
    """The sum of the rows by halving: for each n the order is fixed, which NumPy's own sum does not promise."""
    while (n := len(x_nD)) > 1:
        half = n // 2
        halved = x_nD[:half] + x_nD[half : 2 * half]
        x_nD = np.concatenate([halved, x_nD[2 * half :]]) if n % 2 else halved
    return x_nD[0]


def _normalized(x_D: np.ndarray) -> np.ndarray:
    """Scales the vector to length 1; zeros stay zeros."""
    length = np.sqrt(_tree_sum((x_D * x_D)[:, None]))
    return x_D / np.maximum(length, np.float32(1e-12))


def pooling_of(config: Mapping[str, Any], default: Pooling) -> Pooling:
    """The `pooling` entry of a config, as written by `read_pooling` and for GGUF files; `default` if absent. Raises
    ModelFileError for a bad entry, UnsupportedModel for an unknown kind."""
    value = config.get("pooling")
    if value is None:
        return default
    if not isinstance(value, Mapping):
        raise ModelFileError(f"config.json: pooling is {value!r}", "expected an object")
    f = Fields(value, "pooling")
    return Pooling(
        f.choice("kind", KINDS, default.kind),
        f.flag("normalize", default.normalize),
        f.integer("max_length", 0, MAX_POSITIONS, default.max_length),
    )


# --- folders ----------------------------------------------------------------------------------------


def read_pooling(folder: str | Path) -> dict[str, Any]:
    """{"pooling": {...}} to merge into the folder's config; {} if it is not a sentence-transformers folder.

    Raises UnsupportedModel for modules and modes without code (dense, max), ModelFileError for bad files.
    """
    folder = Path(folder)
    if not (folder / "modules.json").is_file():
        return {}
    kinds = _module_paths(folder)
    if list(kinds) not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{folder / 'modules.json'}: the modules are {', '.join(kinds)}",
            "supported: Transformer, Pooling and optionally Normalize",
        )
    pooling = {"kind": _read_kind(folder / kinds["Pooling"]), "normalize": "Normalize" in kinds}
    lengths = folder / kinds["Transformer"] / "sentence_bert_config.json"
    if lengths.is_file():
        f = Fields(read_json_object(lengths, MAX_CONFIG_BYTES), lengths.name)
        pooling["max_length"] = f.integer("max_seq_length", 1, MAX_POSITIONS, 0)
    return {"pooling": pooling}


def _module_paths(folder: Path) -> dict[str, str]:
    """Module kind -> its folder, in order. Raises ModelFileError for a path outside the model's folder."""
    modules = read_json(folder / "modules.json", MAX_CONFIG_BYTES)
    if not isinstance(modules, list) or not 0 < len(modules) <= _MAX_MODULES:
        raise ModelFileError(f"{folder / 'modules.json'} is not a short list of modules")
    paths: dict[str, str] = {}
    for module in modules:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelFileError(f"{folder / 'modules.json'}: a module has no type and path")
        if not _is_inside(folder, path):
            raise ModelFileError(f"{folder / 'modules.json'}: the path {quoted(path)} is none of the model's folder")
        paths[kind.rpartition(".")[2]] = path
    return paths


def _is_inside(folder: Path, path: str) -> bool:
    """Whether the path lies inside the folder and is a valid file name."""
    try:
        (folder / path).exists()
        return (folder / path).resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError):  # a zero byte, a lone surrogate, or too long
        return False


def _read_kind(folder: Path) -> str:
    path = folder / "config.json"
    f = Fields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
    named = f.get("pooling_mode")  # newer files name the mode instead of setting a flag
    if named is not None:
        return f.choice("pooling_mode", ("mean", "cls", "lasttoken")).removesuffix("token")
    modes = [name for name, value in f.values.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(f"{path}: the pooling is {', '.join(modes) or 'none'}",
                               f"supported: one of {', '.join(_MODES)}")  # fmt: skip
    return _MODES[modes[0]]
