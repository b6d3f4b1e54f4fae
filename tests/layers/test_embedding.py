"""Tables of embeddings: rows by id, and vocabularies that ranks share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.layers.embedding import PANEL, Embedding, VocabularyEmbedding, vocabulary_cut
from kvasir.layers.tensors import TensorPlace
from kvasir.parallel.local import LocalRanks
from tests.layers.parts import fill, on_ranks, randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_table_in_float32(dtype):
    table, weight, ids = Embedding(40, 24), randn(40, 24), torch.tensor([3, 39, 0, 3])
    table.put("weight", weight, TensorPlace(dtype))
    found = table(ids)
    assert found.dtype == torch.float32 and torch.equal(found, weight.to(dtype).float()[ids])
    assert torch.equal(table.row(39), found[1])


def test_an_embedding_expects_one_table_and_holds_all_of_it():
    table = Embedding(40, 24)
    assert table.expects() == {"weight": (40, 24)}
    assert table.shard("weight").shape == (40, 24)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("vocabulary", [20, 100, 160])
def test_ranks_that_share_a_vocabulary_have_the_rows_of_the_whole_table(size, vocabulary):
    ids = torch.arange(vocabulary).flip(0)
    whole = VocabularyEmbedding(vocabulary, 8)
    fill(whole)
    for found in on_ranks(size, lambda: VocabularyEmbedding(vocabulary, 8), lambda table: table(ids)):
        assert torch.equal(found, whole(ids))


def test_a_split_vocabulary_is_held_once():
    tables = [VocabularyEmbedding(100, 8) for _ in range(4)]
    for table, mesh in zip(tables, LocalRanks(4).meshes, strict=True):
        table.split(mesh, lambda linear: 1)
        fill(table)
    held = [range(*table.rows) for table in tables]
    assert [id for rows in held for id in rows] == list(range(100))
    assert [len(table.weight) for table in tables] == [len(rows) for rows in held]


@given(st.integers(1, 2000), st.sampled_from([1, 2, 4, 8]))
def test_a_vocabulary_is_cut_into_whole_panels(size, ranks):
    cut = vocabulary_cut(size, LocalRanks(ranks).meshes[0])
    assert cut.borders[0] == 0 and cut.size == size and list(cut.borders) == sorted(cut.borders)
    assert all(border % PANEL == 0 for border in cut.borders[:-1])
    assert cut.parts <= ranks and (cut.parts == ranks or 2 * cut.parts * PANEL > size)
    assert all(first < last for first, last in map(cut.range, range(cut.parts)))
