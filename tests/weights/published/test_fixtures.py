"""Files of the reference packages: their matrices bit for bit as the packages decode them, and by a decoder of the
tests that goes value by value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvasir.models.config import read_hf_config
from kvasir.weights.published import unquantized
from kvasir.weights.published.view import DecodedView
from kvasir.weights.source import SafetensorsSource
from tests._shared import need
from tests.weights.published.encode import assert_same_packed

FOLDERS = (
    *("ct_W4A16", "ct_W4A16_ASYM", "ct_W8A16", "ct_W8A8", "ct_FP8", "ct_FP8_DYNAMIC", "ct_FP8_BLOCK", "ct_MXFP8"),
    *("ct_NVFP4", "ct_NVFP4A16", "ct_MXFP4", "ct_MXFP4A16", "bnb_nf4", "bnb_int8"),
)
PACKED = {
    **dict.fromkeys(("ct_FP8", "ct_FP8_DYNAMIC", "ct_FP8_BLOCK"), "FP8"),
    **dict.fromkeys(("ct_NVFP4", "ct_NVFP4A16"), "NVFP4_SCALED"),
    **dict.fromkeys(("ct_MXFP4", "ct_MXFP4A16"), "MXFP4"),
    **{"ct_W4A16": "Q4_0", "ct_W4A16_ASYM": "INT4_ZP", "ct_W8A16": "Q8_0", "ct_W8A8": "INT8"},
    **{"bnb_nf4": "NF4", "bnb_int8": "INT8"},
}
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def opened(name: str) -> tuple[Path, dict, DecodedView]:
    folder = need("fixtures", "quantized", name)
    config, view = unquantized(read_hf_config(folder), SafetensorsSource(folder))
    assert isinstance(view, DecodedView)
    return folder, config, view


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_view_has_the_tensors_of_the_model(name):
    _, config, view = opened(name)
    assert not any("quant" in field for field in config)
    plain = {n for n in view.names() if not n.startswith("model.layers.0.")}
    assert plain <= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    layer = {n.removeprefix("model.layers.0.") for n in view.names()} - plain
    kinds = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    matrices = {f"{part}.{module}.weight" for part, modules in kinds.items() for module in modules}
    assert layer == {*matrices, "input_layernorm.weight", "post_attention_layernorm.weight"}
    for matrix in matrices:
        info, array = view.info(f"model.layers.0.{matrix}"), view.array(f"model.layers.0.{matrix}")
        assert array.shape == info.shape and 0.01 < array.astype(np.float32).std() < 0.03, "as it was initialised"
    assert "7 matrices" in view.note


# --- value by value ---------------------------------------------------------------------------------

Tensors = dict[str, np.ndarray]


def _bits(word: int, bits: int, place: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> bits * place & (1 << bits) - 1


def of_integers(t: Tensors, row: int, col: int) -> float:
    cols = int(t["weight_shape"][1])
    bits = t["weight_packed"].shape[1] * 32 // cols
    each, offset = 32 // bits, 1 << bits - 1
    group = col // (cols // t["weight_scale"].shape[1])
    value = _bits(t["weight_packed"][row, col // each], bits, col % each) - offset
    if "weight_zero_point" in t:
        value -= _bits(t["weight_zero_point"][row // each, group], bits, row % each) - offset
    return value * float(t["weight_scale"][row, group])


def of_bytes(t: Tensors, row: int, col: int) -> float:
    return float(t["weight"][row, col]) * float(t["weight_scale"].reshape(-1)[row if t["weight_scale"].size > 1 else 0])


def of_blocks(t: Tensors, row: int, col: int) -> float:
    return float(t["weight"][row, col]) * float(t["weight_scale"][row // 128, col // 128])


def of_groups(t: Tensors, row: int, col: int) -> float:
    return float(t["weight"][row, col]) * 2.0 ** (int(t["weight_scale"][row, col // 32]) - 127)


def of_fp4(t: Tensors, row: int, col: int) -> float:
    code = int(t["weight_packed"][row, col // 2]) >> 4 * (col % 2) & 15
    value = FP4[code & 7] * (-1 if code & 8 else 1)
    if "weight_global_scale" not in t:
        return value * 2.0 ** (int(t["weight_scale"][row, col // 32]) - 127)
    scale = np.float32(t["weight_scale"][row, col // 16]) / np.float32(t["weight_global_scale"][0])
    return float(np.float32(value) * scale)


def of_int8(t: Tensors, row: int, col: int) -> float:
    return float(t["weight"][row, col]) * float(t["SCB"][row]) / 127


DECODERS: dict[str, Callable[[Tensors, int, int], float]] = {
    **dict.fromkeys(("ct_W4A16", "ct_W4A16_ASYM", "ct_W8A16"), of_integers),
    **dict.fromkeys(("ct_W8A8", "ct_FP8", "ct_FP8_DYNAMIC"), of_bytes),
    **{"ct_FP8_BLOCK": of_blocks, "ct_MXFP8": of_groups, "bnb_int8": of_int8},
    **dict.fromkeys(("ct_NVFP4", "ct_NVFP4A16", "ct_MXFP4", "ct_MXFP4A16"), of_fp4),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_kernels_get_has_the_same_values(name):
    view = opened(name)[2]
    for module in MODULES:
        assert view.info(f"model.layers.0.{module}.weight").dtype == PACKED.get(name, "BF16")
        assert_same_packed(view, f"model.layers.0.{module}.weight")


@pytest.mark.parametrize("name", DECODERS)
def test_values_one_by_one(name):
    folder, _, view = opened(name)
    source = SafetensorsSource(folder)
    for module in MODULES:
        stem = f"model.layers.0.{module}"
        names = [n for n in source.names() if n.startswith(f"{stem}.")]
        tensors = {n.removeprefix(f"{stem}."): source.array(n) for n in names}
        found = view.array(f"{stem}.weight").astype(np.float32)
        rng = np.random.default_rng(0)
        for row, col in zip(rng.integers(0, found.shape[0], 300), rng.integers(0, found.shape[1], 300), strict=True):
            expected = DECODERS[name](tensors, row, col)
            assert rounded(found[row, col]) == rounded(np.float32(expected)), (module, row, col)


# --- by the packages --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("ct_") and name != "ct_W4A16_ASYM"])
@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors_decodes_the_same(name):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is the oracle of this test")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder, _, view = opened(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))  # which decompresses
    for module in MODULES:
        expected = model.get_submodule(f"model.layers.0.{module}").weight.float().numpy()
        found = view.array(f"model.layers.0.{module}.weight").astype(np.float32)
        assert np.array_equal(rounded(found), expected), module


@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_decodes_nf4_the_same():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is the oracle of this test")
    transformers = pytest.importorskip("transformers")
    folder, _, view = opened("bnb_nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for module in MODULES:
        weight = model.get_submodule(f"model.layers.0.{module}").weight
        expected = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float().numpy()
        assert np.array_equal(view.array(f"model.layers.0.{module}.weight").astype(np.float32), expected), module
