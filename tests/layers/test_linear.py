import pytest
import torch

from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import QKV, Down, GateUp, Head, Out, Plain
from kvasir.layers.module import Module
from kvasir.layers.tensors import TensorPlace

CPU = torch.device("cpu")
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("width", "segments"),
    [(4096, 8), (1024, 8), (896, 4), (384, 4), (256, 8), (128, 4), (64, 2), (172, 4), (100, 4), (48, 2), (31, 1)],
)
def test_the_number_of_segments_of_a_reducing_linear(width, segments):
    """A power of two that divides the width, into whole groups of 32 where that can be."""
    assert Down(width, 1).segments == segments


def fill(linear, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in linear.expects().items()}
    for name, tensor in tensors.items():
        linear.put(name, tensor, TensorPlace(dtype))
    return tensors


def expected(tensors: dict[str, torch.Tensor], prefix: str = "") -> torch.Tensor:
    return torch.nn.functional.linear(X, tensors[f"{prefix}weight"], tensors.get(f"{prefix}bias"))


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("role", (Plain, Out, Down, Head))
def test_roles_of_one_part(role, bias):
    linear = role(64, 40, bias)
    tensors = fill(linear)
    assert tensors.keys() == ({"weight", "bias"} if bias else {"weight"})
    torch.testing.assert_close(linear(X, None), expected(tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", (False, True))
def test_roles_of_several_parts(bias):
    qkv, gate_up = QKV(64, 48, 16, bias), GateUp(64, 24, bias)
    for linear, names in ((qkv, ("q", "k", "v")), (gate_up, ("gate", "up"))):
        tensors = fill(linear)
        for out, name in zip(linear(X, None), names, strict=True):
            torch.testing.assert_close(out, expected(tensors, f"{name}."), rtol=1e-5, atol=1e-5)


def test_a_weight_of_the_right_type_is_not_copied():
    """No copy of a mapped file for roles without segments."""
    weight = torch.randn(40, 64)
    assert Plain(64, 40).put("weight", weight, TensorPlace(torch.float32)).data_ptr() == weight.data_ptr()
    table = Embedding(40, 64)
    assert table.put("weight", weight, TensorPlace(torch.float32)).data_ptr() == weight.data_ptr()
    head = Head(64, 40, tied=table)
    assert head.expects() == {}
    assert head.weight.data_ptr() == weight.data_ptr()
    assert torch.equal(head(X), plain_of(weight)(X))


def plain_of(weight: torch.Tensor) -> Plain:
    plain = Plain(weight.shape[1], weight.shape[0])
    plain.put("weight", weight, TensorPlace(torch.float32))
    return plain


def test_bfloat16_segments_are_filled_up_to_whole_groups():
    down = Down(172, 8)
    tensors = fill(down, torch.bfloat16)
    assert down.weights["weight"].shape == (4, 8, 64)
    assert down.weights["weight"][:, :, 43:].abs().max() == 0
    x = torch.randn(32, 172)
    exact = torch.nn.functional.linear(x, tensors["weight"])
    assert (down(x) - exact).abs().max() < 0.02 * exact.abs().max()


def test_a_tree_of_modules_is_walked_once():
    class Tree(Module):
        def __init__(self):
            self.embed = Embedding(4, 8)
            self.layers = [Plain(8, 8), Plain(8, 4)]
            self.head = Head(8, 4, tied=self.embed)
            self.numbers = [1, 2]

    assert [path for path, _ in Tree().walk()] == ["", "embed", "layers.0", "layers.1", "head"]
