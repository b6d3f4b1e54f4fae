"""Settings of layers that few families use: as programs, and refused by the graph executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvasir.graph.fold import fold
from kvasir.layers.moe import MoE
from kvasir.ops import native
from kvasir.ops.graph import CannotTrace
from kvasir.program.trace import trace
from tests.models.driver import logits_of
from tests.program.made import Driver, loaded, program_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
IDS = np.random.default_rng(3).integers(0, 96, 60).tolist()


@pytest.mark.parametrize("scores", ["sqrt_softplus", "softmax"])
def test_experts_chosen_by_other_scores(tmp_path, scores):
    """The selection bias of the family decides, too."""
    from kvasir.layers.tensors import TensorPlace
    from kvasir.models.registry import model_class_for
    from kvasir.runner.load import open_checkpoint
    from kvasir.weights.find import find_model
    from kvasir.weights.load import fill

    model = loaded("minimax-m2", tmp_path)
    config, source = open_checkpoint(find_model(tmp_path))
    kind = model_class_for(config)
    eager = kind(kind.Config.from_hf(config))
    fill(eager, source, TensorPlace(torch.float32))
    for one in (model.model, eager):
        for _, part in one.walk():
            if isinstance(part, MoE):
                part.routing = replace(part.routing, scores=scores)
    plain = Driver(program_of(model), IDS).logits(0, 60)
    found = Driver(program_of(replace(model, trace=trace(model.model))), IDS).logits(0, 60)
    expected = logits_of(eager, IDS).numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(found - plain).max() > 1e-2 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("family", "what"),
    [("olmo", "without weights"), ("cohere", "of each head"), ("apertus", "xielu"), ("phimoe", "softmax")],
)
def test_the_graph_executor_refuses_them_by_name(tmp_path, family, what):
    with pytest.raises(CannotTrace, match=what):
        fold(trace(loaded(family, tmp_path).model))
