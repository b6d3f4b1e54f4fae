"""The Triton norms against the torch bodies."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.ops.norm.body import layer_norm, rms_norm
from kvasir.ops.norm.triton import join_norm, norm

EPS = 1e-5


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tree(parts: torch.Tensor) -> torch.Tensor:
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


@given(
    segments=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 3),
    width=st.integers(1, 70),
    with_bias=st.booleans(),
    with_post=st.booleans(),
    with_norm_bias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_join_norm_equals_the_torch_bodies(segments, rows, width, with_bias, with_post, with_norm_bias):
    parts, residual = _random(segments, rows, width), _random(rows, width, seed=1)
    bias, post, weight, shift = (_random(width, seed=seed) for seed in (2, 3, 4, 5))
    expected = _tree(parts)
    if with_bias:
        expected = expected + bias
    if with_post:
        expected = rms_norm(expected, post, EPS)
    expected = residual + expected
    normed = layer_norm(expected, weight, shift, EPS) if with_norm_bias else rms_norm(expected, weight, EPS)
    out = torch.full((rows, width), torch.nan)
    join_norm(
        parts, residual, weight, out, EPS,
        bias=bias if with_bias else None,
        post_weight=post if with_post else None,
        norm_bias=shift if with_norm_bias else None,
    )  # fmt: skip
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, normed, rtol=1e-4, atol=1e-4)


def test_sum_without_a_norm_is_bitwise_that_of_torch():
    parts, residual = _random(8, 3, 33), _random(3, 33, seed=1)
    expected = residual + _tree(parts)
    join_norm(parts, residual, None, None, EPS)
    assert torch.equal(residual, expected)


def test_sum_without_a_norm_is_rounded_into_out():
    parts, out = _random(2, 3, 33), torch.empty(3, 33, dtype=torch.bfloat16)
    join_norm(parts, None, None, out, EPS)
    assert torch.equal(out, _tree(parts).bfloat16())


def test_total_receives_the_sum_and_the_residual_stays():
    parts, residual, total = _random(4, 2, 20), _random(2, 20, seed=1), torch.empty(2, 20)
    before = residual.clone()
    join_norm(parts, residual, None, None, EPS, total=total)
    assert torch.equal(residual, before)
    assert torch.equal(total, residual + _tree(parts))


def test_without_parts_the_residual_is_normed():
    residual, weight, out = _random(3, 40), _random(40, seed=1), torch.empty(3, 40)
    before = residual.clone()
    join_norm(None, residual, weight, out, EPS)
    assert torch.equal(residual, before)
    torch.testing.assert_close(out, rms_norm(residual, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_is_rounded_to_nearest_even(dtype):
    parts, weight = _random(1, 4, 300), torch.ones(300)
    exact, out = torch.empty(4, 300), torch.empty(4, 300, dtype=dtype)
    join_norm(parts, None, weight, exact, EPS)
    join_norm(parts, None, weight, out, EPS)
    assert torch.equal(out, exact.to(dtype))


def test_bits_of_a_row_do_not_depend_on_the_batch():
    parts, residual, weight = _random(4, 5, 50), _random(5, 50, seed=1), _random(50, seed=2)
    together, out = residual.clone(), torch.empty(5, 50)
    join_norm(parts, together, weight, out, EPS)
    for row in range(5):
        alone, out_alone = residual[row : row + 1].clone(), torch.empty(1, 50)
        join_norm(parts[:, row : row + 1].contiguous(), alone, weight, out_alone, EPS)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(out_alone[0], out[row])


def test_non_finite_row_does_not_reach_others():
    residual, weight, out = _random(3, 24), _random(24, seed=1), torch.empty(3, 24)
    residual[1] = torch.nan
    join_norm(None, residual, weight, out, EPS)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_rows_that_lie_apart(dtype):
    x, weight, bias = _random(6, 40).to(dtype), _random(24, seed=1), _random(24, seed=2)
    out = torch.empty(6, 24)
    norm(x[:, 8:32], weight, out, EPS)
    torch.testing.assert_close(out, rms_norm(x[:, 8:32].float(), weight, EPS), rtol=1e-5, atol=1e-5)
    norm(x[:, 8:32], weight, out, EPS, bias)
    torch.testing.assert_close(out, layer_norm(x[:, 8:32].float(), weight, bias, EPS), rtol=1e-4, atol=1e-4)


def test_norm_without_weights():
    x, out = _random(5, 24), torch.full((5, 24), torch.nan)
    norm(x, None, out, EPS)
    torch.testing.assert_close(out, rms_norm(x, torch.ones(24), EPS), rtol=1e-5, atol=1e-5)


def test_norm_in_place():
    x, weight = _random(5, 16), _random(16, seed=1)
    expected = rms_norm(x, weight, EPS)
    norm(x, weight, x, EPS)
    torch.testing.assert_close(x, expected)


def test_groups_have_weights_of_their_own():
    x, weight = _random(6, 33), _random(3, 33, seed=1)
    out = torch.full((6, 33), torch.nan)
    norm(x, weight.flatten(), out, EPS, groups=3)
    expected = rms_norm(x.view(2, 3, 33), weight, EPS).view(6, 33)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
