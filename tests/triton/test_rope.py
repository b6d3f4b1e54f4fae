"""The Triton rotary embedding and cache writes against the torch bodies."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.ops.norm.body import rms_norm
from kvasir.ops.rope.body import rope as torch_rope
from kvasir.ops.rope.triton import rope, rope_store, store_kv
from tests.triton.codes import quantized

BLOCKS, SIZE, ROWS, POSITIONS = 7, 4, 2, 12
EPS = 1e-6


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = _int32([[3, 1, 5], [2, 6, 4], [0, 0, 0]])
TOKENS = _int32([0, 0, 1, 1, 2]), _int32([3, 4, 0, 11, 0])  # rows and positions; the last token is padding
SLOTS = torch.tensor([3 * SIZE + 3, 1 * SIZE, 2 * SIZE, 4 * SIZE + 3, 0])


def _caches(heads: int, dim: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.full((BLOCKS, SIZE, heads, dim), torch.nan, dtype=dtype) for _ in range(2))
    return k, v


def _angles(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -2, half)
    return angles.cos(), angles.sin()


@given(
    segments=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dim=st.sampled_from([8, 10, 16, 20]),
    rotated=st.sampled_from([None, 0.5, 1.0]),
    with_bias=st.booleans(),
    with_norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=30, deadline=None)
def test_rope_store_equals_the_torch_bodies(segments, heads, dim, rotated, with_bias, with_norm, dtype):
    H, K = heads
    T, width = len(SLOTS), (H + 2 * K) * dim
    parts, bias, q_norm, k_norm = (
        _random(*shape, seed=seed) for seed, shape in enumerate([(segments, T, width), (width,), (dim,), (dim,)])
    )
    joined = parts.double().sum(0).float() + (bias if with_bias else 0.0)
    q, k, v = (x.view(T, -1, dim) for x in joined.split([H * dim, K * dim, K * dim], dim=1))
    if with_norm:
        q, k = rms_norm(q, q_norm, EPS), rms_norm(k, k_norm, EPS)
    cos = sin = None
    if rotated:
        cos, sin = _angles(int(dim * rotated) // 2)
        q, k = (torch_rope(x, cos[TOKENS[1]], sin[TOKENS[1]]) for x in (q, k))
    k_cache, v_cache = _caches(K, dim, dtype)
    out = torch.full((T, H, dim), torch.nan, dtype=dtype)
    rope_store(
        parts, *TOKENS, TABLE, cos, sin, k_cache, v_cache, out,
        heads=H, kv_heads=K, head_dim=dim, bias=bias if with_bias else None,
        q_norm=q_norm if with_norm else None, k_norm=k_norm if with_norm else None, eps=EPS,
    )  # fmt: skip
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for found, expected in ((out, q), (k_cache.view(-1, K, dim)[SLOTS], k), (v_cache.view(-1, K, dim)[SLOTS], v)):
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(BLOCKS * SIZE, dtype=torch.bool).index_fill(0, SLOTS, False)
    assert k_cache.view(-1, K, dim)[untouched].isnan().all()
    assert v_cache.view(-1, K, dim)[untouched].isnan().all()


def test_bits_of_a_token_do_not_depend_on_the_batch():
    parts, norms, (cos, sin) = _random(2, 5, 4 * 8), _random(2, 8, seed=1), _angles(4)
    args = {"heads": 2, "kv_heads": 1, "head_dim": 8, "q_norm": norms[0], "k_norm": norms[1], "eps": EPS}
    caches, out = _caches(1, 8), torch.empty(5, 2, 8)
    rope_store(parts, *TOKENS, TABLE, cos, sin, *caches, out, **args)
    alone_caches, alone = _caches(1, 8), torch.empty(1, 2, 8)
    for t in range(5):
        rows, positions = (x[t : t + 1] for x in TOKENS)
        part = parts[:, t : t + 1].contiguous()
        rope_store(part, rows, positions, TABLE, cos, sin, *alone_caches, alone, **args)
        assert torch.equal(alone[0], out[t])
    for together, one in zip(caches, alone_caches, strict=True):
        assert torch.equal(together.view(torch.int32), one.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_to_nearest_even(dtype):
    parts = _random(1, 5, 4 * 16)
    (k_cache, v_cache), out = _caches(1, 16, dtype), torch.empty(5, 2, 16, dtype=dtype)
    rope_store(parts, *TOKENS, TABLE, None, None, k_cache, v_cache, out, heads=2, kv_heads=1, head_dim=16)
    expected = parts[0].to(dtype)
    assert torch.equal(out.view(5, -1), expected[:, :32])
    assert torch.equal(k_cache.view(-1, 16)[SLOTS], expected[:, 32:48])
    assert torch.equal(v_cache.view(-1, 16)[SLOTS], expected[:, 48:])


def test_caches_with_other_strides():
    parts, out = _random(1, 5, 3 * 8), torch.empty(5, 1, 8)
    both = torch.full((BLOCKS, 2, 1, SIZE, 8), torch.nan)
    k_cache, v_cache = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    rope_store(parts, *TOKENS, TABLE, None, None, k_cache, v_cache, out, heads=1, kv_heads=1, head_dim=8)
    assert torch.equal(k_cache.reshape(-1, 8)[SLOTS], parts[0, :, 8:16])
    assert torch.equal(v_cache.reshape(-1, 8)[SLOTS], parts[0, :, 16:])


@pytest.mark.parametrize("half", [2, 5, 7])
def test_rope_of_heads_that_lie_apart(half):
    x, (cos, sin) = _random(5, 3, 20), _angles(half)
    out = torch.empty(5, 3, 14)
    rope(x[..., 6:], TOKENS[1], cos, sin, out)
    torch.testing.assert_close(out, torch_rope(x[..., 6:], cos[TOKENS[1]], sin[TOKENS[1]]))


def test_rope_in_place():
    x, (cos, sin) = _random(5, 2, 12), _angles(6)
    expected = torch_rope(x, cos[TOKENS[1]], sin[TOKENS[1]])
    rope(x, TOKENS[1], cos, sin, x)
    torch.testing.assert_close(x, expected)


def test_store_kv_of_different_widths():
    x = _random(5, 2, 30)
    k, v = x[..., :18], x[..., 18:]
    k_cache = torch.full((BLOCKS, SIZE, 2, 18), torch.nan, dtype=torch.bfloat16)
    v_cache = torch.full((BLOCKS, SIZE, 2, 12), torch.nan, dtype=torch.bfloat16)
    store_kv(k, v, *TOKENS, TABLE, k_cache, v_cache)
    assert torch.equal(k_cache.view(-1, 2, 18)[SLOTS], k.bfloat16())
    assert torch.equal(v_cache.view(-1, 2, 12)[SLOTS], v.bfloat16())
    assert v_cache.isnan().sum() == v_cache.numel() - v.numel()


CODES = [torch.int8, torch.uint8]


def _coded(heads: int, dim: int, code: torch.dtype):
    """Caches of codes and their scales, all bytes 255."""
    k, v = (torch.full((BLOCKS, SIZE, heads, dim), 255, dtype=torch.uint8).view(code) for _ in range(2))
    k_scales, v_scales = (torch.full((BLOCKS, heads, SIZE), torch.nan) for _ in range(2))
    return (k, v), (k_scales, v_scales)


def _rows_of(cache: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, heads, d] and scales [T, heads] of the tokens."""
    return cache.flatten(0, 1)[SLOTS], scales.transpose(1, 2).flatten(0, 1)[SLOTS]


def _same_codes(found, x: torch.Tensor, code: torch.dtype) -> None:
    for got, expected in zip(found, quantized(x, code), strict=True):
        assert torch.equal(got.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dim", [8, 20])
def test_rope_store_quantizes_as_torch_does(code, dim):
    parts = _random(1, 5, 4 * dim) * torch.logspace(-40, 30, 5)[:, None]
    parts[0, 2] = 0.0
    (k_cache, v_cache), scales = _coded(1, dim, code)
    out = torch.empty(5, 2, dim)
    options = {"heads": 2, "kv_heads": 1, "head_dim": dim}
    rope_store(parts, *TOKENS, TABLE, None, None, k_cache, v_cache, out, scales=scales, **options)
    assert torch.equal(out.view(5, -1), parts[0, :, : 2 * dim])
    _same_codes(_rows_of(k_cache, scales[0]), parts[0, :, 2 * dim : 3 * dim].unsqueeze(1), code)
    _same_codes(_rows_of(v_cache, scales[1]), parts[0, :, 3 * dim :].unsqueeze(1), code)
    for cache, own in zip((k_cache, v_cache), scales, strict=True):
        untouched = torch.ones(BLOCKS * SIZE, dtype=torch.bool).index_fill(0, SLOTS, False)
        assert (cache.view(torch.uint8).flatten(0, 1)[untouched] == 255).all()
        assert own.transpose(1, 2).flatten(0, 1)[untouched].isnan().all()


@pytest.mark.parametrize("code", CODES)
def test_rope_store_quantizes_what_it_has_normed_and_rotated(code):
    parts, norms, (cos, sin) = _random(2, 5, 6 * 12), _random(2, 12, seed=1), _angles(6)
    args = {"heads": 2, "kv_heads": 2, "head_dim": 12, "q_norm": norms[0], "k_norm": norms[1], "eps": EPS}
    floats, out = _caches(2, 12), torch.empty(5, 2, 12)
    rope_store(parts, *TOKENS, TABLE, cos, sin, *floats, out, **args)
    caches, scales = _coded(2, 12, code)
    rope_store(parts, *TOKENS, TABLE, cos, sin, *caches, out, scales=scales, **args)
    for exact, cache, own in zip(floats, caches, scales, strict=True):
        _same_codes(_rows_of(cache, own), exact.flatten(0, 1)[SLOTS], code)


@pytest.mark.parametrize("code", CODES)
def test_codes_round_to_nearest_even_at_every_border(code):
    """All numbers of the code, all middles between two, and their neighbours; the greatest one makes the scale 1."""
    if code == torch.int8:
        numbers = torch.arange(-127.0, 128.0)
    else:
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    asked = torch.cat([numbers, middles, up, down, torch.tensor([-0.0])])
    x = asked.expand(5, 1, -1).contiguous()
    caches, scales = _coded(1, len(asked), code)
    store_kv(x, x, *TOKENS, TABLE, *caches, scales=scales)
    codes, found = _rows_of(caches[0], scales[0])
    assert (found == 1.0).all()
    _same_codes((codes, found), x, code)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_have_the_scale_nan(code, bad):
    k, v = _random(5, 2, 16), _random(5, 2, 16, seed=1)
    k[1, 0, 3] = v[2, 1, 0] = bad
    caches, scales = _coded(2, 16, code)
    store_kv(k, v, *TOKENS, TABLE, *caches, scales=scales)
    for x, cache, own in zip((k, v), caches, scales, strict=True):
        codes, found = _rows_of(cache, own)
        finite = x.isfinite().all(-1)
        assert torch.equal(found.isnan(), ~finite)
        _same_codes((codes[finite], found[finite]), x[finite], code)


@pytest.mark.parametrize("code", CODES)
def test_codes_of_numbers_near_the_ends_of_float32(code):
    """A scale may be subnormal, or too small for any; no code is beyond the greatest."""
    x = _random(5, 1, 16)
    x = x / x.abs().amax(-1, keepdim=True) * torch.tensor([1e-43, 1e-45, 2e-37, 3e38, 1e-41])[:, None, None]
    caches, scales = _coded(1, 16, code)
    store_kv(x, x, *TOKENS, TABLE, *caches, scales=scales)
    for cache, own in zip(caches, scales, strict=True):
        _same_codes(_rows_of(cache, own), x, code)


@pytest.mark.parametrize("code", CODES)
def test_the_codes_of_a_token_do_not_depend_on_the_batch(code):
    parts, norms, (cos, sin) = _random(2, 5, 4 * 8), _random(2, 8, seed=1), _angles(4)
    args = {"heads": 2, "kv_heads": 1, "head_dim": 8, "q_norm": norms[0], "k_norm": norms[1], "eps": EPS}
    (caches, scales), (alone_caches, alone_scales) = _coded(1, 8, code), _coded(1, 8, code)
    rope_store(parts, *TOKENS, TABLE, cos, sin, *caches, torch.empty(5, 2, 8), scales=scales, **args)
    for t in range(5):
        rows, positions = (x[t : t + 1] for x in TOKENS)
        part, out = parts[:, t : t + 1].contiguous(), torch.empty(1, 2, 8)
        rope_store(part, rows, positions, TABLE, cos, sin, *alone_caches, out, scales=alone_scales, **args)
    for together, one in zip((*caches, *scales), (*alone_caches, *alone_scales), strict=True):
        assert torch.equal(together.view(torch.int8), one.view(torch.int8))
