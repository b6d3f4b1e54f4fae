"""Adapters of the eager executor: which matrices they change, and by how much."""

import numpy as np
import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.adapters import factors_of, linears, slots
from kvasir.layers.attention import Attention
from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.linear import Head
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module
from kvasir.layers.moe import MoE
from kvasir.layers.norm import RMSNorm
from kvasir.lora import LowRank, TokenRows
from kvasir.ops.moe.routing import Routing
from kvasir.plan import Adapted
from kvasir.runner.eager_adapters import in_effect
from tests.layers.adapted import adapter_of, adapters_of, in_use, set_adapter
from tests.layers.parts import Part, batch_of, fill, randn

WIDTH, INNER, RANK = 64, 32, 3


class Tree(Module):
    """With one layer of each kind, as a model has them."""

    def __init__(self):
        self.embed, self.norm = VocabularyEmbedding(10, WIDTH), RMSNorm(WIDTH, 1e-5)
        self.attn, self.mlp, self.moe = (
            Attention(0, WIDTH, 4, 2, 16),
            GatedMLP(WIDTH, INNER),
            MoE(WIDTH, INNER, 2, Routing(1)),
        )
        self.head = Head(WIDTH, 10, bias=True)


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    fill(made)
    return made


@pytest.fixture
def batch(tree):
    """Rows 0 to 2 of no adapter, 3 to 6 of adapter 1, 7 and 8 of adapter 2."""
    cache = KVCache((Tree().attn.cache(),), [4], 16, torch.float32)
    counts = {0: 3, 1: 4, 2: 2}
    batch = batch_of([Part([0] * count, 0, [[1 + adapter]]) for adapter, count in counts.items()], cache)
    with in_use(tree, batch, tuple(counts)):
        yield batch


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
    set_adapter(tree, 1, {"mlp.gate_up.up": PAIR})
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
        set_adapter(tree, adapter, {"mlp.gate_up.up": pair})
        alone.append(tree.mlp.gate_up(X, batch)[1])
        set_adapter(tree, adapter, {})
    set_adapter(tree, 1, {"mlp.gate_up.up": PAIR})
    set_adapter(tree, 2, {"mlp.gate_up.up": second})
    both = tree.mlp.gate_up(X, batch)[1]
    assert torch.equal(both[3:7], alone[0][3:7]) and torch.equal(both[7:9], alone[1][7:9])


def test_setting_an_adapter_again_replaces_all_of_its_pairs(tree, batch):
    before = tree.mlp.gate_up(X, batch)
    set_adapter(tree, 1, {"mlp.gate_up.up": PAIR})
    set_adapter(tree, 1, {"mlp.gate_up.gate": PAIR})
    gate, up = tree.mlp.gate_up(X, batch)
    assert torch.equal(up, before[1]) and not torch.equal(gate, before[0])
    set_adapter(tree, 1, {})
    assert torch.equal(tree.mlp.gate_up(X, batch)[0], before[0])


@pytest.mark.parametrize(
    ("adapter", "pairs", "named"),
    [
        (0, {}, "0"),
        (1, {"mlp.sideways": PAIR}, "mlp.sideways"),
        (1, {"mlp.gate_up.up": (PAIR[0][:, :-1], *PAIR[1:])}, r"mlp\.gate_up\.up"),
        (1, {"mlp.gate_up.up": (PAIR[0], PAIR[1].T, 1.0)}, r"mlp\.gate_up\.up"),
    ],
    ids=["id", "slot", "columns", "transposed"],
)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(tree, batch, adapter, pairs, named):
    before = tree.mlp.gate_up(X, batch)[1]
    with pytest.raises(ValueError, match=named):
        set_adapter(tree, adapter, {"mlp.gate_up.gate": PAIR, **pairs})
    assert torch.equal(tree.mlp.gate_up(X, batch)[1], before)
    assert not any(module.changes for _, module in tree.walk())


MINE = slice(3, 7)  # rows of adapter 1
IDS = torch.arange(32) % 10


def weights_of(tree: Tree, path: str, tensor: str) -> torch.Tensor:
    """A copy of a float32 matrix of the tree."""
    leaf = dict(tree.walk())[path]
    return (leaf.weight if hasattr(leaf, "weight") else leaf.weights[tensor]).reshape(-1, WIDTH).clone()


def outcome(tree: Tree, path: str, batch) -> torch.Tensor:
    leaf = dict(tree.walk())[path]
    if path == "mlp.gate_up":
        return leaf(X, batch)[0]
    return leaf(IDS) if path == "embed" else leaf(X, batch) if path.startswith("moe") else leaf(X)


def only_mine(tree, batch, path: str, adapter, expected: torch.Tensor) -> None:
    """The adapter changes the rows of adapter 1 to the expected ones, and no other."""
    before = outcome(tree, path, batch)
    set_adapter(tree, 1, adapter)
    after = outcome(tree, path, batch)
    rest = [*range(3), *range(7, len(X))]
    assert torch.equal(after[rest], before[rest])
    torch.testing.assert_close(after[MINE], expected[MINE], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after[MINE], before[MINE], atol=1e-3)
    set_adapter(tree, 1, None)
    assert torch.equal(outcome(tree, path, batch), before)


def change(outputs: int, inputs: int = WIDTH, **more) -> LowRank:
    return LowRank(randn(RANK, inputs, seed=1).numpy(), randn(outputs, RANK, seed=2).numpy(), 0.5, **more)


def test_a_bias_of_the_change_is_scaled_with_it(tree, batch):
    bias, weight = randn(INNER, seed=4), weights_of(tree, "mlp.gate_up", "gate")
    one = change(INNER, bias=bias.numpy())
    expected = X @ (weight + torch.from_numpy(one.delta())).T + 0.5 * bias
    only_mine(tree, batch, "mlp.gate_up", adapter_of({}, matrices={"mlp.gate_up.gate": one}), expected)


def test_a_request_scales_the_change_and_its_bias(tree, batch):
    weight = weights_of(tree, "mlp.gate_up", "gate")
    one = change(INNER, bias=np.ones(INNER, np.float32))
    set_adapter(tree, 1, adapter_of({}, matrices={"mlp.gate_up.gate": one}))
    with adapters_of(tree).use([((1, -3.0),)] * 32):
        found = tree.mlp.gate_up(X, batch)[0]
    expected = X @ (weight - 3 * torch.from_numpy(one.delta())).T - 1.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slot", ["mlp.gate_up.gate", "head"])
def test_a_magnitude_sets_the_norm_of_every_row(tree, batch, slot):
    path = slot.removesuffix(".gate")
    weight = weights_of(tree, path, "gate")
    magnitude = np.linspace(0.5, 2, len(weight)).astype(np.float32)
    one = change(len(weight), magnitude=magnitude)
    merged = torch.from_numpy(one.merged(weight.numpy()))
    assert np.allclose(merged.norm(dim=1), magnitude, rtol=1e-5)
    bias = tree.head.biases["weight"] if slot == "head" else 0.0
    only_mine(tree, batch, path, adapter_of({}, matrices={slot: one}), X @ merged.T + bias)


def test_several_adapters_are_added_in_their_order(tree, batch):
    one, two = change(INNER), change(INNER, magnitude=np.ones(INNER, np.float32))
    set_adapter(tree, 1, adapter_of({}, matrices={"mlp.gate_up.gate": one}))
    set_adapter(tree, 2, adapter_of({}, matrices={"mlp.gate_up.gate": two}))
    weight = weights_of(tree, "mlp.gate_up", "gate").numpy()
    with adapters_of(tree).use([((1, 2.0), (2, 1.0)), ((2, 1.0), (1, 2.0))] * 16):
        found = tree.mlp.gate_up(X, batch)[0]
    factor = two.factor(lambda: [weight])
    base, own = X.numpy() @ weight.T, X.numpy() @ one.delta().T
    first, second = factor * (base + 2 * own + own), factor * (base + own) + 2 * own
    assert np.allclose(found[0::2], first[0::2], atol=1e-4) and np.allclose(found[1::2], second[1::2], atol=1e-4)


def test_factors_of_rows_whose_norms_are_odd():
    one = np.ones(2, np.float32)
    assert factors_of(one, np.array([0.0, 4.0])).tolist() == [0.0, 0.25]
    for norm in (np.inf, np.nan):
        with pytest.raises(ModelFileError, match="norms"):
            factors_of(one, np.array([1.0, norm]))
    large = np.full((2, 2), 3e38, np.float32)
    with pytest.raises(ModelFileError, match="norms"):
        LowRank(large, large, 1.0, one).factor(lambda: [large])


def test_an_adapter_is_in_effect_from_its_start_on():
    adapters = (Adapted(3, 0.5, 0), Adapted(5, 1.0, 4))
    assert in_effect(adapters, 2, 4) == [((3, 0.5),)] * 2 + [((3, 0.5), (5, 1.0))] * 2
    assert in_effect((), 2, 3) == [()] * 3


def test_replaced_matrices_and_their_biases(tree, batch):
    weight, bias = randn(10, WIDTH, seed=5), randn(10, seed=6)
    saved = {"head.weight": weight.numpy(), "head.bias": bias.numpy()}
    only_mine(tree, batch, "head", adapter_of({}, saved=saved), X @ weight.T + bias)


def test_the_last_adapter_that_replaces_a_matrix_counts(tree, batch):
    first, last = randn(10, WIDTH, seed=5).numpy(), randn(10, WIDTH, seed=6).numpy()
    for id, weight in ((1, last), (2, first)):
        set_adapter(tree, id, adapter_of({}, saved={"head.weight": weight}, matrices={"head": change(10)}))
    with adapters_of(tree).use([((2, 1.0), (1, 1.0))] * 32):
        found = tree.head(X) - tree.head.biases["weight"]
    delta = change(10).delta()
    torch.testing.assert_close(found, X @ torch.from_numpy(last + 2 * delta).T, rtol=1e-4, atol=1e-4)


def test_replaced_rows_of_a_head(tree, batch):
    weight, rows = weights_of(tree, "head", "weight"), randn(2, WIDTH, seed=5)
    weight[[7, 2]] = rows
    adapter = adapter_of({}, tokens={"head": TokenRows((7, 2), rows.numpy())})
    only_mine(tree, batch, "head", adapter, X @ weight.T + tree.head.biases["weight"])


def test_tables(tree, batch):
    table, rows = weights_of(tree, "embed", ""), randn(2, WIDTH, seed=5)
    one = change(WIDTH, 10)
    expected = table + torch.from_numpy(one.delta()).T
    only_mine(tree, batch, "embed", adapter_of({}, tables={"embed": one}), expected[IDS])
    replaced = table.clone()
    replaced[[6, 4]] = rows
    only_mine(tree, batch, "embed", adapter_of({}, tokens={"embed": TokenRows((6, 4), rows.numpy())}), replaced[IDS])
    other = randn(10, WIDTH, seed=8)
    only_mine(tree, batch, "embed", adapter_of({}, saved={"embed.weight": other.numpy()}), other[IDS])
    stretched = change(WIDTH, 10, magnitude=np.linspace(0.5, 2, WIDTH).astype(np.float32))
    merged = torch.from_numpy(stretched.merged(table.T.numpy())).T
    only_mine(tree, batch, "embed", adapter_of({}, tables={"embed": stretched}), merged[IDS])


def test_replaced_norms(tree, batch):
    weight = randn(WIDTH, seed=5)
    expected = X / X.square().mean(-1, keepdim=True).add(1e-5).sqrt() * weight
    only_mine(tree, batch, "norm", adapter_of({}, saved={"norm.weight": weight.numpy()}), expected)


@pytest.mark.parametrize("part", ["gate_up.gate", "gate_up.up", "down"])
def test_experts(tree, batch, part):
    """Each expert by itself: its own matrix changed for all rows is what its adapter computes for its rows."""
    outputs, inputs = (WIDTH, INNER) if part == "down" else (INNER, WIDTH)
    both = {f"moe.experts.{e}.{part}": change(outputs, inputs) for e in range(2)}
    merged, delta = Tree(), torch.from_numpy(change(outputs, inputs).delta())
    fill(merged)
    for expert in merged.moe.experts:
        linear, name = (expert.down, "weight") if part == "down" else (expert.gate_up, part.partition(".")[2])
        linear.weights[name] = linear.weights[name] + delta.unflatten(1, (linear.segments, -1)).transpose(0, 1)
    expected = merged.moe(X, batch)
    only_mine(tree, batch, "moe", adapter_of({}, matrices=both), expected)
    set_adapter(tree, 1, adapter_of({}, matrices=both))
    with adapters_of(tree).use([((1, 1.0),)] * 32):
        torch.testing.assert_close(tree.moe(X, batch), expected, rtol=1e-4, atol=1e-5)


def test_what_no_module_can_change_is_refused_by_name(tree):
    saved = {"moe.experts.1.down.weight": np.zeros((WIDTH, INNER), np.float32)}
    with pytest.raises(UnsupportedModel, match=r"moe\.experts\.1\.down\.weight"):
        adapters_of(tree).pack(adapter_of({}, saved=saved))
