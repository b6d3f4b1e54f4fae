"""The two kinds of MLP, against torch."""

import pytest
import torch
import torch.nn.functional as F

from kvasir.layers.mlp import MLP, GatedMLP
from tests.layers.parts import fill, on_ranks, randn

WIDTH, INNER = 64, 128
X = randn(32, WIDTH, seed=7)
ACTS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp_multiplies_the_activated_gate_with_up(act, bias):
    mlp = GatedMLP(WIDTH, INNER, act, bias)
    t = fill(mlp)
    gate, up = (F.linear(X, t[f"gate_up.{n}.weight"], t.get(f"gate_up.{n}.bias")) for n in ("gate", "up"))
    expected = F.linear(ACTS[act](gate) * up, t["down.weight"], t.get("down.bias"))
    torch.testing.assert_close(mlp(X, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_mlp_activates_up(act, bias):
    mlp = MLP(WIDTH, INNER, act, bias)
    t = fill(mlp)
    expected = F.linear(ACTS[act](F.linear(X, t["up.weight"], t.get("up.bias"))), t["down.weight"], t.get("down.bias"))
    torch.testing.assert_close(mlp(X, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [GatedMLP, MLP])
def test_an_unknown_activation_is_refused(kind):
    with pytest.raises(KeyError, match="cubic"):
        kind(WIDTH, INNER, "cubic")


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", [GatedMLP, MLP])
def test_ranks_that_share_an_mlp_compute_what_one_does(kind, size):
    whole = kind(WIDTH, INNER, bias=True)
    fill(whole)
    for found in on_ranks(size, lambda: kind(WIDTH, INNER, bias=True), lambda mlp: mlp(X, None)):
        torch.testing.assert_close(found, whole(X, None), rtol=1e-5, atol=1e-5)


def test_an_mlp_that_is_left_out_holds_no_rows():
    mlp = GatedMLP(WIDTH, INNER)
    mlp.leave_out()
    shapes = [leaf.shard(name).shape for _, leaf in mlp.walk() for name in leaf.expects()]
    assert len(shapes) == 3 and all(rows == 0 for rows, _ in shapes)
