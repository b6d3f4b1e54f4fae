"""Frequencies against transformers' own; the table against its definition."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvasir.layers.elementary import sin_cos
from kvasir.layers.rope import PIECE, Angles, Rope, RopeScaling, frequencies
from kvasir.layers.rope_tensors import AngleTensors, angles_of

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


def test_rope_factors_divide_the_frequencies():
    factors = tuple(np.linspace(1, 8, 32))
    found = frequencies(64, 500000.0, RopeScaling("factors", factors=factors))
    np.testing.assert_allclose(found * factors, PLAIN)


@dataclass
class Positions:
    start: int
    end: int


def rows(rope: Rope, positions: list[int], *spans: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return angles_of(rope, torch.tensor(positions), [Positions(*span) for span in spans])


def test_rows_depend_on_their_positions_alone():
    """However far the table reaches; with 7 digits far out, where float32 angles would have none."""
    small, large = Rope(64, 10000.0), Rope(64, 10000.0)
    near = ([3, 0, 1023], (0, 4), (1000, 1024))
    cos, sin = rows(large, [130001, 3], (130001, 130002), (3, 4))
    for a, b in zip(rows(small, *near), rows(large, *near), strict=True):
        assert torch.equal(a, b)
    angles = 130001 * frequencies(64, 10000.0, RopeScaling())
    np.testing.assert_allclose(cos[0].numpy(), np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin[0].numpy(), np.sin(angles), atol=1e-7)


def test_a_step_computes_the_pieces_that_its_tokens_lie_in_and_no_others(monkeypatch):
    """Not twice as many as all before: that took seconds in the middle of an answer."""
    computed = []

    def count(angles):
        computed.append(len(angles))
        return sin_cos(angles)

    monkeypatch.setattr("kvasir.layers.rope.sin_cos", count)
    table, rope = Angles(Rope(8, 10000.0), 1 << 20), Rope(8, 10000.0)
    assert computed == [PIECE], "the start computes one"
    at = table.cos.ctypes.data, table.sin.ctypes.data
    for start, end, pieces in [(65535, 65536, 1), (65536, 65537, 1), (65537, 65538, 0), (700, 1300, 4), (0, 1024, 1)]:
        computed.clear()
        table.fill(start, end)
        assert computed == [PIECE] * pieces
    whole = rope.table(0, 1500)
    table.fill(0, 1500)
    assert table.until == 6 * PIECE
    assert np.array_equal(table.cos[:1500], whole[0]) and np.array_equal(table.sin[:1500], whole[1])
    assert at == (table.cos.ctypes.data, table.sin.ctypes.data)
    table.fill((1 << 20) - 1, 1 << 20)


def test_the_last_piece_may_be_short():
    table = Angles(Rope(8, 10000.0), PIECE + 3)
    table.fill(PIECE, PIECE + 3)
    assert table.until == PIECE + 3
    assert np.array_equal(table.cos, Rope(8, 10000.0).table(0, PIECE + 3)[0])


def test_tensors_of_the_host_are_the_memory_of_the_tables():
    tensors, angles = AngleTensors(Rope(8, 10000.0), 2 * PIECE, "cpu"), Angles(Rope(8, 10000.0), 2 * PIECE)
    tensors.fill(0, 2 * PIECE)
    assert angles.fill(0, 2 * PIECE) == [slice(PIECE, 2 * PIECE)]
    assert np.array_equal(tensors.cos.numpy(), angles.cos) and np.array_equal(tensors.sin.numpy(), angles.sin)


def test_tensors_elsewhere_get_every_row_that_is_computed(monkeypatch):
    """The rows that a table computes when it is made, too. A device without values (meta) shows which are copied."""
    copied = set()
    monkeypatch.setattr(AngleTensors, "_copy", lambda self, rows: copied.update(range(rows.start, rows.stop)))
    tensors = AngleTensors(Rope(8, 10000.0), 4 * PIECE, "meta")
    for start, end in [(0, 3), (PIECE - 1, PIECE + 1), (5, PIECE), (3 * PIECE, 3 * PIECE + 1)]:
        tensors.fill(start, end)
        assert copied >= set(range(start, end))
