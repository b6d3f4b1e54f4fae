"""What adapters change in tables and norms: against the plain kernels and a reference."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.ops.embedding.triton_changes import change_lookup
from kvasir.ops.linear import triton_in_effect as effects
from kvasir.ops.norm.triton import norm
from kvasir.ops.norm.triton_changes import change_norm
from tests.triton.test_low_rank import PLACE, Adapter, effect_of, tables_of


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
def test_adapters_replace_the_weights_of_norms_in_their_rows(biased):
    x, weights, biases = random(4, 3, 40), random(3, 40, seed=1), random(3, 40, seed=2)
    fields = [{effects.ROWS: w, effects.SHIFT: b} for w, b in zip(weights, biases, strict=True)]
    tables, kept = tables_of({i: Adapter([None], (fields[i],)) for i in (1, 2)} | {3: Adapter([None])})
    out = torch.full((12, 40), torch.nan)
    change_norm(x.view(12, 40), effect_of([0, [1, 3], [1, 2, 3], 3], tables), tables, PLACE, out, 1e-5, biased)
    got = out.view(4, 3, 40)
    assert kept and got[[0, 3]].isnan().all()
    for t, adapter in ((1, 1), (2, 2)):
        expected = torch.full((3, 40), torch.nan)
        norm(x[t], weights[adapter], expected, 1e-5, bias=biases[adapter] if biased else None)
        assert torch.equal(got[t], expected)


def test_adapters_change_rows_of_a_table():
    size, width, rank = 9, 70, 3
    looked, ids = random(5, width), torch.tensor([4, 8, 0, 4, 1 << 30], dtype=torch.int32)
    a, b, factors = random(size, rank, seed=1), random(rank, width, seed=2), random(width, seed=3)
    whole, some = random(size, width, seed=4).bfloat16(), random(2, width, seed=5).bfloat16()
    places = torch.full((size,), -1, dtype=torch.int32)
    places[[8, 4]] = torch.arange(2, dtype=torch.int32)
    rank_of = torch.tensor(rank)
    low = {effects.A: a, effects.B: b, effects.FACTOR: factors}
    tables, kept = tables_of(
        {
            1: Adapter([None], (low,)),
            2: Adapter([None], ({effects.ROWS: whole},)),
            3: Adapter([None], ({effects.ROWS: some, effects.PLACES: places},)),
        }
    )
    [(entries, _), *_] = kept
    entries[PLACE, effects.RANK] = rank_of
    chosen = [[(1, 0.5), (3, 2.0)], [2, 3], [3, (1, -1.0)], [3, 2], [1]]
    out = looked.clone()
    change_lookup(ids, effect_of(chosen, tables), tables, PLACE, out, size, "bfloat16")

    def changed(row, token, scale):
        return (row + scale * (a[token] @ b)) * factors

    expected = torch.stack(
        [changed(some[1].float(), 4, 0.5), some[0].float(), changed(looked[2], 0, -1.0), whole[4].float(), looked[4]]
    )
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.equal(out[[1, 3, 4]], expected[[1, 3, 4]])
