import pytest
import torch

from kvasir.ops import native
from kvasir.ops.norm import layer_norm, rms_norm
from kvasir.ops.norm.body import tree_sum

WIDTHS = (1, 2, 3, 8, 64, 100, 172, 1023, 1024)
# float32: sums of up to 1024 squares by halving lose at most about 10 roundings of 6e-8.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def implementations(op):
    found = [pytest.param(op.body, id="torch")]
    for impl in op.impls:
        usable = impl.on == "cpu" and (impl.name != "native" or native.available())
        found += [pytest.param(impl.function, id=impl.name)] if usable else []
    return found


def sample(width: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(n, width, generator=generator) for n in (rows, 1, 1))
    return x * 3 + 1, weight[0], bias[0]


@pytest.mark.parametrize("norm", implementations(rms_norm))
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(norm, width):
    x, weight, _ = sample(width)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(norm(x, weight, 1e-5).double(), exact, **CLOSE)


@pytest.mark.parametrize("norm", implementations(rms_norm))
def test_rms_norm_of_heads_and_of_strided_rows(norm):
    x, weight, _ = sample(16, rows=24)
    heads = x.view(4, 6, 16)
    assert torch.equal(norm(heads, weight, 1e-5).view(24, 16), norm(x, weight, 1e-5))
    assert torch.equal(norm(heads.transpose(0, 1), weight, 1e-5), norm(heads, weight, 1e-5).transpose(0, 1))


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width):
    x, weight, bias = sample(width)
    exact = torch.nn.functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", implementations(rms_norm))
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_depends_on_itself_alone(norm, width):
    x, weight, _ = sample(width, rows=7)
    x[3] = torch.nan
    together = norm(x, weight, 1e-5)
    for row in (0, 2, 6):
        assert torch.equal(together[row], norm(x[row : row + 1], weight, 1e-5)[0])


def test_the_tree_is_a_tree():
    """The order of additions is the one that is written down: halves onto halves."""
    x = torch.tensor([[1e8, 1.0, -1e8, 1.0]])
    assert float(tree_sum(x)) == 2.0  # (1e8 - 1e8) + (1 + 1); from left to right it would be 1
    assert tree_sum(torch.ones(2, 3, 5)).shape == (2, 3, 1)
