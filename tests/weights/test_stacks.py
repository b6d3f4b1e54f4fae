"""Stacks of experts' matrices, as separate tensors."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.errors import ModelFileError
from kvasir.weights.source import SafetensorsSource
from kvasir.weights.stacks import ExpertsView

E, INNER, WIDTH = 3, 4, 5
UP = np.arange(E * 2 * INNER * WIDTH, dtype=np.float32).reshape(E, 2 * INNER, WIDTH)
DOWN = -np.arange(E * WIDTH * INNER, dtype=np.float32).reshape(E, WIDTH, INNER)


def view(folder, transposed=False, **stacks):
    tensors = {f"layers.0.mlp.experts.{name}": array for name, array in stacks.items()}
    save_file({**tensors, "norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    return ExpertsView(SafetensorsSource(folder / "model.safetensors"), transposed)


def test_each_matrix_has_its_own_name(tmp_path):
    source = view(tmp_path, gate_up_proj=UP, down_proj=DOWN)
    assert len(list(source.names())) == 3 * E + 1
    for expert in range(E):
        matrices = {"gate_proj": UP[expert, :INNER], "up_proj": UP[expert, INNER:], "down_proj": DOWN[expert]}
        for part, matrix in matrices.items():
            name = f"layers.0.mlp.experts.{expert}.{part}.weight"
            info = source.info(name)
            assert (info.name, info.shape, info.nbytes, info.dtype) == (name, matrix.shape, matrix.nbytes, "F32")
            np.testing.assert_array_equal(source.array(name), matrix)
            assert source.raw(name).tobytes() == matrix.tobytes()
            source.drop(name)
    np.testing.assert_array_equal(source.array("norm.weight"), np.ones(2))
    assert source.raw("norm.weight").tobytes() == np.ones(2, np.float32).tobytes()
    assert source.info("norm.weight").shape == (2,)
    source.drop("norm.weight")
    source.close()


def test_transposed_stacks_have_gate_and_up_in_turns(tmp_path):
    biases = {"gate_up_proj_bias": UP[:, :, 0].copy(), "down_proj_bias": DOWN[..., 0].copy()}
    up, down = np.ascontiguousarray(UP.swapaxes(1, 2)), np.ascontiguousarray(DOWN.swapaxes(1, 2))
    source = view(tmp_path, True, gate_up_proj=up, down_proj=down, **biases)
    for expert in range(E):
        parts = {"gate_proj": UP[expert, ::2], "up_proj": UP[expert, 1::2], "down_proj": DOWN[expert]}
        for part, matrix in parts.items():
            name = f"layers.0.mlp.experts.{expert}.{part}"
            info = source.info(f"{name}.weight")
            assert (info.shape, info.nbytes) == (matrix.shape, matrix.nbytes)
            np.testing.assert_array_equal(source.array(f"{name}.weight"), matrix)
            assert source.raw(f"{name}.weight").tobytes() == matrix.tobytes()
            assert source.info(f"{name}.bias").shape == matrix.shape[:1]
            np.testing.assert_array_equal(source.array(f"{name}.bias"), matrix[:, 0])
            assert source.raw(f"{name}.bias").tobytes() == matrix[:, 0].tobytes()
    source.close()


@pytest.mark.parametrize("bad", [
    {"down_proj_bias": np.zeros(3, np.float32)},
    {"down_proj": np.zeros((2, 3), np.float32)},
    {"down_proj": np.zeros((0, 3, 2), np.float32)},
    {"down_proj": np.zeros((5000, 1, 1), np.float32)},
    {"gate_up_proj": np.zeros((2, 3, 4), np.float32)},
])  # fmt: skip
def test_a_stack_of_a_bad_shape_is_refused(tmp_path, bad):
    with pytest.raises(ModelFileError, match=r"expected a stack of at most 4096 (matrices|vectors)"):
        view(tmp_path, **bad)
