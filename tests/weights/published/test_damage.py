"""Damaged checkpoints: whatever is wrong with one tensor, the file loads or is refused with an error for users."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.errors import KvasirError
from kvasir.weights.published import unquantized
from kvasir.weights.source import SafetensorsSource
from tests.weights.published.encode import FORMATS

DTYPES = (np.uint8, np.int8, np.int32, np.uint32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
ROUNDS = 25


def damaged(array: np.ndarray, random: np.random.Generator) -> np.ndarray | None:
    """The tensor with another shape, another type or other bytes; None if it is missing."""
    kind = random.integers(7)
    if kind == 0:
        return None
    if kind == 1:
        return np.ascontiguousarray(array[: len(array) // 2] if array.ndim else array.reshape(1))
    if kind == 2:
        return np.ascontiguousarray(array.T[:-1] if array.ndim == 2 else array.reshape(-1)[:0])
    if kind == 3:
        return array.reshape(-1)
    if kind == 4:
        return array[..., None]
    if kind == 5:
        chosen = DTYPES[random.integers(len(DTYPES))]
        return np.nan_to_num(array.astype(np.float64)).astype(chosen)
    raw = random.integers(0, 256, array.nbytes, np.uint8)
    return raw.view(array.dtype).reshape(array.shape)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_one_damaged_tensor(name, tmp_path):
    chosen, random = FORMATS[name], np.random.default_rng(len(name))
    whole = chosen.encode(np.random.default_rng(1).standard_normal((64, 256), np.float32))
    outcomes = {"refused": 0, "loaded": 0}
    for turn in range(ROUNDS):
        tensors = {f"a.{kind}": np.ascontiguousarray(array) for kind, array in whole.items()}
        victim = sorted(tensors)[random.integers(len(tensors))]
        replaced = damaged(tensors.pop(victim), random)
        if replaced is not None:
            tensors[victim] = np.ascontiguousarray(replaced)
        outcomes[outcome(tmp_path / f"{turn}.safetensors", {chosen.field: chosen.settings}, tensors)] += 1
    assert outcomes["refused"] > ROUNDS / 4, outcomes


def outcome(path: Path, config: dict, tensors: dict[str, np.ndarray]) -> str:
    save_file(tensors, path)
    try:
        source = unquantized(json.loads(json.dumps(config)), SafetensorsSource(path))[1]
        for name in source.names():
            info = source.info(name)
            if name == "a.weight" and len(info.shape) == 2:
                assert source.array(name).shape == tuple(info.shape)
                source.raw(name)
    except KvasirError as error:
        assert str(error)
        return "refused"
    return "loaded"
