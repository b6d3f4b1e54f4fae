"""Triton attention over a paged cache against a float64 softmax over gathered keys."""

import math
from dataclasses import dataclass, field

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.ops.attention.triton import (
    ITEM_FIELDS,
    attend,
    heads_of,
    least_items,
    plan_attention,
    tiles_of,
    tokens_of,
)
from tests.triton.codes import dequantized, quantized

STALE = 10**6  # a block id that must not be read


@dataclass
class Case:
    """Sequences in a paged cache, whose blocks lie in random order. Slots without a token, and blocks that no sequence
    owns, hold NaN."""

    lengths: list[int]
    H: int = 2
    K: int = 1
    d: int = 16
    e: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    with_sinks: bool = False
    seed: int = 0
    size: int = 16  # tokens of a block
    code: torch.dtype | None = None  # int8, or uint8 for e4m3fn
    q: list[torch.Tensor] = field(init=False)

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.size) for length in self.lengths]
        blocks = 2 + sum(counts)
        order = (1 + torch.randperm(blocks - 1, generator=random)).tolist()
        self.table = torch.full((len(self.lengths) + 1, max(counts)), STALE, dtype=torch.int32)
        self.table[-1] = 0
        kv_dtype = self.kv_dtype or self.dtype
        self.k_cache = torch.full((blocks, self.size, self.K, self.d), torch.nan).to(kv_dtype)
        self.v_cache = torch.full((blocks, self.size, self.K, self.e), torch.nan).to(kv_dtype)
        self.scales = None
        if self.code:
            caches = self.k_cache, self.v_cache
            self.k_cache, self.v_cache = (torch.full(x.shape, 255, dtype=torch.uint8).view(self.code) for x in caches)
            k_scales, v_scales = (torch.full((blocks, self.K, self.size), torch.nan) for _ in caches)
            self.scales = k_scales, v_scales
        self.q, self.k, self.v = [], [], []
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            ids = torch.tensor([order.pop() for _ in range(count)])
            self.table[row, :count] = ids
            slots = (ids[:, None] * self.size + torch.arange(self.size)).flatten()[:length]
            k, v = (torch.randn(length, self.K, n, generator=random) for n in (self.d, self.e))
            for x, cache, own, kept in ((k, self.k_cache, "k", self.k), (v, self.v_cache, "v", self.v)):
                kept.append(self._written(x, cache.flatten(0, 1), own, slots))
            q = torch.randn(length, self.H, self.d, generator=random) * 1.5
            self.q.append(q.to(self.dtype))
        self.sinks = torch.randn(self.H, generator=random) if self.with_sinks else None
        self.scale = self.d**-0.5

    def _written(self, x: torch.Tensor, cache: torch.Tensor, which: str, slots: torch.Tensor) -> torch.Tensor:
        """Writes keys or values to slots of a cache; returns them as attention should read them."""
        if not self.scales:
            cache[slots] = x.to(cache.dtype)
            return x.to(cache.dtype).to(self.dtype)
        # sizes differ between tokens and heads, so that it matters whose scale is read
        sizes = torch.logspace(-2, 0.3, 7)[torch.arange(len(x) * self.K) % 7]
        codes, scales = quantized(x * sizes.view(len(x), self.K, 1), cache.dtype)
        cache[slots] = codes
        self.scales[which == "v"][slots // self.size, :, slots % self.size] = scales
        return dequantized(codes, scales)

    def run(
        self, *works: tuple[int, int, int], both: bool = False, split: bool = True, pad: int = 0, most: int = 64
    ) -> list[torch.Tensor]:
        """The rows of works (row, start, count), computed in one step; of split tiles, or of whole ones."""
        group, T = self.H // self.K, sum(count for _, _, count in works)
        pieces = torch.zeros(len(works) + pad, 5, dtype=torch.int32)
        first = 0
        for piece, (row, start, count) in zip(pieces, works, strict=False):
            piece[:] = torch.tensor([row, start, count, first, both])
            first += count
        most = most if split else least_items(T, len(pieces), group)
        items = torch.full((most, ITEM_FIELDS), -7, dtype=torch.int32)
        num_items = torch.full((1,), -7, dtype=torch.int32)
        capacity = 256 if split else 0
        tops, accs = (torch.full((max(capacity, 1), self.H, n), torch.nan) for n in (2, self.e))
        counters = torch.zeros(most, self.K * tiles_of(group), dtype=torch.int32)
        plan_attention(pieces, items, num_items, group=group, window=self.window, capacity=capacity)
        q = torch.cat([self.q[0][:0], *(self.q[row][start : start + count] for row, start, count in works)])
        out = torch.full((T + 1, self.H, self.e), 99.0, dtype=self.dtype)
        attend(
            q, self.k_cache, self.v_cache, self.table, items, num_items, out, counters, tops, accs,
            scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks,
            scales=self.scales,
        )  # fmt: skip
        assert not counters.any()
        assert (out[T] == 99.0).all()
        self.items = items[: int(num_items)]
        return list(out[:T].split([count for _, _, count in works]))

    def expected(self, row: int, start: int, count: int, both: bool = False) -> torch.Tensor:
        positions, keys = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        seen = torch.ones(count, start + count, dtype=torch.bool) if both else keys <= positions
        if self.window:
            seen = seen & (keys > positions - self.window)
        q = self.q[row][start : start + count].double().view(count, self.K, -1, self.d)
        k, v = (x[row][: start + count].double() for x in (self.k, self.v))
        scores = torch.einsum("tkgd,skd->kgts", q, k) * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double().view(self.K, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("kgts,ske->tkge", weights, v).reshape(count, self.H, self.e)

    def check(self, *works: tuple[int, int, int], both: bool = False, **options) -> None:
        tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[self.dtype]
        if self.code and self.dtype == torch.float16:
            tolerance = 2e-2  # weights times scales are bfloat16
        for work, found in zip(works, self.run(*works, both=both, **options), strict=True):
            expected = self.expected(*work, both=both)
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_groups_of_query_heads(group):
    Case([40, 9], H=2 * group, K=2).check((0, 30, 10), (1, 8, 1), (0, 0, 3))


@pytest.mark.parametrize(("group", "tiles", "heads"), [(32, 1, 32), (33, 2, 17), (64, 2, 32), (71, 3, 24)])
def test_heads_of_a_group_are_divided_among_tiles(group, tiles, heads):
    assert (tiles_of(group), heads_of(group), tokens_of(group)) == (tiles, heads, 1)
    case = Case([270], H=2 * group, K=2)
    case.check((0, 267, 3))
    (split,), items = case.run((0, 267, 3)), case.items
    assert len(items) == 6
    assert torch.equal(split, case.run((0, 267, 3), split=False)[0])


@pytest.mark.parametrize(("d", "e"), [(24, 24), (80, 80), (20, 12), (16, 64)])
def test_widths_of_heads(d, e):
    Case([70], d=d, e=e).check((0, 62, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [True, False])
def test_sixteen_bit_values(dtype, split):
    Case([300], dtype=dtype).check((0, 290, 10), split=split)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_cache_of_another_dtype(dtype, kv_dtype):
    Case([30], dtype=dtype, kv_dtype=kv_dtype).check((0, 20, 10))


@pytest.mark.parametrize("position", [0, 63, 64, 255, 256, 257, 512])
@pytest.mark.parametrize("window", [0, 1, 100])
def test_positions_around_the_ends_of_chunks(position, window):
    Case([position + 1], window=window, seed=position).check((0, position, 1))


@pytest.mark.parametrize("size", [64, 128, 24])
def test_sizes_of_blocks(size):
    case = Case([300, 70], K=2, H=2, window=180, size=size)
    case.table[0, : (295 - 179) // size] = STALE
    case.check((0, 295, 5), (1, 69, 1))


def test_wide_values_of_split_tiles():
    case = Case([530], d=16, e=144)
    (split,), items = case.run((0, 525, 5)), case.items
    assert len(items) == 3
    assert torch.equal(split, case.run((0, 525, 5), split=False)[0])
    case.check((0, 525, 5))


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    window=st.sampled_from([0, 3, 64, 300]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
    both=st.booleans(),
    split=st.booleans(),
    pad=st.integers(0, 2),
)
@settings(max_examples=12, deadline=None)
def test_steps_of_several_pieces(lengths, counts, window, softcap, with_sinks, both, split, pad):
    case = Case(lengths, H=4, K=2, window=window, softcap=softcap, with_sinks=with_sinks, seed=sum(lengths))
    works = [
        (row, length - min(count, length), min(count, length))
        for row, (length, count) in enumerate(zip(lengths, counts, strict=False))
    ]
    case.check(*works, both=both, split=split, pad=pad)


def test_blocks_outside_the_window_are_not_read():
    case = Case([600], window=40)
    case.table[0, : (590 - 39) // case.size] = STALE
    case.check((0, 590, 10))


def test_step_of_padding_pieces_alone():
    case = Case([5])
    assert case.run(pad=3) == []
    assert len(case.items) == 0


def test_huge_scores_and_small_ones():
    case = Case([300])
    case.q[0] *= 300.0
    case.check((0, 296, 4))
    case.softcap = 5.0
    case.check((0, 296, 4))


BIT_CASES = [
    {},
    {"window": 300, "softcap": 3.0},
    {"with_sinks": True, "window": 70},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "H": 6, "K": 2},
    {"dtype": torch.bfloat16, "code": torch.int8, "H": 4, "K": 2},
    {"code": torch.uint8, "window": 300, "size": 64},
]


@pytest.mark.parametrize("options", [case for case in BIT_CASES if case.get("window", 300) == 300])
def test_split_tiles_have_the_bits_of_whole_ones(options):
    case = Case([700], **options)
    (split,), items = case.run((0, 690, 10)), case.items
    (whole,) = case.run((0, 690, 10), split=False)
    assert len(case.items) < len(items)
    assert torch.equal(split, whole)


@pytest.mark.parametrize("options", BIT_CASES)
def test_bits_do_not_depend_on_chunks_or_on_the_batch(options):
    case = Case([530, 270], **options)
    (together,) = case.run((0, 495, 35))
    rows = torch.cat([case.run((0, t, 1))[0] for t in (511, 512, 529)])
    assert torch.equal(rows, together[[16, 17, 34]])
    other, *parts = case.run((1, 260, 10), (0, 495, 1), (0, 496, 20), (0, 516, 14), pad=1)
    assert torch.equal(torch.cat(parts), together)
    assert torch.equal(other, case.run((1, 260, 10), split=False)[0])


def test_nan_of_one_sequence_does_not_reach_another():
    case = Case([300, 40])
    first = case.run((0, 299, 1), (1, 36, 4))[0]
    ids = case.table[1, :3].long()
    case.k_cache[ids], case.v_cache[ids] = torch.nan, torch.nan
    again, broken = case.run((0, 299, 1), (1, 36, 4))
    assert torch.equal(first, again)
    assert broken.isnan().all()


def test_only_single_tiles_are_split_if_all_do_not_fit():
    case = Case([600, 600])
    works = (0, 560, 40), (1, 599, 1)
    case.check(*works, most=7)
    chunks = case.items[:, 7].tolist()
    assert chunks == [0, 0, 0, 3, 3, 3]


def test_items_fit_their_buffer():
    case = Case([600, 600])
    case.check((0, 560, 40), (1, 599, 1), most=5)
    assert case.items[:, 7].tolist() == [0, 0, 0, 0]
    assert least_items(41, 2, 2) == 4 == math.ceil(40 / 16) + 1


CODES = [torch.int8, torch.uint8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 64])
def test_caches_of_codes(code, dtype, size):
    case = Case([300, 70], H=6, K=2, d=24, e=24, dtype=dtype, code=code, size=size)
    case.check((0, 290, 10), (1, 69, 1))


@pytest.mark.parametrize("code", CODES)
def test_caches_of_codes_with_windows_and_all_else(code):
    Case([600, 40], H=4, K=2, code=code, window=70, softcap=2.0, with_sinks=True).check((0, 590, 10), (1, 30, 10))
    Case([40], K=2, code=code, d=20, e=36, size=24).check((0, 30, 10), both=True)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_decoded_exactly(code, dtype):
    """Attention to a single key returns its value; the scales are powers of two."""
    numbers = torch.arange(256, dtype=torch.uint8)
    known = torch.ones(256, dtype=torch.bool) if code == torch.int8 else (numbers & 127) != 127
    case = Case([1], d=16, e=256, H=1, dtype=dtype, code=code)
    block = case.table[0, 0]
    case.v_cache[block, 0, 0] = numbers.view(code)
    assert case.scales
    case.scales[1][block, 0, 0] = 0.5
    ((found,),) = case.run((0, 0, 1))
    expected = dequantized(numbers.view(code)[None], torch.tensor([0.5]))[0]
    # -127 to 127 and all of e4m3 fit 8 bits of bfloat16
    assert torch.equal(found[0, known].float(), expected[known])


@pytest.mark.parametrize("code", CODES)
def test_values_far_below_one_in_float16(code):
    """Weights times scales are less than float16 has."""
    case = Case([60], dtype=torch.float16, code=code)
    assert case.scales
    case.scales[1][:] *= 2.0**-12
    (found,) = case.run((0, 50, 10))
    expected = case.expected(0, 50, 10) * 2.0**-12
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=2e-6)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_row_with_the_scale_nan_reaches_only_its_own_sequence(code, which):
    case = Case([300, 40], H=4, K=2, code=code)
    works = (0, 299, 1), (1, 5, 1), (1, 36, 4)
    before = case.run(*works)
    assert case.scales
    case.scales[which][case.table[1, 1], 1, 3] = torch.nan  # token 19, the second head
    after = case.run(*works)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert torch.equal(before[2][:, :2], after[2][:, :2]) and after[2][:, 2:].isnan().all()
