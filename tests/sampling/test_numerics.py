"""exp, log, sums and orders: right, and the same whatever surrounds an element."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.sampling import numerics
from kvasir.sampling.numerics import best_ids, centred, first_at, log, log_weight, total_weight, weights
from tests.sampling import oracle

ROW = st.lists(st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 1.0, 1.5, 2.0, math.inf]), min_size=1, max_size=300)


def test_weights_are_rounded_exponentials():
    z = -np.concatenate([[0.0, 700.0, math.inf], np.random.default_rng(0).uniform(0, 40, 20_000)])
    exact = np.exp(z) * 2.0**40
    error = np.abs(weights(torch.from_numpy(z)).numpy() - exact)
    assert (error <= 0.5 + exact * 1e-11).all()
    assert weights(torch.tensor([0.0, -math.inf], dtype=torch.float64)).tolist() == [2**40, 0]


def test_log_is_right_over_its_range_and_near_one():
    rng = np.random.default_rng(1)
    x = np.concatenate([np.exp(rng.uniform(-700, 700, 20_000)), 1 + rng.uniform(-1e-6, 1e-6, 1000), [1.0, 2.0**-33]])
    x = np.concatenate([x, 1.0 - np.array([2.0**-33, 2.0**-32, 0.25, 0.5])])
    exact = np.log(x)
    error = np.abs(log(torch.from_numpy(x)).numpy() - exact)
    assert (error <= 4e-16 * np.abs(exact)).all()


@pytest.mark.parametrize("function", [weights, log])
def test_an_element_has_the_same_bits_anywhere(function):
    x = torch.rand(4099, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.01
    x = -8 * x if function is weights else x
    whole = function(x)
    for offset in range(9):
        for width in (1, 3, 7, 8, 31, 64, 513):
            part = function(x[offset : offset + width])
            assert torch.equal(part, whole[offset : offset + width])
    assert torch.equal(function(x[::3]), whole[::3])
    assert torch.equal(function(x.expand(5, -1)), whole.expand(5, -1))


def test_sums_do_not_depend_on_pieces_or_rows(monkeypatch):
    x = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(3)) * 4
    peak = x.amax(-1, keepdim=True)
    alone = torch.cat([total_weight(x[i : i + 1], peak[i : i + 1], 0.7) for i in range(7)])
    for piece in (1 << 10, 1 << 13, 1 << 30):
        monkeypatch.setattr(numerics, "PIECE", piece)
        assert torch.equal(total_weight(x, peak, 0.7), alone)
    expected = torch.logsumexp((x.double() - peak) * 0.7, -1, keepdim=True)
    assert torch.allclose(log_weight(alone), expected, rtol=0, atol=1e-9)


@given(ROW)
def test_orders_are_those_of_python(values):
    x = torch.tensor([values, values[::-1]], dtype=torch.float32)
    for row, listed in zip(x.tolist(), best_ids(x, len(values)).tolist(), strict=True):
        assert listed == oracle.order(row)
    for k in {1, (len(values) + 1) // 2}:
        assert best_ids(x, k).tolist() == best_ids(x, len(values))[:, :k].tolist()
    assert first_at(x, x.amax(-1, keepdim=True)).tolist() == best_ids(x, 1)[:, 0].tolist()


def test_order_of_random_rows_and_wide_ties():
    x = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(4)).mul(8).round() / 8
    assert best_ids(x, 40_000).tolist() == [oracle.order(row) for row in x.tolist()]
    flat = torch.zeros(2, 152_064)
    assert best_ids(flat, 2000).tolist() == [list(range(2000))] * 2
    assert first_at(flat, flat[:, :1]).tolist() == [0, 0]


def test_centred_gives_all_to_infinity():
    x = torch.tensor([[1.0, math.inf, -math.inf, math.inf], [1.0, 3.0, -math.inf, 2.0]])
    z = centred(x, x.amax(-1, keepdim=True))
    assert weights(z)[0].tolist() == [0, 2**40, 0, 2**40]
    assert z[1].tolist() == [-2.0, 0.0, -math.inf, -1.0]
