"""Products with quantized weights on the device: the file's values, and the bits of a row alone and in any batch."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import ml_dtypes
import numpy as np
import torch

from kvasir.ops.linear import triton as linear
from kvasir.quant.gguf_types import GGMLType, dequantize
from tests.triton.test_embedding import looked_up
from tests.triton.test_linear import DTYPES, gated, inputs, joined, parts, put, whole

CODES = ("F8_BLOCK", "F8_ROW", "I8_ROW")
FORMATS = (*linear.GGUF, *CODES)


def raw_rows(kind, rows, cols, rng):
    """Random blocks with scales of ordinary size, some of them zero or negative."""
    ggml = GGMLType[kind]
    raw = rng.integers(0, 256, (rows, ggml.row_bytes(cols)), np.uint8)
    blocks = raw.view(ggml.layout)
    for name in ("d", "dmin"):
        if name in blocks.dtype.names:
            blocks[name] = (rng.integers(-3, 8, blocks.shape) / 64).astype(np.float16)
    if kind == "MXFP4":
        blocks["e"] = rng.choice(np.array([0, 1, 120, 125, 127, 128], np.uint8), blocks.shape)
    return raw


def made(format, rows, cols, segments=1, dtype="bfloat16", seed=0):
    """A matrix and its values, float32."""
    rng = np.random.default_rng(seed)
    if format in linear.GGUF:
        raw = raw_rows(format, rows, cols, rng)
        values = dequantize(raw, GGMLType[format], (rows, cols))
        return linear.matrix_from_gguf(format, raw, rows, cols, segments, dtype, put), values
    if format == "I8_ROW":
        codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
        codes[0, :2] = -128, 127
        scale = rng.normal(size=rows).astype(np.float32)
        whole_scale = scale[:, None]
    else:
        codes = (rng.normal(size=(rows, cols)) * 10.0 ** rng.integers(-4, 3, (rows, cols))).astype(
            ml_dtypes.float8_e4m3fn
        )
        shape = (rows, 1) if format == "F8_ROW" else (-(-rows // 128), -(-cols // 128))
        scale = rng.normal(size=shape).astype(np.float32)
        whole_scale = scale if format == "F8_ROW" else np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :cols]
    values = codes.astype(np.float32) * whole_scale
    return linear.matrix_from_codes(codes, scale, segments, dtype, put), values


def close(got, x, values, dtype):
    exact = x.to(DTYPES[dtype]).double() @ torch.from_numpy(values).double().T
    sizes = x.abs().double() @ torch.from_numpy(values).abs().double().T
    assert ((got.double() - exact).abs() <= 2e-6 * sizes + 1e-30).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_holds_the_values_of_the_file(format):
    table, values = made(format, 200, 256)
    assert table.format == format
    ids = np.array([0, 1, 2, 127, 128, 199])
    assert np.array_equal(looked_up(torch.from_numpy(ids), table).numpy(), values[ids])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_values(format, dtype):
    matrix, values = made(format, 70, 256, dtype=dtype)
    x = inputs(3, 256)
    close(parts(x, matrix)[0], x, values, dtype)


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "Q4_K"])
def test_columns_may_end_within_a_chunk(format):
    matrix, values = made(format, 10, 160)
    x = inputs(3, 200)[:, :160]
    close(parts(x, matrix)[0], x, values, "bfloat16")
    assert np.array_equal(looked_up(torch.arange(10), matrix).numpy(), values)


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_product_has_the_bits_of_joined_parts(format):
    matrix, values = made(format, 20, 512, segments=4)
    x = inputs(3, 512)
    expected = joined(parts(x, matrix))
    close(expected, x, values, "bfloat16")
    assert torch.equal(whole(x, matrix), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(format):
    (matrix, _), (up, _) = made(format, 40, 256, 2), made(format, 40, 256, seed=1)
    x = inputs(34, 256)
    x[1] = torch.nan  # rows do not touch each other
    batch, both = parts(x, matrix), gated(x, up, up, "relu")
    for first, last in [(0, 1), (2, 18)]:
        assert torch.equal(parts(x[first:last], matrix), batch[:, first:last])
        assert torch.equal(gated(x[first:last], up, up, "relu"), both[first:last])


@pytest.mark.parametrize("format", FORMATS)
def test_a_gated_product_is_the_activated_gate_times_up(format):
    (gate, _), (up, _), x = made(format, 20, 256), made(format, 20, 256, seed=1), inputs(2, 256)
    expected = parts(x, gate)[0].relu() * parts(x, up)[0]
    assert torch.equal(gated(x, gate, up, "relu"), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_stacked_matrices_give_the_outputs_of_each(format):
    (q, _), (k, _), x = made(format, 20, 256), made(format, 9, 256, seed=1), inputs(1, 256)
    assert torch.equal(parts(x, linear.stacked([q, k])), torch.cat([parts(x, q), parts(x, k)], 2))


def test_formats_are_named():
    assert all(linear.can_read(format) for format in (*FORMATS, "BF16", "F16", "F32"))
    assert not linear.can_read("Q6_K")
    assert linear.unit("Q4_K") == 128
    assert linear.unit("BF16") == 1


@pytest.mark.parametrize("make", ["gguf", "codes", "floats"])
def test_segments_that_are_not_whole_chunks_are_refused(make):
    with pytest.raises(ValueError, match="segments"):
        if make == "gguf":
            made("Q8_0", 4, 320, segments=2)
        elif make == "codes":
            made("F8_ROW", 4, 192, segments=2)
        else:
            linear.matrix_from_floats(np.zeros((4, 7), np.float32), "float32", 2, put)


def test_rows_and_scales_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        linear.matrix_from_gguf("Q8_0", np.zeros((4, 33), np.uint8), 4, 32, 1, "bfloat16", put)
    with pytest.raises(ValueError, match="scales"):
        linear.matrix_from_codes(np.zeros((4, 32), np.int8), np.ones((1, 1)), 1, "bfloat16", put)
