"""The eight kinds of adapters that peft wrote, served without merging, against the logits that peft computed."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.inputs import Adapter
from tests._shared import need
from tests.lora.made import bound
from tests.lora.served import adapted_core, log_probabilities
from tests.lora.test_fixtures import KINDS, base_of, config_of


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("executor", ["eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_peft(kind, executor):
    base = base_of(kind)
    adapter = bound(need("fixtures", "lora", kind), config_of(base))
    core = adapted_core(base, executor, {"x": adapter})
    expected = dict(np.load(need("fixtures", "lora", "expected.npz")))
    wanted = log_softmax(expected[kind])
    got = log_probabilities(core, expected["ids"].tolist(), Adapter("x"))
    assert np.nanmax(np.abs(got - wanted)) < 2e-5
    without = log_probabilities(core, expected["ids"].tolist())
    assert np.nanmax(np.abs(without - wanted)) > 1e-3, "the adapter changes nothing: the comparison says nothing"
