"""Adapters of the eager executor: which matrices they change, and by how much."""

import pytest
import torch

from kvasir.layers.adapters import linears, set_adapter, slots
from kvasir.layers.attention import Attention
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.linear import Head
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module
from kvasir.layers.moe import MoE
from kvasir.ops.moe.routing import Routing
from tests.layers.parts import Part, batch_of, fill, randn

WIDTH, INNER, RANK = 64, 32, 3


class Tree(Module):
    def __init__(self):
        self.attn, self.mlp, self.moe = (
            Attention(0, WIDTH, 4, 2, 16),
            GatedMLP(WIDTH, INNER),
            MoE(WIDTH, INNER, 2, Routing(1)),
        )
        self.head = Head(WIDTH, 10)


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    fill(made)
    return made


@pytest.fixture
def batch():
    """Rows 0 to 2 of no adapter, 3 to 6 of adapter 1, 7 and 8 of adapter 2."""
    cache = KVCache((Tree().attn.cache(),), [4], 16, torch.float32)
    counts = {0: 3, 1: 4, 2: 2}
    parts = [Part([0] * count, 0, [[1 + adapter]], adapter=adapter) for adapter, count in counts.items()]
    return batch_of(parts, cache)


X = randn(32, WIDTH, seed=7)
PAIR = randn(RANK, WIDTH, seed=1), randn(INNER, RANK, seed=2), 0.5


def test_linears_have_their_path_and_the_name_of_their_part(tree):
    found = linears(tree)
    experts = [f"moe.experts.{e}.{n}" for e in range(2) for n in ("gate_up.gate", "gate_up.up", "down")]
    attn = [f"attn.{n}" for n in ("qkv.q", "qkv.k", "qkv.v", "out")]
    assert found.keys() == {*attn, *experts, "mlp.gate_up.gate", "mlp.gate_up.up", "mlp.down", "moe.router"}
    assert found["attn.qkv.v"] == (tree.attn.qkv, "v") and found["mlp.down"] == (tree.mlp.down, "weight")


def test_experts_are_no_slots(tree):
    assert slots(tree).keys() == {name for name in linears(tree) if ".experts." not in name}


def test_an_adapter_changes_its_own_rows_only(tree, batch):
    before = tree.mlp.gate_up(X, batch)
    set_adapter(tree, 1, {"mlp.gate_up.up": PAIR}, torch.from_numpy)
    gate, up = tree.mlp.gate_up(X, batch)
    a, b, scale = PAIR
    assert torch.equal(gate, before[0])
    rest = [*range(3), *range(7, len(X))]
    assert torch.equal(up[rest], before[1][rest])
    torch.testing.assert_close(up[3:7], before[1][3:7] + scale * X[3:7] @ a.T @ b.T, rtol=1e-4, atol=1e-4)


def test_two_adapters_are_the_same_as_each_alone(tree, batch):
    second = *PAIR[:2], -2.0
    alone = []
    for adapter, pair in ((1, PAIR), (2, second)):
        set_adapter(tree, adapter, {"mlp.gate_up.up": pair}, torch.from_numpy)
        alone.append(tree.mlp.gate_up(X, batch)[1])
        set_adapter(tree, adapter, {}, torch.from_numpy)
    set_adapter(tree, 1, {"mlp.gate_up.up": PAIR}, torch.from_numpy)
    set_adapter(tree, 2, {"mlp.gate_up.up": second}, torch.from_numpy)
    both = tree.mlp.gate_up(X, batch)[1]
    assert torch.equal(both[3:7], alone[0][3:7]) and torch.equal(both[7:9], alone[1][7:9])


def test_setting_an_adapter_again_replaces_all_of_its_pairs(tree, batch):
    before = tree.mlp.gate_up(X, batch)
    set_adapter(tree, 1, {"mlp.gate_up.up": PAIR}, torch.from_numpy)
    set_adapter(tree, 1, {"mlp.gate_up.gate": PAIR}, torch.from_numpy)
    gate, up = tree.mlp.gate_up(X, batch)
    assert torch.equal(up, before[1]) and not torch.equal(gate, before[0])
    set_adapter(tree, 1, {}, torch.from_numpy)
    assert torch.equal(tree.mlp.gate_up(X, batch)[0], before[0])


@pytest.mark.parametrize(
    ("adapter", "pairs", "named"),
    [
        (0, {}, "0"),
        (1, {"mlp.sideways": PAIR}, "mlp.sideways"),
        (1, {"moe.experts.0.down": PAIR}, r"moe\.experts\.0\.down"),
        (1, {"mlp.gate_up.up": (PAIR[0][:, :-1], *PAIR[1:])}, r"mlp\.gate_up\.up"),
        (1, {"mlp.gate_up.up": (PAIR[0], PAIR[1].T, 1.0)}, r"mlp\.gate_up\.up"),
    ],
    ids=["id", "slot", "expert", "columns", "transposed"],
)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(tree, batch, adapter, pairs, named):
    before = tree.mlp.gate_up(X, batch)[1]
    with pytest.raises(ValueError, match=named):
        set_adapter(tree, adapter, {"mlp.gate_up.gate": PAIR, **pairs}, torch.from_numpy)
    assert torch.equal(tree.mlp.gate_up(X, batch)[1], before)
    assert not any(held for module, _ in slots(tree).values() for held in module.adapters.values())
