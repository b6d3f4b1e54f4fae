"""The normalisation layers, against their formulas in float64."""

import pytest
import torch

from kvasir.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from kvasir.layers.tensors import TensorPlace
from tests.layers.parts import fill, randn

EPS = 1e-5


@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 48)])
def test_rms_norm_divides_by_the_root_mean_square(shape):
    norm, x = RMSNorm(48, EPS), randn(*shape, seed=9)
    weight = fill(norm)["weight"].double()
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 48)])
def test_layer_norm_matches_torch(shape):
    norm, x = LayerNorm(48, EPS), randn(*shape, seed=9) + 3.0
    tensors = fill(norm)
    assert tensors.keys() == {"weight", "bias"}
    expected = torch.nn.functional.layer_norm(x, (48,), tensors["weight"], tensors["bias"], EPS)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_an_offset_norm_is_a_norm_of_the_weight_plus_one(stored):
    offset, plain, x = OffsetRMSNorm(48, EPS), RMSNorm(48, EPS), randn(7, 48)
    weight = randn(48, seed=3).to(stored)
    offset.put("weight", weight, TensorPlace(stored))
    plain.put("weight", weight.float() + 1.0, TensorPlace(stored))
    assert torch.equal(offset(x), plain(x))


@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm, LayerNorm])
def test_weights_of_norms_are_float32_whatever_the_dtype(kind):
    norm = kind(48, EPS)
    for name, shape in norm.expects().items():
        kept = norm.put(name, torch.ones(shape, dtype=torch.bfloat16), TensorPlace(torch.bfloat16))
        assert kept.dtype == torch.float32 and kept.shape == shape


def test_a_row_is_normalised_as_if_alone():
    norm, x = RMSNorm(48, EPS), randn(9, 48)
    fill(norm)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
