"""Lookups in a table on the device."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.ops.embedding import triton as embedding
from tests.triton.test_linear import DTYPES, made


def looked_up(ids, table, scale=None, or_first=False):
    out = torch.full((len(ids), table.cols), torch.nan)
    embedding.lookup(ids, table, out, scale, or_first)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_rows_are_those_of_the_table(dtype, ids):
    table, chosen = made(10, 1100, dtype), torch.tensor([3, 0, 9, 3], dtype=ids)
    assert torch.equal(looked_up(chosen, table), table.data[chosen.long()].float())
    assert torch.equal(looked_up(chosen, table, 1.5), table.data[chosen.long()].float() * 1.5)


def test_ids_outside_the_table_give_zeros():
    got = looked_up(torch.tensor([-1, 2, 10]), made(10, 20))
    assert got[0].eq(0).all()
    assert got[1].ne(0).any()
    assert got[2].eq(0).all()


def test_ids_outside_the_table_may_give_its_first_row():
    table = made(10, 20)
    got = looked_up(torch.tensor([-1, 2, 10, 1 << 30]), table, or_first=True)
    assert torch.equal(got, table.data[[0, 2, 0, 0]].float())


def test_a_part_of_a_table_begins_at_another_id():
    table, out = made(10, 20), torch.full((3, 20), torch.nan)
    embedding.lookup(torch.tensor([5, 7, 15]), table, out, first=6)
    assert out[0].eq(0).all()
    assert torch.equal(out[1:], table.data[[1, 9]].float())
