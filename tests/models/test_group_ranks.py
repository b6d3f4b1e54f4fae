"""Ranks of a process group on the eager executor: over gloo, the bits of a model alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvasir.runner.load import load_model
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.models.test_ranks import hidden
from tests.parallel.test_group import of_group, same


@pytest.mark.slow
@pytest.mark.usefixtures("exact_machine")
@pytest.mark.parametrize(("kind", "size"), [("mixtral", 2), ("qwen3-next", 2), ("llama", 4)])
def test_models_over_gloo(tmp_path, kind, size):
    (tmp_path / "model").mkdir()
    folder = random_model(kind, tmp_path / "model")
    expected = hidden(load_model(find_model(folder), "float32").model)
    assert same(of_group(size, "gloo", tmp_path, folder), [[expected]] * size)
