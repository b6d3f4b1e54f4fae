"""The Triton elementwise ops against the torch bodies."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.ops.activation import body
from kvasir.ops.activation.triton import elementwise

SHAPE = (3, 37)

# exp may be infinite, and the result right
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_activations(name):
    x, out = _random(*SHAPE), torch.full(SHAPE, torch.nan)
    elementwise(name, x, None, out)
    torch.testing.assert_close(out, getattr(body, name)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(cap):
    x, out = 100.0 * _random(*SHAPE), torch.full(SHAPE, torch.nan)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, 0.0])
    elementwise("softcap", x, None, out, cap)
    torch.testing.assert_close(out, body.softcap(x, cap), rtol=1e-5, atol=1e-6)


def test_exact_ops_are_bitwise_those_of_torch():
    x, y, vector = _random(*SHAPE), _random(*SHAPE, seed=1), _random(SHAPE[1], seed=2)
    for op, other, expected in [("add", y, x + y), ("multiply", y, x * y), ("add_vector", vector, x + vector)]:
        out = torch.full(SHAPE, torch.nan)
        elementwise(op, x, other, out)
        assert torch.equal(out, expected)
    elementwise("scale", x, None, out, 0.3)
    assert torch.equal(out, x * torch.tensor(0.3))


def test_in_place_across_several_programs():
    x = _random(40, 77)
    expected = x + x
    elementwise("add", x, x, x)
    assert torch.equal(x, expected)


def test_nan_stays_and_reaches_no_other_element():
    x = _random(*SHAPE)
    x[1, 5] = torch.nan
    for name in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "softcap"):
        out = torch.full(SHAPE, torch.nan)
        elementwise(name, x, None, out, 2.0)
        assert out.isnan().sum() == 1
        assert out[1, 5].isnan()
