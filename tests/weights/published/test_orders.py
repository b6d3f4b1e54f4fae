"""Formats whose tensors are in an order of their own: AWQ's gemv, Marlin, HQQ, torchao, GPTQ with rules per module.
What they hold is compared with the codes that were encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.weights.published import unquantized, with_own_file
from kvasir.weights.published.view import DecodedView
from kvasir.weights.source import SafetensorsSource
from tests.weights.published import encode

RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((128, 256), np.float32)
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemv"}


def opened(
    folder: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> DecodedView:
    named = {f"a.{name}": np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata)
    view = unquantized({"quantization_config": settings}, SafetensorsSource(folder / "model.safetensors"))[1]
    assert isinstance(view, DecodedView)
    return view


def spread(numbers: np.ndarray, cols: int) -> np.ndarray:
    return numbers.astype(np.float32).repeat(cols // numbers.shape[1], 1)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_gemv(tmp_path, group):
    view = opened(tmp_path, AWQ | {"group_size": group}, encode.awq_gemv(WEIGHT, group))
    codes, zeros, scales = encode.with_zeros(WEIGHT, group, 4, np.float16)
    expected = (codes.astype(np.float32) - spread(zeros, 256)) * spread(scales, 256)
    assert view.info("a.weight").dtype == ("F16" if group == 32 else "INT4_ZP")
    assert np.array_equal(view.array("a.weight").astype(np.float16), expected.astype(np.float16))


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_activation_order_of_compressed_tensors(tmp_path, group, symmetric):
    tensors = encode.w4a16_act_order(WEIGHT, group)
    data, index = tensors["weight_packed"].view(np.uint8), tensors["weight_g_idx"]
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(WEIGHT.shape).astype(np.float32)
    zeros = np.full((128, 256 // group), 8, np.uint8)
    if not symmetric:
        packed = np.ascontiguousarray(tensors["weight_zero_point"].T).view(np.uint8)
        zeros = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1, 128).T
    kept = {kind: array for kind, array in tensors.items() if kind != "weight_zero_point" or not symmetric}
    view = opened(tmp_path, {"quant_method": "compressed-tensors"}, kept)
    info = view.info("a.weight")
    expected = (codes - zeros[:, index]) * tensors["weight_scale"].astype(np.float32)[:, index]
    assert list(view.names()) == ["a.weight"] and info.dtype == ("Q4_0" if symmetric else "INT4_ZP")
    assert info.inputs is not None and (np.diff(index[info.inputs.order]) >= 0).all()
    assert np.array_equal(view.array("a.weight"), expected.astype(ml_dtypes.bfloat16))
    encode.assert_same_packed(view, "a.weight")
    in_order = opened(tmp_path, {"quant_method": "compressed-tensors"}, {**kept, "weight_g_idx": np.full(256, -1)})
    assert in_order.info("a.weight").inputs is None, "-1: columns as they are"
    with pytest.raises(ModelFileError, match="groups that have no scale"):
        opened(tmp_path, {"quant_method": "compressed-tensors"}, {**kept, "weight_g_idx": np.full(256, 5)})


@pytest.mark.parametrize("block", [64, 128])
def test_fp4_of_bitsandbytes(tmp_path, block):
    tensors = encode.bnb_fp4(WEIGHT, block)
    view = opened(tmp_path, {"quant_method": "bitsandbytes"}, tensors)
    codes = np.concatenate((tensors["weight"] >> 4, tensors["weight"] & 15), axis=1).reshape(-1, block)
    expected = tensors["weight.quant_map"][codes] * tensors["weight.absmax"][:, None]
    assert list(view.names()) == ["a.weight"] and view.info("a.weight").dtype == "BF16"
    assert np.array_equal(view.array("a.weight"), expected.astype(ml_dtypes.bfloat16).reshape(WEIGHT.shape))


def test_mxfp8_of_modelopt(tmp_path):
    tensors = encode.mxfp8(WEIGHT)
    view = opened(tmp_path, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, tensors)
    each = np.exp2(tensors["weight_scale"].astype(np.float32) - 127).repeat(32, 1)
    assert view.info("a.weight").dtype == "BF16" and "MXFP8" in view.note
    assert np.array_equal(view.array("a.weight").astype(np.float32), tensors["weight"].astype(np.float32) * each)


@pytest.mark.parametrize("settings", [
    {"quant_method": "marlin", "bits": 4, "group_size": 128},
    {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
])  # fmt: skip
def test_marlin(tmp_path, settings):
    view = opened(tmp_path, settings, {**encode.marlin(WEIGHT), "workspace": np.zeros(16, np.int32)})
    codes, scales = encode.symmetric(WEIGHT, 128, 4, np.float16)
    assert list(view.names()) == ["a.weight"] and view.info("a.weight").dtype == "Q4_0"
    assert np.array_equal(view.array("a.weight"), codes * spread(scales, 256))


def test_marlin_with_one_group(tmp_path):
    """Its scales have an order of 32."""
    tensors = encode.marlin(WEIGHT)
    order = [2 * first + step for first in range(4) for step in (0, 1, 8, 9, 16, 17, 24, 25)]
    scales = RNG.uniform(0.5, 1, 128).astype(np.float16)
    tensors["s"] = scales.reshape(-1, 32)[:, order].reshape(1, 128)
    view = opened(tmp_path, {"quant_method": "marlin"}, tensors)
    codes, _ = encode.symmetric(WEIGHT, 128, 4, np.float16)
    assert np.array_equal(view.array("a.weight"), codes * scales.astype(np.float32)[:, None])


def test_gptq_with_rules_per_module(tmp_path):
    """A module of 8 bits, one of 4, and one that is not quantized."""
    rules = {"+:.*b": {"bits": 8, "group_size": 64}, "-:.*c": {}}
    settings = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "dynamic": rules}
    tensors = {f"a.{kind}": array for kind, array in encode.gptq_asymmetric(WEIGHT).items()}
    tensors |= {f"b.{kind}": array for kind, array in encode.gptq_asymmetric(WEIGHT, 64, 8).items()}
    view = opened(tmp_path, settings, {**tensors, "c.weight": WEIGHT})
    assert [view.info(f"a.{name}.weight").dtype for name in "abc"] == ["INT4_ZP", "INT8_ZP", "F32"]
    for name, bits, group in (("a", 4, 128), ("b", 8, 64)):
        codes, zeros, scales = encode.with_zeros(WEIGHT, group, bits, np.float16)
        expected = (codes.astype(np.float32) - spread(zeros, 256)) * spread(scales, 256)
        assert np.array_equal(view.array(f"a.{name}.weight"), expected)


def test_modelopt_settings_in_a_file_of_their_own(tmp_path):
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    assert with_own_file({"hidden_size": 8}, tmp_path) == {"hidden_size": 8}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    config = with_own_file({"hidden_size": 8}, tmp_path)
    view = opened(tmp_path, config["quantization_config"], encode.nvfp4(WEIGHT))
    assert view.info("a.weight").dtype == "NVFP4_SCALED" and "KV cache" in view.note
    assert with_own_file({"quantization_config": {"quant_method": "x"}}, tmp_path)["quantization_config"] == {
        "quant_method": "x"
    }


def test_nf4_under_another_type(tmp_path):
    tensors = encode.nf4(WEIGHT)
    expected = opened(tmp_path, {"quant_method": "bitsandbytes"}, tensors).array("a.weight")
    tensors["weight"] = tensors["weight"].reshape(-1).view(ml_dtypes.bfloat16)[:, None]
    found = opened(tmp_path, {"quant_method": "bitsandbytes"}, tensors).array("a.weight")
    assert np.array_equal(found, expected)


# --- HQQ --------------------------------------------------------------------------------------------


def hqq(bits: int, axis: int, dtype: Any = np.float16) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(tensors, expected values)"""
    size = 64
    groups = WEIGHT.size // size
    shape = (groups, size) if axis == 1 else (size, groups)
    codes = RNG.integers(0, 1 << bits, shape, dtype=np.uint8)
    scale = RNG.uniform(0.01, 0.1, (groups, 1) if axis == 1 else (1, groups)).astype(dtype)
    zero = RNG.uniform(0, 1 << bits, scale.shape).astype(dtype)
    packing, width, word = ("3bit_32", 30, np.int32) if bits == 3 else (f"{bits}bit_u8", 8, np.uint8)
    each = width // bits
    rows = -(-shape[0] // each)
    packed = np.zeros((rows, shape[1]), np.int64)
    for row in range(shape[0]):
        packed[row % rows] |= codes[row].astype(np.int64) << width - bits * (row // rows + 1)
    tensors = {
        "W_q": packed.astype(word), "scale": scale, "zero": zero, "shape": np.array(WEIGHT.shape, np.int64),
        "packing": np.frombuffer(packing.encode(), np.uint8), "nbits": np.array(bits, np.int32),
        "group_size": np.array(size, np.int32), "axis": np.array(axis, np.int32), "round_zero": np.array(0, np.uint8),
    }  # fmt: skip
    return tensors, ((codes.astype(dtype) - zero) * scale).reshape(WEIGHT.shape)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq(tmp_path, bits, axis):
    tensors, expected = hqq(bits, axis)
    view = opened(tmp_path, {"quant_method": "hqq", "quant_config": {}}, {**tensors, "bias": np.ones(128, np.float16)})
    assert set(view.names()) == {"a.weight", "a.bias"}
    assert view.info("a.weight").dtype == ("F16" if axis == 0 else "INT8_ZP" if bits == 8 else "INT4_ZP")
    assert np.array_equal(view.array("a.weight"), expected)
    encode.assert_same_packed(view, "a.weight")


@pytest.mark.parametrize("change", [
    {"packing": np.frombuffer(b"4bit_16", np.uint8)}, {"shape": np.array([128, 0])}, {"shape": np.array([1 << 40, 2])},
    {"axis": np.array(2)}, {"group_size": np.array(7)}, {"group_size": np.ones(2, np.float32)},
    {"nbits": np.array(3, np.int32)}, {"scale": np.ones((3, 1), np.float16)}, {"zero": np.ones((512, 1), np.uint8)},
    {"W_q": np.zeros((5, 64), np.uint8)}, {"W_q": np.zeros((256, 64), np.int32)},
])  # fmt: skip
def test_hqq_that_does_not_fit_is_refused(tmp_path, change):
    with pytest.raises(ModelFileError, match=r"^a: "):
        opened(tmp_path, {"quant_method": "hqq"}, {**hqq(4, 1)[0], **change}).array("a.weight")


# --- torchao ----------------------------------------------------------------------------------------

TORCHAO = {"quant_method": "torchao", "quant_type": {}}


def metadata(kind: str, block: list[int], parts: tuple[str, ...] = ("qdata", "scale")) -> dict[str, str]:
    data = {"block_size": block, "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    about = {"_type": kind, "_data": data, "_tensor_data_names": parts}
    names = ["a.q.weight", "a.norm.weight"]
    return {"tensor_names": json.dumps(names), names[0]: json.dumps(about), names[1]: '{"_type": "Tensor"}'}


@pytest.mark.parametrize(("kind", "block"), [
    ("Int8Tensor", [1, 256]), ("Int8Tensor", [128, 256]), ("IntxUnpackedToInt8Tensor", [1, 32]),
    ("Float8Tensor", [1, 256]), ("Float8Tensor", [128, 128]), ("Float8Tensor", [1, 64]),
])  # fmt: skip
def test_torchao(tmp_path, kind, block):
    grid = 128 // block[0], 256 // block[1]
    scale = RNG.uniform(0.01, 0.1, grid).astype(np.float32)
    is_float = kind == "Float8Tensor"
    qdata = WEIGHT.astype(ml_dtypes.float8_e4m3fn) if is_float else RNG.integers(-128, 128, WEIGHT.shape, np.int8)
    tensors = {"q._weight_qdata": qdata, "q._weight_scale": scale, "norm.weight": np.ones(4, np.float32)}
    view = opened(tmp_path, TORCHAO, tensors, metadata(kind, block))
    group = 128 if is_float else 64
    packed = ("FP8" if is_float else "INT8") if block[1] % group == 0 else "BF16"
    assert set(view.names()) == {"a.q.weight", "a.norm.weight"} and view.info("a.q.weight").dtype == packed
    each = scale.repeat(block[0], 0).repeat(block[1], 1)
    expected = qdata.astype(np.float32) * each
    assert np.abs(view.array("a.q.weight").astype(np.float32) - expected).max() <= np.abs(expected).max() / 128
    encode.assert_same_packed(view, "a.q.weight")


def test_torchao_zero_points(tmp_path):
    qdata = RNG.integers(-8, 8, WEIGHT.shape, np.int8)
    scale, zero = RNG.uniform(0.01, 0.1, (128, 8)).astype(ml_dtypes.bfloat16), RNG.integers(-8, 8, (128, 8), np.int8)
    tensors = {"q._weight_qdata": qdata, "q._weight_scale": scale, "q._weight_zero_point": zero}
    about = metadata("IntxUnpackedToInt8Tensor", [1, 32], ("qdata", "scale", "zero_point"))
    expected = (qdata - zero.repeat(32, 1)) * scale.astype(np.float32).repeat(32, 1)
    found = opened(tmp_path, TORCHAO, tensors, about).array("a.q.weight")
    assert np.array_equal(found, expected.astype(ml_dtypes.bfloat16))


def test_torchao_int4(tmp_path):
    codes = RNG.integers(-8, 8, WEIGHT.shape, np.int8)
    packed = (codes[:, ::2] & 15 | codes[:, 1::2] << 4).astype(np.int8)
    scale, zero = (RNG.uniform(0.01, 0.1, (2, 128)).astype(ml_dtypes.bfloat16) for _ in range(2))
    tensors = {"q._weight_qdata": packed, "q._weight_scale": scale, "q._weight_zero_point": zero}
    about = metadata("Int4Tensor", [1, 128], ("qdata", "scale", "zero_point"))
    expected = codes * spread(scale.T, 256) + spread(zero.T, 256)
    found = opened(tmp_path, TORCHAO, tensors, about).array("a.q.weight")
    assert np.array_equal(found, expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("change", "error", "match"), [
    ({"a.q.weight": '{"_type": "Int4PreshuffledTensor"}'}, UnsupportedModel, "Int4PreshuffledTensor"),
    ({"a.q.weight": "{"}, ModelFileError, "not JSON"),
    ({"a.q.weight": "[1]"}, ModelFileError, "expected a dict"),
    ({"tensor_names": "[4]"}, ModelFileError, "no text"),
    (metadata("Int8Tensor", [0, 4]), ModelFileError, "block_size"),
    (metadata("Int8Tensor", [1, 32]), ModelFileError, "scale has shape"),
    (metadata("Float8Tensor", [1, 256]), ModelFileError, "qdata of Float8Tensor is I8"),
    (metadata("Int8Tensor", [1, 256], ("qdata",)), ModelFileError, "no tensor scale"),
    (metadata("Int8Tensor", [1, 256], ("qdata", "scale", "act_pre_scale")), ModelFileError, "no tensor"),
])  # fmt: skip
def test_torchao_that_does_not_fit_is_refused(tmp_path, change, error, match):
    tensors = {"q._weight_qdata": np.ones((128, 256), np.int8), "q._weight_scale": np.ones((128, 1), np.float32)}
    with pytest.raises(error, match=match):
        opened(tmp_path, TORCHAO, tensors, {**metadata("Int8Tensor", [1, 256]), **change}).array("a.q.weight")


# --- activations and the KV cache -------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "expected"), [
    ({"config_groups": {"group_0": {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True,
        "strategy": "token"}}}}, "activations are not quantized by the file's scheme (dynamic 8-bit int per token)"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
     "the KV cache is not quantized by the file's scheme (static 8-bit float per tensor): --kv-dtype"),
    ({"config_groups": {"group_0": {"input_activations": None}}}, ""),
])  # fmt: skip
def test_what_the_settings_say_about_rows_is_reported(tmp_path, settings, expected):
    tensors = {**encode.w8a8(WEIGHT), "k_scale": np.ones(1, np.float32)}
    view = opened(tmp_path, {"quant_method": "compressed-tensors", **settings}, tensors)
    assert list(view.names()) == ["a.weight"] and view.info("a.weight").dtype == "INT8"
    assert expected in view.note and ("scheme" in view.note) == bool(expected)
