"""Norms of heads, stored one by one, as one tensor."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.errors import ModelFileError
from kvasir.weights.head_norms import HeadNormsView
from kvasir.weights.source import SafetensorsSource

NAME = "model.layers.0.self_attn.q_layernorm"


def view(folder, heads: dict[int, np.ndarray]) -> HeadNormsView:
    tensors = {f"{NAME}.norms.{i}.weight": array for i, array in heads.items()}
    save_file({**tensors, "norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    return HeadNormsView(SafetensorsSource(folder / "model.safetensors"))


def test_the_heads_are_rows_in_their_order(tmp_path):
    rows = np.arange(12 * 4, dtype=np.float32).reshape(12, 4)
    source = view(tmp_path, dict(enumerate(rows)))
    name = f"{NAME}.weight"
    assert set(source.names()) == {name, "norm.weight"}
    assert np.array_equal(source.array(name), rows)
    assert source.info(name).shape == (12, 4) and source.info(name).nbytes == rows.nbytes
    assert np.array_equal(source.raw(name), rows.view(np.uint8))
    assert np.array_equal(source.array("norm.weight"), np.ones(2))
    source.drop(name)


@pytest.mark.parametrize(
    "heads",
    [
        {0: np.ones(4, np.float32), 2: np.ones(4, np.float32)},
        {0: np.ones(4, np.float32), 1: np.ones(3, np.float32)},
        {0: np.ones(4, np.float32), 1: np.ones(4, np.float16)},
        {0: np.ones((2, 2), np.float32)},
    ],
)
def test_parts_that_are_no_heads_are_refused(tmp_path, heads):
    with pytest.raises(ModelFileError, match="q_layernorm"):
        view(tmp_path, heads)
