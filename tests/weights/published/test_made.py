"""Published formats of which no file is at hand: matrices packed by the tests, value by value, and decoded; and files
that are damaged, or whose settings have no code."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.published import unquantized
from kvasir.weights.source import SafetensorsSource, WeightSource
from tests.weights.published.encode import assert_same_packed

RNG = np.random.default_rng(0)
OUT, IN, GROUP = 16, 96, 32
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def codes(*shape: int, bits: int = 4) -> np.ndarray:
    return RNG.integers(0, 1 << bits, shape, dtype=np.uint8)


def halves(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 0.1, shape).astype(np.float16)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> int32 [rows, n bits / 32], each row as a stream of bits, the lowest first."""
    rows = []
    for row in values:
        stream = sum(int(value) << bits * place for place, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(stream >> 32 * word) & 0xFFFFFFFF for word in range(count)])
    return np.array(rows, np.uint32).view(np.int32)


def opened(folder: Path, settings: object, field: str = "quantization_config", **tensors: np.ndarray) -> WeightSource:
    named = {n if "." in n else n.replace("__", "."): np.ascontiguousarray(array) for n, array in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return unquantized({field: settings}, SafetensorsSource(folder / "model.safetensors"))[1]


# --- GPTQ and AWQ -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sorted_groups", [True, False])
def test_gptq(tmp_path, bits, form, sorted_groups):
    values, zeros = codes(OUT, IN, bits=bits), codes(IN // GROUP, 32, bits=bits)
    scales = halves(IN // GROUP, 32)
    values = codes(32, IN, bits=bits)
    groups = np.arange(IN) // GROUP if sorted_groups else RNG.permutation(np.arange(IN) // GROUP)
    stored = (zeros.astype(int) - 1) % (1 << bits) if form == "gptq" else zeros
    source = opened(
        tmp_path, {"quant_method": "gptq", "bits": bits, "checkpoint_format": form},
        a__qweight=words(values, bits).T, a__qzeros=words(stored, bits), a__scales=scales,
        a__g_idx=groups.astype(np.int32),
    )  # fmt: skip
    expected = np.zeros((32, IN), np.float16)
    for row in range(32):
        for col in range(IN):
            group = groups[col]
            expected[row, col] = np.float32(int(values[row, col]) - int(zeros[group, row])) * np.float32(
                scales[group, row]
            )
    assert list(source.names()) == ["a.weight"] and source.info("a.weight").shape == (32, IN)
    assert np.array_equal(source.array("a.weight").astype(np.float16), expected)
    info = source.info("a.weight")
    assert info.dtype == ("Q8_0" if bits < 8 else "F16")
    if bits == 8:
        assert source.raw("a.weight").tobytes() == expected.tobytes()
        return
    assert (info.inputs is None) == sorted_groups
    packed = dequantize(source.raw("a.weight"), GGMLType.Q8_0, (32, IN))
    if not sorted_groups:
        packed, found = packed[:, np.argsort(info.inputs.order)], groups[info.inputs.order]
        assert (np.diff(found) >= 0).all(), "the columns of a group are adjacent"
    assert np.array_equal(packed.astype(np.float16), expected)


def test_groups_of_unequal_sizes_are_decoded(tmp_path):
    groups = np.minimum(np.arange(IN) // GROUP, 1)
    source = opened(
        tmp_path, {"quant_method": "gptq", "bits": 4}, a__qweight=words(codes(32, IN), 4).T,
        a__qzeros=words(codes(IN // GROUP, 32), 4), a__scales=halves(IN // GROUP, 32), a__g_idx=groups.astype(np.int32),
    )  # fmt: skip
    assert source.info("a.weight").dtype == "F16"


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (8, "Q8_0")])
def test_symmetric_gptq_keeps_its_codes(tmp_path, bits, kind):
    values, scales = codes(32, IN, bits=bits), halves(IN // GROUP, 32)
    zeros = np.full((IN // GROUP, 32), (1 << bits - 1) - 1)
    settings = {"quant_method": "gptq", "bits": bits, "sym": True}
    source = opened(
        tmp_path, settings, a__qweight=words(values, bits).T, a__qzeros=words(zeros, bits), a__scales=scales
    )
    expected = (values.astype(np.float32) - (1 << bits - 1)) * scales.T.astype(np.float32).repeat(GROUP, 1)
    assert source.info("a.weight").dtype == kind
    assert np.array_equal(source.array("a.weight"), expected)


def test_awq(tmp_path):
    values, zeros, scales = codes(IN, 32), codes(IN // GROUP, 32), halves(IN // GROUP, 32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that each nibble of a word holds

    def packed(matrix: np.ndarray) -> np.ndarray:
        return words(matrix.reshape(len(matrix), -1, 8)[..., order].reshape(len(matrix), -1), 4)

    source = opened(
        tmp_path, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        a__qweight=packed(values), a__qzeros=packed(zeros), a__scales=scales,
    )  # fmt: skip
    each = np.repeat(np.arange(IN // GROUP), GROUP)
    expected = (values.astype(np.float32) - zeros[each]) * scales[each].astype(np.float32)
    assert source.info("a.weight").dtype == "Q8_0"
    assert np.array_equal(source.array("a.weight"), expected.T)


# --- floats -----------------------------------------------------------------------------------------


def test_fp8_in_blocks(tmp_path):
    weight = RNG.normal(size=(200, 130)).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.uniform(0.5, 2, (2, 2)).astype(np.float32)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    source = opened(tmp_path, settings, a__weight=weight, a__weight_scale_inv=scales, n__weight=np.ones(4, np.float32))
    expected = np.array(
        [[np.float32(weight[r, c]) * scales[r // 128, c // 128] for c in range(130)] for r in range(200)]
    )
    assert np.array_equal(source.array("a.weight"), expected.astype(ml_dtypes.bfloat16))
    assert set(source.names()) == {"a.weight", "n.weight"}


def test_modelopt_nvfp4(tmp_path):
    packed, scales = codes(OUT, IN // 2, bits=8), RNG.uniform(1, 4, (OUT, IN // 16)).astype(ml_dtypes.float8_e4m3fn)
    second = np.array(0.01, np.float32)
    source = opened(
        tmp_path, {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        a__weight=packed, a__weight_scale=scales, a__weight_scale_2=second, a__input_scale=second,
    )  # fmt: skip
    for row, col in zip(RNG.integers(0, OUT, 200), RNG.integers(0, IN, 200), strict=True):
        code = packed[row, col // 2] >> 4 * (col % 2) & 15
        value = FP4[code & 7] * (-1 if code & 8 else 1)
        expected = np.float32(value) * (np.float32(scales[row, col // 16]) * second)
        assert source.array("a.weight")[row, col] == expected.astype(ml_dtypes.bfloat16)


def test_mxfp4_experts(tmp_path):
    """Their bytes become GGML's, and its decoder gives the values."""
    blocks, scales = codes(3, 8, 2, 16, bits=8), RNG.integers(120, 130, (3, 8, 2), dtype=np.uint8)
    down, down_scales = codes(3, 64, 1, 16, bits=8), RNG.integers(120, 130, (3, 64, 1), dtype=np.uint8)
    source = opened(
        tmp_path, {"quant_method": "mxfp4"}, mlp__experts__gate_up_proj_blocks=blocks,
        mlp__experts__gate_up_proj_scales=scales, mlp__experts__down_proj_blocks=down,
        mlp__experts__down_proj_scales=down_scales,
    )  # fmt: skip

    def value(data: np.ndarray, exponents: np.ndarray, row: int, col: int) -> float:
        code = int(data[row, col // 32, col % 32 // 2]) >> 4 * (col % 2) & 15
        return float(FP4[code & 7]) * (-1 if code & 8 else 1) * 2.0 ** (int(exponents[row, col // 32]) - 127)

    for expert in range(3):
        gate, up = (source.array(f"mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up"))
        assert gate.shape == up.shape == (4, 64) and source.info("mlp.experts.0.up_proj.weight").dtype == "MXFP4"
        for row in range(4):
            for col in range(64):
                assert gate[row, col] == value(blocks[expert], scales[expert], 2 * row, col)
                assert up[row, col] == value(blocks[expert], scales[expert], 2 * row + 1, col)
        last = source.array(f"mlp.experts.{expert}.down_proj.weight")
        assert last[5, 17] == value(down[expert], down_scales[expert], 5, 17)


# --- MLX --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_affine(tmp_path, bits):
    values = codes(OUT, 64, bits=bits)
    scales, biases = (RNG.normal(size=(OUT, 2)).astype(ml_dtypes.bfloat16) for _ in range(2))
    source = opened(
        tmp_path, {"bits": 4, "group_size": 32, "a": {"bits": bits, "group_size": 32}}, "quantization",
        a__weight=words(values, bits).view(np.uint32), a__scales=scales, a__biases=biases,
    )  # fmt: skip
    each = np.arange(64) // 32
    expected = values * scales[:, each].astype(np.float32) + biases[:, each].astype(np.float32)
    assert np.array_equal(source.array("a.weight"), expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("bits", "group", "dtype", "packed"), [
    (2, 64, ml_dtypes.bfloat16, "AFFINE4"), (4, 128, ml_dtypes.bfloat16, "AFFINE4"),
    (6, 64, ml_dtypes.bfloat16, "AFFINE8"), (8, 64, ml_dtypes.bfloat16, "AFFINE8"),
    (4, 64, np.float16, "Q4_1"), (3, 32, ml_dtypes.bfloat16, "Q4_1"), (8, 64, np.float16, "BF16"),
])  # fmt: skip
def test_mlx_keeps_its_codes(tmp_path, bits, group, dtype, packed):
    values = codes(OUT, 256, bits=bits)
    scales, biases = (RNG.uniform(0.01, 0.1, (OUT, 256 // group)).astype(dtype) for _ in range(2))
    source = opened(
        tmp_path, {"bits": bits, "group_size": group}, "quantization",
        a__weight=words(values, bits).view(np.uint32), a__scales=scales, a__biases=biases,
    )  # fmt: skip
    assert source.info("a.weight").dtype == packed
    assert_same_packed(source, "a.weight")


def test_numbers_that_are_not_are_refused_when_packed(tmp_path):
    weight = np.ones((16, 128), ml_dtypes.float8_e4m3fn)
    weight[3, 5] = np.nan
    source = opened(tmp_path, SCALED, a__weight=weight, a__weight_scale=np.ones((16, 1), np.float32))
    with pytest.raises(ModelFileError, match="not numbers"):
        source.raw("a.weight")


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "match"), [
    ({"quant_method": "quip"}, "quip"),
    ({}, ""),
    ([4], "expected an object"),
    ({"quant_method": "gptq", "bits": 5}, "bits is 5"),
    ({"quant_method": "gptq", "dynamic": {"+:x": {"bits": 5}}}, "bits is 5"),
    ({"quant_method": "gptq", "dynamic": ["-:x"]}, "dynamic"),
    ({"quant_method": "gptq", "checkpoint_format": "bitblas"}, "bitblas"),
    ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "marlin"}, "bits is 8"),
    ({"quant_method": "awq", "bits": 8}, "bits is 8"),
    ({"quant_method": "awq", "version": "gemv_fast"}, "gemv_fast"),
    ({"quant_method": "awq", "version": "gemv", "group_size": "128"}, "group_size"),
    ({"quant_method": "torchao"}, "no metadata of torchao"),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": [8]}, "kv_cache_scheme"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "two sizes"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transforms"),
])  # fmt: skip
def test_settings_without_code_are_refused_by_name(tmp_path, settings, match):
    if not settings:
        assert list(opened(tmp_path, settings, a__weight=np.ones(3, np.float32)).names()) == ["a.weight"]
        return
    with pytest.raises(KvasirError, match=match):
        opened(tmp_path, settings, a__weight=np.ones(3, np.float32))


GPTQ = {"quant_method": "gptq", "bits": 4}
SCALED = {"quant_method": "compressed-tensors"}
WORDS = np.zeros((12, 16), np.int32)


@pytest.mark.parametrize(("settings", "tensors"), [
    (GPTQ, {"a__qweight": WORDS}),
    (GPTQ, {"a__qweight": WORDS, "a__qzeros": np.zeros((3, 2), np.int32), "a__scales": np.ones((3, 15), np.float16)}),
    (GPTQ, {"a__qweight": WORDS, "a__qzeros": np.zeros((3, 1), np.int32), "a__scales": np.ones((3, 16), np.float16)}),
    (GPTQ, {"a__qweight": WORDS, "a__qzeros": np.zeros((3, 2), np.int32), "a__scales": np.ones((3, 16), np.float16),
            "a__g_idx": np.full(96, 3, np.int32)}),
    (SCALED, {"a__weight": np.zeros((4, 8), np.int8), "a__weight_scale": np.ones(3, np.float32)}),
    (SCALED, {"a__weight": np.zeros((4, 8), np.float32), "a__weight_scale": np.ones(4, np.float32)}),
    (SCALED, {"a__weight": np.zeros(8, np.int8), "a__weight_scale": np.ones(4, np.float32)}),
    (SCALED, {"a__weight_packed": np.zeros((4, 8), np.uint8), "a__weight_scale": np.ones((4, 2), np.uint8)}),
    (SCALED, {"a__weight_packed": np.zeros((4, 8), np.int32), "a__weight_scale": np.ones((4, 2), np.float32),
              "a__weight_shape": np.array([4, 63])}),
    (SCALED, {"a__weight_packed": np.zeros((4, 8), np.int32), "a__weight_scale": np.ones((3, 2), np.float32),
              "a__weight_shape": np.array([4, 64])}),
    ({"quant_method": "mxfp4"}, {"m__experts__down_proj_blocks": np.zeros((2, 4, 1, 15), np.uint8)}),
    ({"quant_method": "mxfp4"}, {"m__experts__down_proj_blocks": np.zeros((2, 4, 1, 16), np.uint8)}),
    ({"quant_method": "bitsandbytes"}, {"a__SCB": np.ones(4, np.float32)}),
    ({"quant_method": "bitsandbytes"}, {"a.weight.quant_state.bitsandbytes__nf4": np.frombuffer(b"{", np.uint8)}),
    ({"quant_method": "bitsandbytes"}, {"a.weight.quant_state.bitsandbytes__nf4": np.frombuffer(
        b'{"shape": [4, -1], "dtype": "bfloat16", "blocksize": 64}', np.uint8)}),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(tmp_path, settings, tensors):
    with pytest.raises(ModelFileError):
        source = opened(tmp_path, settings, **tensors)
        for name in source.names():
            source.array(name)


def test_what_is_not_quantized_stays_as_it_is(tmp_path):
    save_file({"a.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path / "model.safetensors")
    assert unquantized({"hidden_size": 3}, source) == ({"hidden_size": 3}, source)
    with pytest.raises(UnsupportedModel, match="supported: awq"):
        unquantized({"quantization_config": {"quant_method": "eetq"}}, source)
