"""GGUF files of random models, written with gguf-py as llama.cpp's converters write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.oracle import state_of

gguf = pytest.importorskip("gguf", reason="gguf writes the files of these tests")

Tensors = dict[str, np.ndarray]


def stacked(state: dict[str, Any]) -> Tensors:
    """The tensors by name, those of a layer's experts, or of its heads' norms, as one."""
    found: Tensors = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\..*)", name)
        if match is None:
            found[name] = np.asarray(tensor)
        else:
            parts.setdefault(match[1].removesuffix(".norms") + match[3], {})[int(match[2])] = np.asarray(tensor)
    return found | {name: np.stack([own[i] for i in sorted(own)]) for name, own in parts.items()}


def checkpoint_of(hf: Any) -> Tensors:
    """The stacked tensors of a model of transformers, without a head that is the embedding."""
    tied = {"lm_head.weight"} if hf.config.tie_word_embeddings else set()
    return {name: array for name, array in stacked(state_of(hf)).items() if name not in tied}


def converted_by(convert: Callable[[str, np.ndarray, Any], Tensors], hf: Any) -> Tensors:
    """The checkpoint's tensors as the converter passes them to gguf-py's name table. `convert` takes a tensor's name,
    its values and the config."""
    whole = checkpoint_of(hf).items()
    return {new: array for name, data in whole for new, array in convert(name, data, hf.config).items()}


def names_of(architecture: str, layers: int) -> Callable[[str], str]:
    """From the names of checkpoints to those of files; a file's own name stays."""
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(number, layers)

    def name_of(name: str) -> str:
        found = name if name.startswith("blk.") else table.get_name(name, (".weight", ".bias"))
        assert found is not None, f"gguf-py has no name for {name}"
        return found

    return name_of


@contextmanager
def writing(path: Path, architecture: str) -> Iterator[Any]:
    """A writer of gguf-py, whose keys and tensors are in the file at the end."""
    writer = gguf.GGUFWriter(path, architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: Any, name_of: Callable[[str], str], tensors: Tensors) -> None:
    """Adds tensors under the file's names."""
    for name, array in tensors.items():
        writer.add_tensor(name_of(name), np.ascontiguousarray(array))


def add_quantized(writer: Any, name: str, array: np.ndarray, kind: Any) -> None:
    """Adds a matrix in blocks of that type; float32 where the type is None or its blocks do not fill the rows."""
    array = np.ascontiguousarray(array)
    if kind is None or array.ndim < 2 or array.shape[-1] % 32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
