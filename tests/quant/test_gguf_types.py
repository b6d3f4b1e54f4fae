"""Decoding GGUF tensors: bit for bit what the `gguf` package and llama.cpp's own values say."""

import hashlib
import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from kvasir.errors import UnsupportedModel
from kvasir.quant.gguf_types import CHUNK, GGMLType, dequantize, dequantize_into
from kvasir.quant.iq_grids import GRIDS, grid
from kvasir.weights.gguf import GGUFFile
from tests._shared import need

FILE_TYPES = {kind for kind in GGMLType if not kind.is_own}
INTEGERS = {GGMLType.I8: "i1", GGMLType.I16: "<i2", GGMLType.I32: "<i4", GGMLType.I64: "<i8"}
LLAMA_CPP = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# What the package cannot decode is compared with loops below.
WITHOUT_ORACLE = {*INTEGERS, GGMLType.F64, GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.Q1_0}


def random_bytes(ggml_type: GGMLType, num_weights: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng([seed, ggml_type])
    return generator.integers(0, 256, ggml_type.row_bytes(num_weights), dtype=np.uint8)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal words, but any NaN for any NaN: random scales decode to infinities and NaNs as well."""
    assert ours.dtype == theirs.dtype == np.float32 and ours.shape == theirs.shape
    both_nan = np.isnan(ours) & np.isnan(theirs)
    differ = (ours.view(np.uint32) != theirs.view(np.uint32)) & ~both_nan
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ, first at {np.argwhere(differ)[0]}"


def test_the_table_is_that_of_ggml():
    theirs = {kind.name: (kind.value, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind.name: (kind.value, kind.block_size, kind.type_size) for kind in FILE_TYPES} == theirs


@pytest.mark.parametrize("ggml_type", sorted(FILE_TYPES - WITHOUT_ORACLE), ids=lambda kind: kind.name)
def test_random_bytes_decode_as_in_the_gguf_package(ggml_type):
    shape = (CHUNK // 256 + 7, 512)  # more than one chunk, and not a whole number of them
    data = random_bytes(ggml_type, shape[0] * shape[1]).reshape(shape[0], -1)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data, gguf.GGMLQuantizationType(ggml_type)).astype(np.float32, copy=False)
    assert_same_bits(dequantize(data, ggml_type, shape), theirs)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_rows_quantized_by_llama_cpp_decode_to_its_values(name):
    folder = need("models", "gguf-dequant")
    with GGUFFile(folder / "basic.gguf") as file, np.load(folder / "basic.expected.npz") as expected:
        tensor = file.tensors[f"t.{name}"]
        ours = dequantize(file.data(tensor.name), tensor.ggml_type, tensor.shape)
        assert tensor.ggml_type.name == name
        assert_same_bits(ours, expected[name].reshape(tensor.shape))


@pytest.mark.parametrize("ggml_type", INTEGERS, ids=lambda kind: kind.name)
def test_integers_become_the_nearest_floats(ggml_type):
    data = random_bytes(ggml_type, 300)
    expected = [np.float32(int(number)) for number in data.view(INTEGERS[ggml_type])]
    assert dequantize(data, ggml_type, (300,)).tolist() == expected


def test_f64_is_rounded_to_float32():
    values = np.array([0.1, -1e300, 5e-324, np.inf])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    assert_same_bits(dequantize(values.view(np.uint8), GGMLType.F64, (4,)), expected)


def test_q8_k_is_scale_times_integer():
    block = struct.pack("<f256b16h", 0.37, *range(-128, 128), *([7] * 16))
    expected = [np.float32(0.37) * np.float32(level) for level in range(-128, 128)]
    assert dequantize(np.frombuffer(block, np.uint8), GGMLType.Q8_K, (256,)).tolist() == expected


def test_q1_0_is_the_scale_with_a_sign_per_bit():
    signs = random_bytes(GGMLType.I8, 16)
    block = np.concatenate([np.array([0.5], "<f2").view(np.uint8), signs])
    expected = [0.5 if signs[i // 8] >> i % 8 & 1 else -0.5 for i in range(128)]
    assert dequantize(block, GGMLType.Q1_0, (128,)).tolist() == expected


def test_activation_formats_are_refused():
    with pytest.raises(UnsupportedModel, match="Q8_1"):
        dequantize(np.zeros(40, np.uint8), GGMLType.Q8_1, (32,))


@pytest.mark.parametrize(("nbytes", "num_weights"), [(17, 32), (18, 64), (36, 32), (18, 31), (0, 32)])
def test_bytes_that_do_not_fill_the_weights_are_refused(nbytes, num_weights):
    with pytest.raises(ValueError, match=f"{nbytes}.*{num_weights}"):
        dequantize(np.zeros(nbytes, np.uint8), GGMLType.Q4_0, (num_weights,))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.IQ2_S, GGMLType.BF16], ids=lambda kind: kind.name)
def test_decoding_needs_little_memory_beside_the_result(ggml_type):
    num_weights = 1 << 21
    data, out = random_bytes(ggml_type, num_weights), np.empty(num_weights, np.float32)
    dequantize_into(out[:256], data[: ggml_type.row_bytes(256)], ggml_type)  # loads the grids
    tracemalloc.start()
    try:
        dequantize_into(out, data, ggml_type)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * CHUNK


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_the_published_ones(name):
    table, packed = grid(name), GRIDS[name]
    assert table.shape == (packed.rows, packed.width)
    assert set(np.unique(table)) == set(packed.levels)
    assert hashlib.sha256(table.astype("<f4").tobytes()).hexdigest() == packed.sha256
