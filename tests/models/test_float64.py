"""Families whose models of random weights enlarge roundings: in float64 they agree with transformers."""

from copy import deepcopy

import pytest
import torch

from tests.models.driver import logits_of
from tests.models.oracle import TOLERANCE, distance, ours, random_ids, state_of
from tests.models.test_against_transformers import LENGTH, oracle, reference_logits
from tests.models.wide import float64


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "most"), [("zamba2-blocks", 1e-10), ("zamba2", TOLERANCE)])
def test_logits_agree_in_float64(transformers, name, most):
    """The second has rotary embeddings, whose tables have float32."""
    model, ids = oracle(transformers, name), random_ids(LENGTH, 96)
    config, state = model.config.to_dict(), state_of(model)
    rounded = reference_logits(model, ids)
    with float64():
        expected = reference_logits(deepcopy(model).double(), ids)
        logits = logits_of(ours(config, state, torch.float64), ids)
    assert logits.dtype == torch.float64 and distance(logits, expected) < most
    assert distance(rounded, expected) > TOLERANCE, "then float32 could be compared as that of other families"
