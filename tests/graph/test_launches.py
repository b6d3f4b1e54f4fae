"""How many launches a step of a model makes, and how many bytes they move. Nothing runs: the tensors have no memory."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from tests.compiled.shapes import SHAPES, forward_of, launches_of, model_of

PER_LAYER = 8
BEFORE, AFTER = 4, 3  # expand, plan, embedding, first norm; the last norm is the last layer's; choose, head, and so on


@pytest.mark.parametrize("bucket", [1, 32, 512])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dense_layer_makes_eight_launches(shape, bucket):
    few, more = (launches_of(forward_of(shape, "bfloat16", layers), bucket) for layers in (2, 5))
    assert len(more.rows) - len(few.rows) == 3 * PER_LAYER
    assert len(few.rows) == 2 * PER_LAYER + BEFORE
    assert len(few.chosen) == len(more.chosen) == 2  # takes the chosen rows; their logits


def test_each_launch_of_a_layer_has_its_place():
    counts = Counter(launch.name for launch in launches_of(forward_of("8B", "bfloat16", 3), 1).rows)
    # The output and down projections have more segments than fill a device: each program joins two.
    assert counts["_product"] == 3 and counts["_whole"] == 3 * 2 and counts["_gated"] == 3 and counts["_attend"] == 3
    assert counts["_rope_store"] == 3 and counts["_join_norm"] == 3 * 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_one_row_moves_little_more_than_the_weights(shape):
    model = model_of(shape, "bfloat16", layers=4)
    weights = sum(matrix.nbytes for layer in model.layers for matrix in held(layer))
    found = launches_of(forward_of(shape, "bfloat16", 4), 1)
    layers = [launch for launch in found.rows if launch.name not in ("_lookup", "expand_kernel", "_plan")]
    moved = sum(launch.bytes for launch in layers)
    assert weights <= moved < 1.02 * weights


def test_the_step_of_a_sum_depends_on_the_matrix_alone():
    forward, steps = forward_of("8B", "bfloat16", 1), {}
    for bucket in (1, 16, 64, 128, 512):
        for launch in launches_of(forward, bucket).rows:
            if launch.name in ("_product", "_whole", "_gated"):
                steps.setdefault(launch.args[2].shape, set()).add(launch.constants["BLOCK_K"])
    assert len(steps) == 4 and all(len(found) == 1 for found in steps.values())


def held(layer):
    """The matrices of a layer."""
    attn, mlp = layer.attn, layer.mlp
    return [matrix for linear in (attn.qkv, attn.out, mlp.gate_up, mlp.down) for matrix in linear.weights.values()]
