"""Products with packed float matrices: the bits of their contract, whatever the instruction set and the company."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ops import native as door
from kvasir.ops.linear import native
from kvasir.ops.linear.packed import PackedMatrix, num_segments, pack_rows
from kvasir.quant import blocks_own
from kvasir.quant.gguf_quantize import quantize
from kvasir.quant.gguf_types import GGMLType, dequantize
from tests.examples import examples
from tests.isas import restore_isa  # noqa: F401 - a fixture of all tests here

from .products import ISAS, assert_only_the_row_counts
from .test_native import bits, fma

pytestmark = pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}")

# (format, what meets it)
KINDS = [("F32", "auto"), ("F16", "auto"), ("BF16", "float32"), ("BF16", "auto")]
HOSTILE = np.array([0.0, -0.0, 1e-42, -1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan, 1.0], np.float32)


def draw(seed: int, *shape: int, hostile: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape, np.float32)
    return np.where(random.random(shape) < hostile, random.choice(HOSTILE, shape), values).astype(np.float32)


def rounded(values: np.ndarray, format: str) -> np.ndarray:
    """float32 values as the format holds them."""
    kind = GGMLType[format]
    return dequantize(quantize(values, kind), kind, values.shape)


def pack(weight: np.ndarray, format: str, activation: str = "auto", segments: int = 1) -> PackedMatrix:
    raw = quantize(weight, GGMLType[format])
    return pack_rows(format, raw, *weight.shape, segments, activation=activation, threads=1)


def contract(packed: PackedMatrix, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The sum in its order, one rounding at a time, for values without denormals on the way."""
    in_pairs = packed.activation == "bfloat16"
    w_SNk = rounded(weight, packed.format).reshape(len(weight), packed.segments, -1).transpose(1, 0, 2)
    x = rounded(x, "BF16") if in_pairs else x
    x_STk = x.reshape(len(x), packed.segments, -1).transpose(1, 0, 2)
    width = x_STk.shape[-1]
    order = list(range(width))
    if in_pairs:  # the second of a pair first
        order = [k for first in range(0, width, 2) for k in (first + 1, first) if k < width]
    parts = np.zeros((packed.segments, len(x), len(weight)), np.float32)
    for k in order:
        parts = fma(x_STk[:, :, None, k], w_SNk[:, None, :, k], parts)
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


@pytest.mark.parametrize(("format", "activation"), KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "segments"), [(1, 1, 1), (17, 15, 1), (40, 33, 1), (100, 72, 8), (33, 44, 4), (20, 1000, 1)]
)
def test_sums_are_added_in_the_defined_order(format, activation, outputs, inputs, segments):
    weight, x, bias, residual = draw(1, outputs, inputs), draw(2, 13, inputs), draw(3, outputs), draw(4, 13, outputs)
    packed = pack(weight, format, activation, segments)
    expected = contract(packed, weight, x)
    for isa in ISAS:
        door.force_isa(isa)
        assert np.array_equal(bits(native.product(packed, x)), bits(expected)), isa
        found = native.product(packed, x, bias, residual)
        assert np.array_equal(bits(found), bits(residual + (expected + bias))), isa


@pytest.mark.parametrize("activation", ["auto", "float32"])
@pytest.mark.parametrize(("outputs", "groups", "segments"), [(1, 1, 1), (40, 3, 1), (33, 4, 4), (100, 2, 2)])
def test_fp8_has_a_chain_per_group(activation, outputs, groups, segments):
    """All codes but NaN's; with denormals, that bfloat16 has as normal numbers."""
    random = np.random.default_rng(20)
    blocks = np.empty((outputs, groups), blocks_own.FP8)
    blocks["qs"] = random.choice([code for code in range(256) if code & 127 != 127], blocks["qs"].shape)
    blocks["d"] = random.uniform(-0.1, 0.1, blocks.shape)
    packed = pack_rows("FP8", blocks.view(np.uint8), outputs, 128 * groups, segments, activation=activation)
    assert packed.activation == ("float32" if activation == "float32" else "bfloat16")
    numbers = blocks["qs"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(
        native.lookup(packed, range(outputs)), (numbers * blocks["d"][..., None]).reshape(outputs, -1)
    )
    x, bias, residual = draw(21, 13, 128 * groups), draw(22, outputs), draw(23, 13, outputs)
    meets = (rounded(x, "BF16") if activation == "auto" else x).reshape(13, groups, 128)
    order = [
        k for first in range(0, 128, 2) for k in ((first + 1, first) if activation == "auto" else (first, first + 1))
    ]
    parts, per = np.zeros((segments, 13, outputs), np.float32), groups // segments
    for group in range(groups):
        part = np.zeros((13, outputs), np.float32)
        for k in order:
            part = fma(meets[:, group, k, None], numbers[None, :, group, k], part)
        parts[group // per] = fma(blocks["d"][:, group], part, parts[group // per])
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    for isa in ISAS:
        door.force_isa(isa)
        assert np.array_equal(bits(native.product(packed, x)), bits(parts[0])), isa
    assert_only_the_row_counts(packed, x, bias, residual, 24)


@pytest.mark.parametrize(("format", "activation"), KINDS)
@pytest.mark.parametrize("segments", [1, 8])
def test_against_float64(format, activation, segments):
    weight, x = draw(5, 300, 1024), draw(6, 70, 1024)
    found = native.product(pack(weight, format, activation, segments), x)
    meets = rounded(x, "BF16") if (format, activation) == ("BF16", "auto") else x
    exact = meets.astype(np.float64) @ rounded(weight, format).astype(np.float64).T
    # Sums of 1024 products of the same inputs, each addition off by 6e-8 of the sum so far.
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()


@examples(60)
@given(
    kind=st.sampled_from(KINDS),
    outputs=st.integers(1, 80),
    inputs=st.one_of(st.integers(1, 40), st.just(1000)),
    rows=st.integers(1, 70),
    segments=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1 << 30),
    hostile=st.sampled_from([0.0, 0.1]),
)
def test_bits_depend_on_nothing_but_the_row(kind, outputs, inputs, rows, segments, seed, hostile):
    format, activation = kind
    inputs = -(-inputs // segments) * segments
    packed = pack(draw(seed, outputs, inputs), format, activation, segments)
    x = draw(seed + 1, rows, inputs, hostile=hostile)
    bias, residual = draw(seed + 2, outputs), draw(seed + 3, rows, outputs)
    assert_only_the_row_counts(packed, x, bias, residual, seed)


@pytest.mark.parametrize(("format", "activation"), KINDS)
def test_hostile_rows_do_not_affect_other_rows(format, activation):
    packed = pack(draw(7, 50, 64), format, activation, 2)
    x = draw(8, 20, 64)
    expected = bits(native.product(packed, x))
    x[::2] = draw(9, 10, 64, hostile=0.5)
    x[0], x[2] = np.nan, np.inf
    for isa in ISAS:
        door.force_isa(isa)
        found = native.product(packed, x)
        assert np.array_equal(bits(found)[1::2], expected[1::2]), isa
        assert np.isnan(found[0]).all()


def test_denormal_halves_count_in_full():
    """Float16 denormals are ordinary numbers in float32, in which all is computed."""
    weight = np.array([[2.0**-24], [-(2.0**-15)], [1023 * 2.0**-24]], np.float32)
    packed = pack(weight, "F16")
    for isa in ISAS:
        door.force_isa(isa)
        assert np.array_equal(native.product(packed, np.ones((1, 1), np.float32))[0], weight[:, 0]), isa


@pytest.mark.parametrize("activation", ["auto", "float32"])
def test_converted_activations_match_their_format(activation):
    """Rows padded to whole groups per segment, rounded to nearest even where the format asks for it."""
    packed = pack(draw(10, 4, 6), "BF16", activation, segments=2)
    x = draw(11, 3, 6, hostile=0.2)
    for isa in ISAS:
        door.force_isa(isa)
        prepared = native.prepare(packed, x)
        assert prepared.shape == (3, packed.activated_bytes) and packed.activated_bytes % 64 == 0
        number = np.uint32 if activation == "float32" else np.uint16
        segments = prepared.view(number)[:, :8].reshape(3, 2, 4)
        expected = x.view(np.uint32) if activation == "float32" else quantize(x, GGMLType.BF16).view(np.uint16)
        assert np.array_equal(segments[:, :, :3], expected.reshape(3, 2, 3)), isa
        assert not segments[:, :, 3].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activated": np.zeros((2, 64), np.float32)}, "activated.*uint8"),
        ({"activated": np.zeros((2, 100), np.uint8)}, r"activated.*\(2, 64\)"),
        ({"out": np.zeros((2, 9), np.float32)}, r"out.*\(2, 8\)"),
        ({"bias": np.zeros(9, np.float32)}, r"bias.*\(8,\)"),
        ({"residual": np.zeros((1, 8), np.float32)}, "residual"),
        ({"panels": (0, 2)}, "panels.*0.*1"),
        ({"panels": (1, 0)}, "panels.*0.*1"),
    ],
)
def test_arrays_that_cannot_be_read_safely_are_refused(change, message):
    packed = pack(draw(12, 8, 10), "F32")
    arguments = {"activated": native.prepare(packed, draw(13, 2, 10)), "out": np.zeros((2, 8), np.float32), **change}
    with pytest.raises(ValueError, match=message):
        native.linear(packed, **arguments)


def test_unaligned_activations_are_refused():
    packed = pack(draw(12, 8, 10), "F32")
    activated = native.aligned(200)[1 : 1 + 64].reshape(1, 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        native.linear(packed, activated, np.zeros((1, 8), np.float32))


@pytest.mark.parametrize("ids", [[-1], [8], [[0]]])
def test_ids_outside_are_refused(ids):
    with pytest.raises(ValueError, match="ids"):
        native.lookup(pack(draw(12, 8, 10), "F32"), ids)


def test_segments_leave_whole_groups():
    assert [num_segments(width, "F32") for width in (1024, 128, 96, 172, 44, 22, 7)] == [8, 4, 4, 4, 2, 1, 1]
    assert all(num_segments(width, "BF16") == num_segments(width, "F32") for width in range(1, 3000))
    assert [num_segments(width, "Q8_0") for width in (1024, 768, 896, 128, 96, 172)] == [8, 4, 2, 2, 1, 1]
    assert [num_segments(width, "Q4_K") for width in (4096, 2048, 512, 768)] == [8, 8, 2, 1]
    assert num_segments(2048, "IQ2_S") == num_segments(2048, "Q8_0")
    assert num_segments(2048, "TQ1_0") == num_segments(2048, "TERNARY") == 8
