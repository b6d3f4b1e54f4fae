"""Packing at load: every type of weight comes back as it was, or as near as its note says."""

import ml_dtypes
import numpy as np
import pytest

from kvasir.errors import ConfigError
from kvasir.ops import native as door
from kvasir.ops.linear import native
from kvasir.ops.linear.packed import PackedMatrix, error_of, num_segments, pack_rows
from kvasir.quant.gguf_quantize import quantize
from kvasir.quant.gguf_types import GGMLType, dequantize

pytestmark = pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}")

FLOATS = ("F32", "F16", "BF16")
SAME = (*FLOATS, *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"))
SAME_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
SAME_64 = ("INT4", "INT8", "INT4_ZP", "INT8_ZP", "AFFINE4", "AFFINE8", "NF4", "NVFP4_SCALED", "NVFP4")
AS_Q8_0 = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0", "Q8_K")
PACKED = {"TQ1_0": "TERNARY", "TQ2_0": "TERNARY", "NVFP4_SCALED": "NVFP4"}  # where the name differs


def raw_rows(kind: GGMLType, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Random bytes that are sound blocks: the scales are made small and finite."""
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * cols // kind.block_size, kind.type_size), np.uint8)
    fields = blocks.reshape(-1).view(kind.layout)
    if kind.layout.names is None:
        return quantize(np.random.default_rng(seed).standard_normal((rows, cols), np.float32), kind)
    for name in kind.layout.names:
        field = fields[name]
        if field.dtype.kind == "f":
            field[:] = np.random.default_rng(seed).uniform(-0.1, 0.1, field.shape)
    if kind.name.startswith("AFFINE"):
        for name in ("d", "m"):
            numbers = np.random.default_rng(seed).uniform(-0.1, 0.1, len(fields)).astype(ml_dtypes.bfloat16)
            fields[name] = numbers.view(np.uint16)
    if kind == GGMLType.MXFP4:
        blocks[:, 0] = 100 + blocks[:, 0] % 40  # the exponent
    if kind == GGMLType.IQ1_M:
        blocks[:, -1] &= 0x3F  # the scale's exponent lies in pieces
    return blocks.reshape(rows, -1)


def values_of(kind: GGMLType, raw: np.ndarray, cols: int) -> np.ndarray:
    return dequantize(np.ascontiguousarray(raw), kind, (len(raw), cols))


def all_rows(packed: PackedMatrix) -> np.ndarray:
    return native.lookup(packed, np.arange(packed.rows))


@pytest.mark.parametrize("name", [*SAME, *SAME_64, *SAME_256, "FP8", "TQ1_0", "TQ2_0"])
def test_a_files_values_are_kept_bit_for_bit(name):
    kind = GGMLType[name]
    cols = 96 if kind.block_size <= 32 else 3 * 64 if kind.block_size == 64 else 512
    raw = raw_rows(kind, 37, cols)
    packed = pack_rows(name, raw, 37, cols, num_segments(cols, name))
    assert packed.format == PACKED.get(name, name) and not packed.note
    assert np.array_equal(all_rows(packed), values_of(kind, raw, cols))


@pytest.mark.parametrize("name", AS_Q8_0)
def test_types_without_kernels_become_q8_0_and_say_so(name):
    kind = GGMLType[name]
    raw = raw_rows(kind, 20, 512)
    packed = pack_rows(name, raw, 20, 512, 1)
    assert packed.format == "Q8_0" and name in packed.note
    reference = values_of(kind, raw, 512)
    # Half a step of 1/127 of a group's largest weight, which is at most some 6 times the rms of all.
    assert error_of(packed, reference).max < 0.5 / 127 * np.abs(reference).max() / np.sqrt(np.mean(reference**2)) * 1.01


@pytest.mark.parametrize("kind", [GGMLType.F64, GGMLType.I8])
def test_other_numbers_become_float32(kind):
    values = np.arange(-60, 60).reshape(10, 12)
    packed = pack_rows(kind.name, values.astype(kind.layout).view(np.uint8).reshape(10, -1), 10, 12, 1)
    assert packed.format == "F32" and packed.note
    assert np.array_equal(all_rows(packed), values)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("to", ["F32", "BF16"])
@pytest.mark.parametrize("cols", [1, 7, 33, 1000])
def test_floats_are_widened_exactly_or_rounded_to_nearest_even(source, to, cols):
    kind = GGMLType[source]
    # All bit patterns among them: denormals, infinities, NaN.
    raw = np.random.default_rng(cols).integers(0, 256, (50, kind.row_bytes(cols)), np.uint8)
    values = values_of(kind, raw, cols)
    expected = values_of(GGMLType[to], quantize(values, GGMLType[to]), cols)
    found = all_rows(pack_rows(source, raw, 50, cols, 1, to=to))
    not_nan = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~not_nan)
    assert np.array_equal(found[not_nan].view(np.uint32), expected[not_nan].view(np.uint32))


@pytest.mark.parametrize("bits", ["q8", "q4"])
@pytest.mark.parametrize("source", FLOATS)
def test_quantizing_states_its_error(source, bits):
    to, most = {"q8": ("Q8_0", 0.01), "q4": ("Q4_0", 0.12)}[bits]
    kind = GGMLType[source]
    raw = raw_rows(kind, 64, 256)
    packed = pack_rows(source, raw, 64, 256, 8, to=to)
    found = error_of(packed, values_of(kind, raw, 256))
    # Uniform errors of half a step: steps of about 2.3 / 127 (signed 8 bits) and 2.3 / 8 of the rms (4 bits).
    assert 0 < found.mean < most and found.mean < found.max < 8 * found.mean


def test_quantized_to_floats_goes_by_float32():
    raw = raw_rows(GGMLType.Q4_K, 33, 256)
    packed = pack_rows("Q4_K", raw, 33, 256, 1, to="F32")
    assert packed.format == "F32" and packed.activation == "float32" and not packed.note
    assert np.array_equal(all_rows(packed), values_of(GGMLType.Q4_K, raw, 256))


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_stacked_parts_and_threads_change_nothing(name, threads, monkeypatch):
    monkeypatch.setattr("kvasir.ops.linear.packed.CHUNK", 64 * 64)
    kind = GGMLType[name]
    raw = raw_rows(kind, 1000, 64)
    whole = pack_rows(name, raw, 1000, 64, 2)
    parts = [raw[:7], raw[7:7], raw[7:500], raw[500:]]
    stacked = pack_rows(name, parts, 1000, 64, 2, threads=threads)
    assert np.array_equal(whole.memory, stacked.memory)


def test_views_of_a_file_are_packed_in_place():
    """Rows may be unaligned, read-only, and part of longer ones."""
    raw = raw_rows(GGMLType.F32, 40, 24)
    file = np.zeros(40 * 200 + 3, np.uint8)
    view = file[3:].reshape(40, 200)[:, 5 : 5 + 96]
    view[:] = raw
    view.flags.writeable = False
    packed = pack_rows("F32", view, 40, 24, 1)
    assert np.array_equal(all_rows(packed), raw.view(np.float32))


def test_big_matrices_start_at_a_huge_page_and_do_not_change():
    raw = raw_rows(GGMLType.F32, 1024, 1024)
    packed = pack_rows("F32", raw, 1024, 1024, 8)
    assert packed.struct.data == packed.memory.ctypes.data and packed.struct.data % (2 << 20) == 0
    assert packed.nbytes == packed.memory.nbytes == raw.nbytes and packed.shape == (1024, 1024)
    assert np.array_equal(packed.row(777), raw.view(np.float32)[777])
    with pytest.raises(ValueError, match="read-only"):
        packed.memory[0] = 1


def test_rows_after_the_last_are_zeros():
    packed = pack_rows("BF16", raw_rows(GGMLType.BF16, 17, 3), 17, 3, 1)
    panel = packed.memory[packed.nbytes // 2 :].view(np.uint16)
    assert panel.reshape(-1, 16, 2)[:, 1:].any() == np.False_


def test_activations_by_format():
    def found(name: str, activation: str) -> str:
        return pack_rows(name, raw_rows(GGMLType[name], 16, 256), 16, 256, 1, activation=activation).activation

    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_K")
    assert [found(name, "auto") for name in kinds] == ["float32", "float32", "bfloat16", "q8_32", "q8_256"]
    assert [found(name, "float32") for name in kinds] == ["float32", "float32", "float32", "q8_32", "q8_256"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"source_type": "Q9_9"}, ConfigError, "'Q9_9'"),
        ({"to": "Q9_9"}, ConfigError, "'Q9_9'"),
        ({"to": "Q6_K"}, ConfigError, "F32.*Q6_K"),
        ({"activation": "int4"}, ConfigError, "activation.*'int4'"),
        ({"rows": 5}, ValueError, "5 rows.*4"),
        ({"cols": 63}, ValueError, r"uint8 \[n, 252\]"),
        ({"parts": np.zeros((4, 64), np.float32)}, ValueError, "F32.*uint8"),
        ({"segments": 3}, ValueError, "3 segments"),
        ({"segments": 16}, ValueError, "16 segments"),
        ({"source_type": "Q8_0", "segments": 4}, ValueError, "segments"),
        ({"source_type": "Q8_0", "cols": 65}, ValueError, "whole blocks"),
        ({"source_type": "Q4_K"}, ValueError, "whole blocks"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(change, error, message):
    kind = GGMLType["Q8_0" if change.get("source_type") == "Q8_0" else "F32"]
    arguments = {"source_type": "F32", "parts": raw_rows(kind, 4, 64), "rows": 4, "cols": 64, "segments": 1, **change}
    with pytest.raises(error, match=message):
        pack_rows(**arguments)


def test_error_is_relative_to_the_rms():
    packed = pack_rows("F32", np.array([[3, 4], [0, 0]], np.float32).view(np.uint8), 2, 2, 1)
    found = error_of(packed, np.array([[3, 4], [1, 0]], np.float32))
    rms = np.sqrt(26 / 4)
    assert found == pytest.approx((1 / rms, 0.25 / rms))
    assert error_of(packed, all_rows(packed)) == (0, 0)
    with pytest.raises(ValueError, match="of shape"):
        error_of(packed, np.zeros((2, 3), np.float32))
