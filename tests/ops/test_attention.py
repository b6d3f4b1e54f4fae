"""Attention against a softmax written out in float64, and the bits of a row against everything around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ops.attention import paged_attention, store_kv
from kvasir.ops.attention.plan import plan_attention
from kvasir.ops.attention.relative import Relative
from kvasir.plan import Work
from tests.examples import examples

# float32 scores up to about 20, whose rounding the exponential magnifies, times values up to 8.
CLOSE = {"rtol": 1e-5, "atol": 3e-5}


@dataclass
class Case:
    """One sequence's queries, keys and values, [n, heads, d], and how they are attended to."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int = 0
    causal: bool = True
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def expected(self) -> torch.Tensor:
        n, heads, _ = self.q.shape
        group = heads // self.k.shape[1]
        k, v = (t.double().repeat_interleave(group, dim=1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) & self.causal | (distance >= self.window if self.window > 0 else distance < -n)
        if self.window < 0:
            chunks = torch.arange(n) // -self.window
            hidden |= chunks[:, None] != chunks
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, n, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v).float()


def make(n: int, heads: int, kv_heads: int, dim: int, seed: int = 0, **options) -> Case:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, h, dim, generator=generator) * 2 for h in (heads, kv_heads, kv_heads))
    return Case(q, k, v, **options)


def attend(
    cases: list[Case],
    cuts: list[list[int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    relative: Relative | None = None,
) -> list[torch.Tensor]:
    """The cases in one cache of shuffled blocks and NaN, step by step: step i takes cuts[c][i] tokens of case c."""
    kv_heads, dim = cases[0].k.shape[1:]
    need = [-(-len(case.q) // block_size) for case in cases]
    random = np.random.default_rng(seed)
    blocks = random.permutation(np.arange(1, sum(need) + 1, dtype=np.int32))
    tables = np.split(blocks, np.cumsum(need)[:-1])
    k_cache, v_cache = torch.full((2, sum(need) + 1, block_size, kv_heads, dim), torch.nan, dtype=dtype)
    done, out = [0] * len(cases), [[] for _ in cases]
    for step in range(max(len(cut) for cut in cuts)):
        rows, slots, works, starts, row = [], [], [], [], 0
        taken = [cut[step] if step < len(cut) else 0 for cut in cuts]
        for c, case in enumerate(cases):
            if taken[c]:
                start, end = done[c], done[c] + taken[c]
                positions = np.arange(start, end)
                slots += (tables[c][positions // block_size] * block_size + positions % block_size).tolist()
                works.append(Work(c, start, taken[c], indivisible=not case.causal))
                starts.append(row)
                rows.append((case.q[start:end], case.k[start:end], case.v[start:end]))
                row += taken[c]
        q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
        store_kv(k_cache, k, torch.tensor(slots))
        store_kv(v_cache, v, torch.tensor(slots))
        case = cases[0]
        plan = plan_attention(
            works,
            starts,
            tables,
            group=case.q.shape[1] // kv_heads,
            window=case.window,
            block_size=block_size,
            width=kv_heads * dim,
            device=torch.device("cpu"),
        )
        mixed = paged_attention(q, k_cache, v_cache, plan, case.scale, case.softcap, case.sinks, relative, k)
        for work, first in zip(works, starts, strict=True):
            out[work.row].append(mixed[first : first + work.count])
            done[work.row] = work.end
    return [torch.cat(parts) for parts in out]


@pytest.mark.few(10)
@pytest.mark.parametrize("n", (1, 5, 64, 65, 150))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 3, 16), (14, 2, 64), (20, 1, 24), (40, 2, 16)])
def test_against_float64(n, heads, kv_heads, dim):
    case = make(n, heads, kv_heads, dim)
    torch.testing.assert_close(attend([case], [[n]])[0], case.expected(), **CLOSE)


@pytest.mark.few(11)
@pytest.mark.parametrize("window", (1, 2, 16, 63, 64, 65, 400, -1, -16, -63, -400))
@pytest.mark.parametrize("block_size", (16, 64, 128))
def test_attention_within_windows(window, block_size):
    case = make(150, 4, 2, 16, window=window)
    for cuts in ([150], [100, 1, 49]):
        torch.testing.assert_close(attend([case], [cuts], block_size)[0], case.expected(), **CLOSE)


def test_bidirectional_attention():
    case = make(100, 4, 2, 16, causal=False)
    torch.testing.assert_close(attend([case], [[100]])[0], case.expected(), **CLOSE)


@pytest.mark.parametrize("window", (0, 20))
def test_soft_caps_and_sinks(window):
    case = make(90, 6, 2, 16, window=window, softcap=5.0, sinks=torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, -100.0]))
    torch.testing.assert_close(attend([case], [[90]])[0], case.expected(), **CLOSE)


def test_attention_reads_keys_and_values_from_the_cache():
    """Rounding to the cache's type is seen by the tokens of the same step too."""
    case = make(30, 4, 2, 16)
    rounded = Case(case.q, case.k.bfloat16().float(), case.v.bfloat16().float())
    found = attend([case], [[30]], dtype=torch.bfloat16)[0]
    assert torch.equal(found, attend([rounded], [[30]])[0])
    assert not torch.equal(found, attend([case], [[30]])[0])


@pytest.mark.usefixtures("exact_linear")
@examples(30)
@given(
    shape=st.sampled_from([(4, 4, 8), (6, 3, 16), (14, 2, 24)]),
    lengths=st.lists(st.integers(1, 170), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    window=st.sampled_from([0, 1, 30, 64, 100]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    seed=st.integers(0, 99),
)
def test_the_bits_of_a_row(shape, lengths, sizes, window, block_size, seed):
    """Alone in one step, or cut up among others in any blocks: the same."""
    cases = [make(n, *shape, seed=i, window=window) for i, n in enumerate(lengths)]
    cuts = [cut_up(n, sizes[i % len(sizes) :] + sizes) for i, n in enumerate(lengths)]
    together = attend(cases, cuts, block_size, seed=seed)
    for case, rows in zip(cases, together, strict=True):
        assert torch.equal(rows, attend([case], [[len(case.q)]])[0])


def cut_up(length: int, sizes: list[int]) -> list[int]:
    cuts: list[int] = []
    while sum(cuts) < length:
        cuts.append(min(sizes[len(cuts) % len(sizes)], length - sum(cuts)))
    return cuts


@pytest.mark.usefixtures("exact_linear")
@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
@pytest.mark.parametrize("where", ("q", "k", "v"))
def test_a_nan_token_reaches_only_rows_that_attend_to_it(where, poison):
    case = make(100, 4, 2, 16, window=30)
    clean = attend([case], [[100]])[0]
    getattr(case, where)[40, 0] = poison
    found = attend([case], [[100]])[0]
    seeing = torch.zeros(100, dtype=torch.bool)
    seeing[40 : 41 if where == "q" else 70] = True
    assert torch.equal(found[~seeing], clean[~seeing])
    if poison != torch.inf or where == "v":
        assert not torch.isfinite(found[seeing]).all(dim=(1, 2)).any()


def test_rows_without_work_get_zeros():
    plan = plan_attention(
        [Work(0, 0, 1)],
        [2],
        [np.array([1])],
        group=1,
        window=0,
        block_size=16,
        width=8,
        device=torch.device("cpu"),
    )
    cache = torch.ones(2, 16, 1, 8)
    out = paged_attention(torch.ones(4, 1, 8), cache, cache, plan, 1.0)
    assert torch.equal(out[:, 0, 0], torch.tensor([0.0, 0.0, 1.0, 0.0]))
