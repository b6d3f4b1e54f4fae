"""Products with packed integer matrices: the bits of their contract, whatever the instruction set and the company."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ops import native as door
from kvasir.ops.linear import native
from kvasir.ops.linear.packed import PackedMatrix, pack_rows
from kvasir.quant import blocks_basic, blocks_k, blocks_own
from kvasir.quant.gguf_quantize import quantize
from kvasir.quant.gguf_types import GGMLType, dequantize
from tests.examples import examples
from tests.isas import restore_isa  # noqa: F401 - a fixture of all tests here

from .products import ISAS, assert_only_the_row_counts
from .test_native import bits, fma
from .test_packed import SAME_64, all_rows, raw_rows, values_of

pytestmark = pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}")

BY_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
BY_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0")
BY_64 = SAME_64  # groups of 64, with activations per 32
NAMES = (*BY_32, *BY_64, *BY_256)
HOSTILE = np.array([0.0, -0.0, 1e-42, -1e-38, 3e38, -3e38, 1e-30, np.inf, -np.inf, np.nan], np.float32)

# csrc/int_formats.h
GROUP_32 = np.dtype([("q", "i1", 32), ("scale", "<f4"), ("start", "<i4"), ("half", "<i4"), ("scaled_sum", "<f4")])
GROUP_256 = np.dtype(
    [
        *(("q", "i1", 256), ("start", "<i4", 16), ("sum16", "<i2", 16), ("sum32", "<i2", 8)),
        *(("scale", "<f4"), ("reserved", "<i4", 3)),
    ]
)


def draw(seed: int, *shape: int, hostile: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape, np.float32)
    return np.where(random.random(shape) < hostile, random.choice(HOSTILE, shape), values).astype(np.float32)


def pack(name: str, rows: int, cols: int, segments: int = 1, seed: int = 0) -> tuple[PackedMatrix, np.ndarray]:
    """A matrix of random blocks, and the blocks."""
    raw = raw_rows(GGMLType[name], rows, cols, seed)
    return pack_rows(name, raw, rows, cols, segments, threads=1), raw


def groups_of(packed: PackedMatrix, x: np.ndarray) -> np.ndarray:
    """The activations of x, [T, segments, groups]; segments of groups of 32 are padded to an even number of them."""
    is_small = packed.activation == "q8_32"
    layout, unit = (GROUP_32, 64) if is_small else (GROUP_256, 256)
    count = packed.segments * -(-packed.cols // packed.segments // unit) * (2 if is_small else 1)
    prepared = np.ascontiguousarray(native.prepare(packed, x)[:, : count * layout.itemsize])
    return prepared.view(layout).reshape(len(x), packed.segments, -1)


def quantized(packed: PackedMatrix, x: np.ndarray) -> np.ndarray:
    """x as the kernel sees it, float64."""
    groups = groups_of(packed, x)
    values = groups["q"] * groups["scale"][..., None].astype(np.float64)
    return values.reshape(len(x), packed.segments, -1)[:, :, : packed.cols // packed.segments].reshape(x.shape)


def as_quantized(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(q, scale) of finite x by the definition, [T, cols] and [T, groups]."""
    x = x.reshape(len(x), -1, group)
    most = np.abs(x).max(axis=-1)
    scale = most / np.float32(127)
    empty = scale < np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        factor = np.where(empty, np.float32(0), np.float32(127) / most)
    q = np.clip(np.rint(x * factor[..., None]), -127, 127)
    return q.reshape(len(x), -1), np.where(empty, np.float32(0), scale)


@pytest.mark.parametrize(("name", "group"), [("Q4_0", 32), ("Q4_K", 256)])
@pytest.mark.parametrize("segments", [1, 2])
def test_converted_activations_match_their_format(name, group, segments):
    packed, _ = pack(name, 16, 3 * group * segments, segments)
    x = draw(1, 9, packed.cols)
    x[1] *= 1e30
    x[2] *= 1e-37  # some groups are flushed to 0
    x[3] = 0
    x[4, :group] = 1e-42
    x[5, ::7] = 0.5
    q, scale = as_quantized(x, group)
    for isa in ISAS:
        door.force_isa(isa)
        groups = groups_of(packed, x)[:, :, :3]
        assert np.array_equal(groups["q"].reshape(9, -1), q), isa
        assert np.array_equal(groups["scale"].reshape(9, -1), scale), isa
        sums = groups["q"].astype(np.int32).sum(axis=-1)
        if group == 32:
            assert np.array_equal(groups["start"], -8 * sums)
            assert np.array_equal(groups["half"], -8 * groups["q"][..., :16].astype(np.int32).sum(axis=-1))
            assert np.array_equal(groups["scaled_sum"], groups["scale"] * sums.astype(np.float32))
        else:
            assert np.array_equal(groups["sum16"], groups["q"].reshape(9, segments, 3, 16, 16).sum(-1, dtype=np.int32))
            assert np.array_equal(groups["start"], -32 * groups["sum16"].astype(np.int32))
            assert np.array_equal(groups["sum32"].sum(axis=-1), sums)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_is_nan(name, poison):
    packed, _ = pack(name, 16, 1024)
    for isa in ISAS:
        door.force_isa(isa)
        for column in (0, 255, 700):
            x = draw(2, 2, 1024)
            before = groups_of(packed, x)
            x[1, column] = poison
            groups = groups_of(packed, x)
            group = column * groups.shape[2] // 1024
            assert np.isnan(groups["scale"][1, 0, group]), isa
            groups[1, 0, group] = before[1, 0, group]
            assert np.array_equal(groups, before), isa


@pytest.mark.parametrize("segments", [1, 2])
def test_rows_of_bitnet_share_one_scale(segments):
    raw = raw_rows(GGMLType.BITNET, 40, 1024)
    raw.view(GGMLType.BITNET.layout)["d"] = 1 / 3  # which float16 has not
    packed = pack_rows("BITNET", raw, 40, 1024, segments, threads=1)
    assert (packed.format, packed.activation) == ("TERNARY", "q8_row") and packed.scale == np.float32(1 / 3)
    x = draw(1, 6, 1024)
    x[1], x[2, 700], x[3] = 0, 1e20, x[3] * 1e-9
    most = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-5))
    q = np.rint(x * (np.float32(127) / most))
    poisoned = x.copy()
    poisoned[4, 3] = np.inf
    for isa in ISAS:
        door.force_isa(isa)
        groups = groups_of(packed, x)
        assert np.array_equal(groups["q"].reshape(6, -1), q), isa
        assert np.array_equal(groups["scale"].reshape(6, -1), np.repeat(most / np.float32(127), 4, axis=1)), isa
        assert np.isnan(groups_of(packed, poisoned)["scale"][4]).all(), isa
    bias, residual = draw(3, 40), draw(4, 6, 40)
    assert_only_the_row_counts(packed, x, bias, residual, 0)


def test_bitnet_keeps_scales_that_float16_has():
    raw = raw_rows(GGMLType.BITNET, 40, 512)
    scales = raw.view(GGMLType.BITNET.layout)["d"]
    scales[:] = np.random.default_rng(0).uniform(0.1, 1, scales.shape).astype(np.float16)
    packed = pack_rows("BITNET", raw, 40, 512, 2, threads=1)
    assert packed.scale == 1 and np.array_equal(all_rows(packed), values_of(GGMLType.BITNET, raw, 512))
    scales[0, 0] = 1 / 3
    with pytest.raises(ValueError, match="different scales"):
        pack_rows("BITNET", raw, 40, 512, 2, threads=1)


def parts_of(name: str, raw: np.ndarray) -> tuple[np.ndarray, ...]:
    """(levels without zero point, int64 [N, K]; then float32 [N, K / sub or 256]: what levels are scaled by and what
    is added), each as the file's own numbers, for four formats that stand for the others.
    """
    rows = len(raw)

    def levels(read, layout, size):
        blocks = raw.reshape(-1).view(layout).copy()
        if "d" in layout.names:
            blocks["d"] = 1
        for field in ("m", "dmin"):
            if field in layout.names:
                blocks[field] = 0
        if "scales" in layout.names and layout == blocks_k.Q6_K:
            blocks["scales"] = 1
        if "scales" in layout.names and layout == blocks_k.Q4_K:
            blocks["scales"][:, :8], blocks["scales"][:, 8:] = 1, 1
        out = np.empty((len(blocks), size), np.float32)
        read(blocks, out)
        return out.astype(np.int64).reshape(rows, -1)

    blocks = raw.reshape(-1).view(GGMLType[name].layout)

    def field(values):
        return values.astype(np.float32).reshape(rows, -1)

    if name in BY_64:
        return own_parts_of(name, raw)
    if name == "Q8_0":
        return levels(blocks_basic.q8, blocks_basic.Q8_0, 32), field(blocks["d"])
    if name == "Q4_1":
        return levels(blocks_basic.q4_1, blocks_basic.Q4_1, 32), field(blocks["d"]), field(blocks["m"])
    if name == "Q6_K":
        return levels(blocks_k.q6_k, blocks_k.Q6_K, 256), field(blocks["d"]), field(blocks["scales"])
    scales, minima = blocks_k.six_bit_scales(blocks["scales"])
    q4_k = levels(blocks_k.q4_k, blocks_k.Q4_K, 256)
    return q4_k, field(blocks["d"]), field(scales), field(blocks["dmin"]), field(minima)


def own_parts_of(name: str, raw: np.ndarray) -> tuple[np.ndarray, ...]:
    """As `parts_of`, with everything per group of 64; NVFP4's scales per 16, and then the scale of the whole."""
    blocks = raw.reshape(-1).view(GGMLType[name].layout).reshape(len(raw), -1)
    codes = blocks["qs"].reshape(len(raw), -1).astype(np.int64)
    if name in ("INT4", "INT8"):
        return (codes & 15) - 8 if name == "INT4" else codes - 128, blocks["d"]
    if name == "NF4":
        return np.rint(blocks_own.NF4 * 8192).astype(np.int64)[codes & 15], blocks["d"]
    if name == "INT4_ZP":
        scale = blocks["d"].astype(np.float32)
        return codes & 15, scale, -(blocks["zero"].astype(np.float32) * scale)
    if name == "AFFINE8":
        return codes, *(blocks[field].view(ml_dtypes.bfloat16).astype(np.float32) for field in ("d", "m"))
    one = blocks.copy()
    one["d"], one["scales"] = 1, 0x38
    levels = np.empty((blocks.size, 64), np.float32)
    blocks_own.nvfp4(one.reshape(-1), levels)
    scales = blocks["scales"].reshape(len(raw), -1)
    numbers = (scales & 127).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.where(scales & 127 == 127, 0, np.where(scales & 128, -numbers, numbers)).astype(np.float32)
    return (levels * 2).astype(np.int64).reshape(len(raw), -1), blocks["d"] / np.float32(2), numbers


def chain(name: str, raw: np.ndarray, q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """One segment's sums by the contract, one rounding at a time: q int64 [T, k], scale float32 [T, groups]."""
    level, d, *more = parts_of(name, raw)
    acc = np.zeros((len(q), len(raw)), np.float32)

    def dot(first, count):
        return q[:, first : first + count] @ level[:, first : first + count].T

    for g in range(scale.shape[1]):
        xs = scale[:, g : g + 1]
        if name == "NVFP4_SCALED":
            part = more[0][:, 2 * g] * dot(32 * g, 16).astype(np.float32)
            part = fma(more[0][:, 2 * g + 1], dot(32 * g + 16, 16).astype(np.float32), part)
            acc = fma(d[:, g // 2] * xs, part, acc)
            continue
        if name in BY_64:
            acc = fma(d[:, g // 2] * xs, dot(32 * g, 32).astype(np.float32), acc)
            if more:
                sums = q[:, 32 * g : 32 * g + 32].sum(axis=1, keepdims=True).astype(np.float32)
                acc = fma(more[0][:, g // 2], xs * sums, acc)
            continue
        if name in ("Q8_0", "Q4_1"):
            acc = fma(d[:, g] * xs, dot(32 * g, 32).astype(np.float32), acc)
            if more:
                sums = q[:, 32 * g : 32 * g + 32].sum(axis=1, keepdims=True).astype(np.float32)
                acc = fma(more[0][:, g], xs * sums, acc)
            continue
        sub = 16 if name == "Q6_K" else 32
        part = np.zeros_like(acc)
        subs = range(g * 256 // sub, (g + 1) * 256 // sub)
        for s in subs:
            part = fma(more[0][:, s], dot(sub * s, sub).astype(np.float32), part)
        acc = fma(d[:, g] * xs, part, acc)
        if name == "Q4_K":
            sums = np.stack([q[:, sub * s : sub * (s + 1)].sum(axis=1) for s in subs], axis=1)
            least = sums @ more[2][:, subs].astype(np.int64).T
            acc = fma(-(more[1][:, g] * xs), least.astype(np.float32), acc)
    return acc


@pytest.mark.parametrize(
    "name", [*("Q8_0", "Q4_1", "Q4_K", "Q6_K"), *("INT4", "INT4_ZP", "AFFINE8", "NF4", "NVFP4_SCALED")]
)
@pytest.mark.parametrize(("outputs", "groups", "segments"), [(1, 1, 1), (17, 3, 1), (40, 8, 4), (33, 8, 8), (20, 5, 1)])
def test_sums_are_added_in_the_defined_order(name, outputs, groups, segments):
    cols = groups * GGMLType[name].block_size
    packed, raw = pack(name, outputs, cols, segments)
    x, bias, residual = draw(1, 13, cols), draw(2, outputs), draw(3, 13, outputs)
    q, scale = (values.reshape(13, segments, -1) for values in as_quantized(x, 256 if name in BY_256 else 32))
    raws = raw.reshape(outputs, segments, -1)
    parts = [
        chain(name, np.ascontiguousarray(raws[:, s]), q[:, s].astype(np.int64), scale[:, s]) for s in range(segments)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    for isa in ISAS:
        door.force_isa(isa)
        assert np.array_equal(bits(native.product(packed, x)), bits(parts[0])), isa
        found = native.product(packed, x, bias, residual)
        assert np.array_equal(bits(found), bits(residual + (parts[0] + bias))), isa


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("segments", [1, 4])
def test_against_float64(name, segments):
    packed, raw = pack(name, 70, 1024, segments)
    x = draw(5, 20, 1024)
    weight = values_of(GGMLType[name], raw, 1024).astype(np.float64)
    found = native.product(packed, x)
    seen = quantized(packed, x)
    # 1024 products in at most 80 roundings of 6e-8.
    assert (np.abs(found - seen @ weight.T) < 1e-6 * (np.abs(seen) @ np.abs(weight).T)).all()
    # Activations of 8 bits: off by half a step of 1/127 of the largest of a group, which is some 2 to 3 times the rms.
    exact = x @ weight.T
    assert np.square(found - exact).sum() < 0.015**2 * (np.square(x).sum(1)[:, None] * np.square(weight).sum(1)).sum()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_of_a_packed_matrix_have_the_values_of_the_file(name, isa, groups):
    """The files' values: those that float32 flushes to 0 aside (MXFP4 alone could hold such), and the signs of zeros
    where a scale of NVFP4 is 0."""
    door.force_isa(isa)
    packed, raw = pack(name, 21, groups * GGMLType[name].block_size, seed=groups)
    expected = values_of(GGMLType[name], raw, packed.cols) + np.float32(0 if name == "NVFP4" else -0.0)
    assert np.array_equal(bits(all_rows(packed)), bits(expected))


def test_every_exponent_of_mxfp4():
    raw = raw_rows(GGMLType.MXFP4, 256, 32)
    raw[:, 0] = np.arange(256)
    packed = pack_rows("MXFP4", raw, 256, 32, 1)
    expected = values_of(GGMLType.MXFP4, raw, 32)
    expected[np.abs(expected) < np.finfo(np.float32).tiny] *= 0
    found = all_rows(packed)
    # The least two scales are denormal, so all they scale is 0.
    assert np.array_equal(found[2:], expected[2:]) and not found[:2].any()


@pytest.mark.parametrize("to", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("cols", "segments"), [(96, 1), (256, 4), (80, 1), (100, 2)])
def test_floats_are_quantized_as_files_are(to, source, cols, segments):
    weight = draw(6, 35, cols)
    weight[3], weight[4, :32] = 0, np.linspace(-1, 1, 32)
    raw = quantize(weight, GGMLType[source])
    weight = dequantize(raw, GGMLType[source], weight.shape)
    packed = pack_rows(source, raw, 35, cols, segments, to=to, threads=1)
    width = cols // segments
    padded = np.zeros((35, segments, -(-width // 32) * 32), np.float32)
    padded[:, :, :width] = weight.reshape(35, segments, width)
    expected = dequantize(quantize(padded, GGMLType[to]), GGMLType[to], padded.shape)[:, :, :width]
    assert np.array_equal(all_rows(packed), expected.reshape(35, cols))


def test_hostile_floats_are_quantized_without_an_error():
    weight = draw(7, 20, 64, hostile=0.3)
    weight[::2] = draw(8, 10, 64)
    for to in ("Q8_0", "Q4_0"):
        packed = pack_rows("F32", weight.view(np.uint8), 20, 64, 1, to=to)
        expected = pack_rows("F32", weight[::2].copy().view(np.uint8), 10, 64, 1, to=to)
        assert np.array_equal(all_rows(packed)[::2], all_rows(expected))


@examples(60)
@given(
    name=st.sampled_from(NAMES),
    outputs=st.integers(1, 80),
    groups=st.integers(1, 5),
    rows=st.integers(1, 70),
    segments=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1 << 30),
    hostile=st.sampled_from([0.0, 0.01]),
)
def test_bits_depend_on_nothing_but_the_row(name, outputs, groups, rows, segments, seed, hostile):
    cols = groups * segments * GGMLType[name].block_size
    packed, _ = pack(name, outputs, cols, segments, seed)
    x = draw(seed + 1, rows, cols, hostile=hostile)
    bias, residual = draw(seed + 2, outputs), draw(seed + 3, rows, outputs)
    assert_only_the_row_counts(packed, x, bias, residual, seed)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_rows(name):
    """All shapes of micro-kernels, with an odd panel at the end."""
    packed, _ = pack(name, 5 * 16 - 3, 512, 2)
    x = draw(9, 40, 512)
    expected = bits(native.product(packed, x))
    for isa in ISAS:
        door.force_isa(isa)
        for rows in (*range(1, 27), 31, 32, 33, 39):
            assert np.array_equal(bits(native.product(packed, x[:rows])), expected[:rows]), (isa, rows)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_rows_do_not_affect_other_rows(name):
    packed, _ = pack(name, 50, 512, 2)
    x = draw(8, 20, 512)
    expected = bits(native.product(packed, x))
    x[::2] = draw(9, 10, 512, hostile=0.5)
    x[0, 300], x[2, 511] = np.nan, np.inf
    for isa in ISAS:
        door.force_isa(isa)
        found = native.product(packed, x)
        assert np.array_equal(bits(found)[1::2], expected[1::2]), isa
        assert np.isnan(found[[0, 2]]).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("MXFP4", "NVFP4", "AFFINE4", "AFFINE8")])
def test_hostile_scales_do_not_affect_other_rows(name):
    kind = GGMLType[name]
    raw = raw_rows(kind, 40, 512)
    expected = native.product(pack_rows(name, raw, 40, 512, 1), x := draw(10, 7, 512))
    blocks = raw.reshape(-1).view(kind.layout).reshape(40, -1)
    for field in {"d", "m", "dmin"}.intersection(kind.layout.names or ()):
        blocks[field][5::16, 0], blocks[field][9::16, 0] = np.nan, np.inf
    packed = pack_rows(name, raw, 40, 512, 1)
    rest = [n for n in range(40) if n % 16 not in (5, 9)]
    for isa in ISAS:
        door.force_isa(isa)
        found = native.product(packed, x)
        assert np.array_equal(bits(found[:, rest]), bits(expected[:, rest])), isa
        assert np.isnan(found[:, 5::16]).all() and not np.isfinite(found[:, 9::16]).any()


def test_the_largest_sums_are_exact():
    """Where every level, scale and activation is as large as it can be, integers do not overflow."""
    for name in NAMES:
        kind = GGMLType[name]
        raw = np.full((16, 512 // kind.block_size * kind.type_size), 0xFF, np.uint8)
        blocks = raw.reshape(-1).view(kind.layout)
        for field in {"d", "m", "dmin"}.intersection(kind.layout.names or ()):
            blocks[field] = 0.5 if field == "d" else -0.25
        if name.startswith("AFFINE"):
            blocks["d"], blocks["m"] = 0x3F00, 0xBE80  # the same in bfloat16
        if name == "INT8":
            blocks["qs"] = 0
        if name.endswith("_ZP"):
            blocks["zero"] = 0
        if name.startswith("NVFP4"):
            blocks["scales" if name == "NVFP4_SCALED" else "d"] = 0x7E  # 448
        if name == "MXFP4":
            blocks["e"] = 127
        if name == "Q8_0":
            blocks["qs"] = -128
        packed = pack_rows(name, raw, 16, 512, 1)
        x = np.full((1, 512), 2.0, np.float32)
        x[0, ::3] = -2.0
        weight = values_of(kind, raw, 512).astype(np.float64)
        for isa in ISAS:
            door.force_isa(isa)
            for rows in (x, np.abs(x), -np.abs(x)):
                seen = quantized(packed, rows)
                assert np.allclose(native.product(packed, rows), seen @ weight.T, rtol=1e-5, atol=1e-3), (name, isa)


@pytest.mark.parametrize(("rows", "segments"), [(1, 8), (3, 1), (4, 2), (39, 4)])
def test_wide_levels_of_several_slabs_and_chunks(rows, segments):
    """NF4 on AVX2: tiles that decode as they go, slabs of 32 rows, and 8 blocks decoded at a time."""
    packed, _ = pack("NF4", 37, 64 * 9 * segments, segments, rows)
    x = draw(rows + 1, rows, packed.cols, hostile=0.001)
    assert_only_the_row_counts(packed, x, draw(rows + 2, 37), draw(rows + 3, rows, 37), rows)
