"""The module tree, and parts of tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.layers.block import DecoderLayer
from kvasir.layers.linear import Plain
from kvasir.layers.mlp import MLP
from kvasir.layers.module import Module, Shard, Take
from kvasir.layers.norm import RMSNorm
from kvasir.layers.tensors import TensorPlace
from kvasir.parallel import SOLO
from tests.layers.parts import randn


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.data())
def test_a_take_has_the_shape_that_it_announces(n, k, transposed, data):
    stored = torch.arange(n * k).view(n, k)
    outputs = k if transposed else n
    first = data.draw(st.integers(0, outputs))
    rows = data.draw(st.none() | st.tuples(st.just(first), st.integers(first, outputs)))
    take = Take("qkv", rows, transposed)
    whole = stored.T if transposed else stored
    assert take.shape((n, k)) == tuple(take.of(stored).shape)
    assert torch.equal(take.of(stored), whole if rows is None else whole[rows[0] : rows[1]])


@pytest.mark.parametrize("stored", [(), (3,), (3, 8)])
def test_a_tensor_with_too_few_rows_is_refused(stored):
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        Take("qkv", (2, 4)).shape(stored)


def test_a_shard_is_a_view_of_its_rows_and_columns():
    matrix, shard = randn(6, 10), Shard((2, 5), (4, 10), 2)
    part = shard.of(matrix)
    assert tuple(part.shape) == shard.shape == (3, 6)
    assert torch.equal(part, matrix[2:5, 4:10])
    part.zero_()
    assert not matrix[2:5, 4:10].any()


def test_a_block_names_its_parts():
    block = DecoderLayer(RMSNorm(8, 1e-5), Plain(8, 8), RMSNorm(8, 1e-5), MLP(8, 16))  # type: ignore[arg-type]
    assert [name for name, _ in block.children()] == ["attn_norm", "attn", "mlp_norm", "mlp"]
    assert [path for path, _ in block.walk()][-2:] == ["mlp.up", "mlp.down"]


def test_children_are_modules_and_lists_of_them():
    class Tree(Module):
        def __init__(self):
            self.first = Plain(2, 2)
            self.mixed = [Plain(2, 2), None, Plain(2, 2)]
            self.none, self.number, self.tensor = None, 3, torch.ones(1)

    assert [name for name, _ in Tree().children()] == ["first", "mixed.0", "mixed.2"]


def test_a_module_without_tensors_takes_none():
    assert MLP(8, 16).expects() == {}
    with pytest.raises(NotImplementedError, match="MLP"):
        MLP(8, 16).put("weight", torch.ones(1), TensorPlace(torch.float32))


def test_split_reaches_each_child_with_the_same_mesh():
    class Leaf(Module):
        def __init__(self):
            self.meshes = []

        def split(self, mesh, segments):
            self.meshes.append(mesh)

    class Tree(Module):
        def __init__(self):
            self.one, self.more = Leaf(), [Leaf(), Leaf()]

    tree = Tree()
    tree.split(SOLO, lambda linear: 1)
    assert [leaf.meshes for leaf in (tree.one, *tree.more)] == [[SOLO]] * 3
