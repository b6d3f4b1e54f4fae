"""Frequencies against transformers' own; the table against its definition."""

import math

import numpy as np
import pytest
import torch

from kvasir.layers.rope import Rope, RopeScaling, frequencies

PLAIN = 500000.0 ** (-np.arange(0, 64, 2) / 64)
KINDS = {
    "default": (RopeScaling(), {}),
    "linear": (RopeScaling("linear", 4.0), {"factor": 4.0}),
    "llama3": (
        RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        RopeScaling("yarn", 4.0, 32768, attention_factor=0.1 * math.log(4) + 1),
        {"factor": 4.0, "original_max_position_embeddings": 32768},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind):
    pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = KINDS[kind]
    if kind == "default":
        expected, factor = PLAIN, 1.0
    else:
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters={"rope_type": kind, "rope_theta": 500000.0, **theirs},
        )
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    np.testing.assert_allclose(frequencies(64, 500000.0, ours), np.asarray(expected), rtol=2e-6)
    assert Rope(64, 500000.0, ours).factor == pytest.approx(factor)


def test_dynamic_is_the_plain_one_up_to_the_trained_length():
    plain = frequencies(64, 500000.0, RopeScaling())
    np.testing.assert_allclose(plain, PLAIN, rtol=1e-15)
    np.testing.assert_array_equal(frequencies(64, 500000.0, RopeScaling("dynamic", 4.0)), plain)


def test_factors_divide():
    factors = tuple(np.linspace(1, 8, 32))
    found = frequencies(64, 500000.0, RopeScaling("factors", factors=factors))
    np.testing.assert_allclose(found * factors, PLAIN)


def test_rows_depend_on_their_positions_alone():
    """However far the table has grown; with 7 digits far out, where float32 angles would have none."""
    small, large = Rope(64, 10000.0), Rope(64, 10000.0)
    near = torch.tensor([3, 0, 1023])
    far = torch.tensor([130001, 3])
    cos, sin = large.rows(far, 130002)
    for a, b in zip(small.rows(near, 1024), large.rows(near, 1024), strict=True):
        assert torch.equal(a, b)
    angles = 130001 * frequencies(64, 10000.0, RopeScaling())
    np.testing.assert_allclose(cos[0].numpy(), np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin[0].numpy(), np.sin(angles), atol=1e-7)
