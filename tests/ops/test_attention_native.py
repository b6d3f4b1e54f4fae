"""The native attention against the torch body, and the bits of a row against everything around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ops import native
from kvasir.ops.attention.relative import Relative, expand
from kvasir.ops.attention.sizes import first_in_window
from kvasir.plan import Work
from tests.examples import examples
from tests.isas import isas, restore_isa  # noqa: F401

from .test_attention import Case, cut_up, make
from .test_attention import attend as attend_torch

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")

if native.available():
    from kvasir.ops.attention.native import FORMATS, Layout, attention, store_kv
else:
    FORMATS = ()

# The greatest difference over the greatest value. float32: rounding alone. bfloat16: queries and weights are rounded
# beside the cache. float16: the cache's rounding. int8: queries, keys and values by a 254th of their row's greatest.
CLOSE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3, "int8": 5e-2}


def attend(
    cases: list[Case], cuts: list[list[int]], format: str, block_size=16, seed=0, threads=1, stale=True, **options
) -> list[torch.Tensor]:
    """As in test_attention, natively: step i takes cuts[c][i] tokens of case c, in a cache of NaN and shuffled blocks.

    Table entries that no row of a step may follow, behind the window, name blocks that are full of NaN.
    """
    first = cases[0]
    kv_heads, dim = first.k.shape[1:]
    layout = Layout(format, kv_heads, dim, block_size)
    need = [-(-len(case.q) // block_size) for case in cases]
    random = np.random.default_rng(seed)
    blocks = random.permutation(np.arange(1, sum(need) + 1, dtype=np.int32))
    tables = np.split(blocks, np.cumsum(need)[:-1])
    cache = layout.new_cache(sum(need) + 1)
    done, out = [0] * len(cases), [[] for _ in cases]
    for step in range(max(map(len, cuts))):
        rows, slots, works, starts, seen, row = [], [], [], [], {}, 0
        for c, case in enumerate(cases):
            count = cuts[c][step] if step < len(cuts[c]) else 0
            if not count:
                continue
            start, end = done[c], done[c] + count
            positions = np.arange(start, end)
            slots += (tables[c][positions // block_size] * block_size + positions % block_size).tolist()
            table = tables[c].copy()
            if stale and first.window:
                table[: max(0, first_in_window(start, first.window)) // block_size] = 1 << 30
            works.append(Work(c, start, count, indivisible=not case.causal))
            starts.append(row)
            seen[c] = table
            rows.append((case.q[start:end], case.k[start:end], case.v[start:end]))
            row += count
        q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
        store_kv(layout, cache, k, v, torch.tensor(slots))
        mixed = attention(
            layout,
            cache,
            q,
            works,
            starts,
            seen,
            first.scale,
            window=first.window,
            softcap=first.softcap,
            sinks_H=first.sinks,
            threads=threads,
            **options,
        )
        for work, begin in zip(works, starts, strict=True):
            out[work.row].append(torch.from_numpy(mixed[begin : begin + work.count]))
            done[work.row] = work.end
    return [torch.cat(parts) for parts in out]


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def assert_close(found: torch.Tensor, expected: torch.Tensor, format: str) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < CLOSE[format], f"{format}: {error:.2e}"


SHAPES = [
    (4, 4, 8),
    (4, 2, 10),
    (14, 2, 16),
    (16, 1, 64),
    (17, 1, 8),
    (10, 2, 80),
    (6, 2, 96),
    (4, 2, 128),
    (2, 1, 256),
]


@pytest.mark.few(12)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_torch_body_with_equal_bits_on_every_isa(shape, format):
    case = make(133, *shape)
    expected = attend_torch([case], [[133]])[0]
    results = []
    for name in isas():
        native.force_isa(name)
        results.append(attend([case], [[133]], format)[0])
    assert_close(results[-1], expected, format)
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 33}, {"window": -33}, {"softcap": 5.0}, {"causal": False}, {"sinks": True}]
)
def test_attention_options_agree_with_torch(options: dict[str, Any], format: str):
    if "sinks" in options:
        options = {"sinks": torch.tensor([-3.0, 0.0, 1.0, 5.0])}
    case = make(150, 4, 2, 16, **options)
    expected = attend_torch([case], [[150]])[0]
    for block_size in (16, 48, 128):
        assert_close(attend([case], [[150]], format, block_size)[0], expected, format)


def test_alibi_against_float64():
    case = make(100, 4, 2, 16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1e-3])
    n, group = 100, 2
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (case.k, case.v))
    distance = torch.arange(n) - torch.arange(n)[:, None]
    scores = torch.einsum("qhd,khd->hqk", case.q.double(), k) * case.scale + slopes.double()[:, None, None] * distance
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(distance > 0, -torch.inf).softmax(-1), v).float()
    assert_close(attend([case], [[n]], "float32", alibi_slopes_H=slopes)[0], expected, "float32")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("parts", [("bias",), ("keys",), ("queries",), ("bias", "keys", "queries")])
def test_relative_positions_against_float64_with_equal_bits_on_every_isa(parts, format):
    n, heads, dim, reach = 130, 3, 10, 40
    case = make(n, heads, heads, dim, causal=False)
    random = np.random.default_rng(5)
    shapes = {"bias": (heads,), "keys": (heads, dim), "queries": (heads, dim)}
    values = {part: random.standard_normal((*shapes[part], 2 * reach + 1)).astype(np.float32) for part in parts}
    tables = {part: expand(table, reach, lambda away: away + reach) for part, table in values.items()}
    q, k, v = (t.double().numpy() for t in (case.q, case.k, case.v))
    at = np.clip(np.arange(n) - np.arange(n)[:, None], -reach, reach) + reach
    scores = np.einsum("qhd,khd->hqk", q, k)
    if "keys" in parts:
        scores += np.einsum("qhd,hdqk->hqk", q, values["keys"][:, :, at])
    if "queries" in parts:
        scores += np.einsum("khd,hdqk->hqk", k, values["queries"][:, :, at])
    scores *= case.scale
    if "bias" in parts:
        scores += values["bias"][:, at]
    weights = torch.from_numpy(scores).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, torch.from_numpy(v)).float()
    options = {"relative": Relative(reach, **tables), "k_TKd": case.k}
    results = []
    for name in isas():
        native.force_isa(name)
        results.append(attend([case], [[n]], format, threads=1 + len(results), **options)[0])
    assert_close(results[0], expected, format)
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)
    plain = attend_torch([case], [[n]], relative=options["relative"])[0]
    assert_close(plain, expected, "float32")


def test_tables_of_queries_need_the_keys_of_the_step():
    case = make(20, 2, 2, 8, causal=False)
    tables = Relative(3, queries=np.zeros((2, 8, 38), np.float32))
    with pytest.raises(ValueError, match="relative"):
        attend([case], [[20]], "float32", relative=tables)


@pytest.mark.parametrize("format", ["float32", "int8"])
def test_chunks_of_1024_keys_are_merged(format):
    case = make(2100, 2, 1, 16)
    whole = attend([case], [[2100]], format, 64)[0]
    assert_close(whole, case.expected(), format)
    assert torch.equal(attend([case], [[1000, 60, 1, 963, 1, 75]], format, 64)[0], whole)
    windowed = Case(case.q, case.k, case.v, window=1000)
    parts = attend([windowed], [[1500, 1, 599]], format, 64)[0]
    assert torch.equal(attend([windowed], [[2100]], format, 64)[0], parts)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shape", "lengths", "last", "window", "format"),
    [
        ((4, 2, 16), [6000], [1], 0, "bfloat16"),
        ((16, 1, 8), [4500, 40, 2100], [3, 40, 1], 0, "int8"),
        *(((3, 3, 10), [30, 5000, 30, 30], [1, 2, 1, 1], 3000, format) for format in FORMATS),
    ],
)
def test_splitting_long_sequences_over_threads_does_not_change_bits(shape, lengths, last, window, format):
    cases = [make(n, *shape, seed=i, window=window) for i, n in enumerate(lengths)]
    cuts = [[n - count, count] if n > count else [0, n] for n, count in zip(lengths, last, strict=True)]
    expected = attend(cases, cuts, format, 64, threads=1)
    for threads in (2, 3, 5):
        found = attend(cases, cuts, format, 64, threads=threads)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_work_without_rows_takes_no_share():
    layout = Layout("float32", 1, 8, 16)
    cache = layout.new_cache(2)
    ones = torch.ones(1, 1, 8)
    store_kv(layout, cache, ones, ones, torch.tensor([16]))
    table = np.array([1], np.int32)
    works = [Work(0, 0, 0), Work(1, 0, 0), Work(2, 0, 1)]
    for threads in (1, 2, 3):
        mixed = attention(layout, cache, ones, works, [0] * 3, [table] * 3, 1.0, threads=threads)
        assert np.array_equal(mixed, ones.numpy())


@examples(40)
@given(
    format=st.sampled_from(FORMATS or ["none"]),
    shape=st.sampled_from([(4, 4, 8), (6, 3, 16), (14, 2, 24), (3, 1, 10)]),
    lengths=st.lists(st.integers(1, 170), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    window=st.sampled_from([0, 1, 30, 64, 100]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    threads=st.integers(1, 7),
    isa=st.sampled_from(isas() or ["none"]),
    seed=st.integers(0, 99),
)
def test_the_bits_of_a_row(format, shape, lengths, sizes, window, block_size, threads, isa, seed):
    """Alone in one step on the best set, or cut up among others in any blocks by any threads on any: the same."""
    cases = [make(n, *shape, seed=i, window=window) for i, n in enumerate(lengths)]
    cuts = [cut_up(n, sizes[i % len(sizes) :] + sizes) for i, n in enumerate(lengths)]
    native.force_isa(isa)
    together = attend(cases, cuts, format, block_size, seed, threads)
    native.force_isa(None)
    for case, rows in zip(cases, together, strict=True):
        assert torch.equal(rows, attend([case], [[len(case.q)]], format)[0])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
@pytest.mark.parametrize("where", ("q", "k", "v"))
def test_a_nan_token_reaches_only_rows_that_attend_to_it(where, poison, format):
    case = make(100, 4, 2, 16, window=30)
    clean = attend([case], [[100]], format)[0]
    getattr(case, where)[40, 0] = poison
    seeing = torch.zeros(100, dtype=torch.bool)
    seeing[40 : 41 if where == "q" else 70] = True
    results = []
    for name in isas():
        native.force_isa(name)
        results.append(attend([case], [[100]], format)[0])
    assert torch.equal(results[0][~seeing], clean[~seeing])
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)
    if poison != torch.inf or where == "v":
        assert not torch.isfinite(results[0][seeing]).all(dim=(1, 2)).any()


def test_attention_reads_keys_and_values_from_the_cache():
    case = make(30, 4, 2, 16)
    rounded = Case(case.q, case.k.bfloat16().float(), case.v.bfloat16().float())
    found = attend([case], [[30]], "bfloat16")[0]
    assert torch.equal(found, attend([rounded], [[30]], "bfloat16")[0])


def test_rows_without_work_are_not_written():
    layout = Layout("float32", 1, 8, 16)
    cache = layout.new_cache(2)
    ones = torch.ones(1, 1, 8)
    store_kv(layout, cache, ones, ones, torch.tensor([16]))
    out = torch.full((4, 1, 8), 7.0)
    attention(layout, cache, torch.ones(4, 1, 8), [Work(0, 0, 1)], [2], [np.array([1])], 1.0, out=out)
    assert torch.equal(out[:, 0, 0], torch.tensor([7.0, 7.0, 1.0, 7.0]))


def test_invalid_layouts_slots_and_heads_are_refused():
    for layout in (Layout("float32", 1, 7, 16), Layout("float32", 1, 578, 16), Layout("bf16", 1, 8, 16)):
        with pytest.raises(ValueError, match="cache"):
            layout.block_bytes()
    with pytest.raises(ValueError, match="cache"):
        Layout("int8", 1, 8, 24).block_bytes()
    layout = Layout("bfloat16", 2, 8, 16)
    cache, rows = layout.new_cache(2), torch.ones(1, 2, 8)
    for slot in (-1, 32):
        with pytest.raises(ValueError, match=r"slots.*32"):
            store_kv(layout, cache, rows, rows, torch.tensor([slot]))
    with pytest.raises(ValueError, match="heads"):
        attention(layout, cache, torch.ones(1, 3, 8), [], [], [], 1.0)
    for table, count in (([2], 1), ([-1], 1), ([0], 17), ([0], 2)):
        with pytest.raises(ValueError):
            attention(layout, cache, rows, [Work(0, 0, count)], [0], [np.array(table)], 1.0)
