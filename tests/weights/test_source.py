"""Weight sources: the same questions to every format."""

import gguf
import numpy as np
import pytest

from kvasir.quant.gguf_types import GGMLType
from kvasir.weights.source import DummySource, GGUFSource, SafetensorsSource, WeightSource
from tests._shared import need
from tests.weights import _files as write

PAIRS = {  # names in the GGUF file and in the Hugging Face folder of the same model
    "token_embd.weight": "model.embed_tokens.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
}


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_0"])
def test_gguf_and_safetensors_hold_the_same_model(kind):
    """Norms are float32 in every file; other weights differ by no more than their format's step."""
    ours: WeightSource = GGUFSource(need(f"models/gguf/TinyStories-656K-{kind}.gguf"))
    theirs: WeightSource = SafetensorsSource(need("models/TinyStories-656K"))
    step = {"BF16": 0, "F16": 2**-11, "Q8_0": 1 / 127, "Q4_0": 1 / 8}[kind]
    for name, hf_name in PAIRS.items():
        expected, array = theirs.array(hf_name).astype(np.float32), ours.array(name).astype(np.float32)
        assert ours.info(name).shape == theirs.info(hf_name).shape == array.shape
        tolerance = 0 if "norm" in name else step * np.abs(expected).max()
        assert np.abs(array - expected).max() <= tolerance
    for source in (ours, theirs):
        assert set(source.names()) >= set(PAIRS if source is ours else PAIRS.values())
        source.close()


@pytest.fixture
def packed(tmp_path):
    """A source with one Q4_0, one F16 and one F32 tensor of odd place, and their values."""
    values = np.random.default_rng(0).standard_normal((50, 96)).astype(np.float32)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("q", gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0), raw_dtype=2)
    writer.add_tensor("h", values.astype(np.float16))
    writer.add_tensor("i", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path), values


def test_quantized_weights_are_decoded(packed):
    source, _ = packed
    data = source.raw("q")
    assert data.shape == (50, 54) and source.info("q").dtype == "Q4_0"
    array = source.array("q")
    assert array.dtype == np.float32
    assert np.array_equal(array, gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_0))


def test_one_matrix_of_a_stack_is_decoded_as_with_the_others(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 10, 64)).astype(np.float32)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("q", gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.add_tensor("h", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(path)
    for name in "qh":
        whole = source.array(name)
        assert whole.shape == (3, 10, 64)
        assert all(np.array_equal(source.array(name, index=i), whole[i]) for i in range(3))


def test_plain_weights_are_views_of_the_file(packed):
    source, values = packed
    array = source.array("h")
    assert array.dtype == np.float16 and array.tobytes() == values.astype(np.float16).tobytes()
    assert array.ctypes.data == source.raw("h").ctypes.data
    assert source.array("i").tolist() == [0, 1, 2, 3, 4]
    source.drop("h")
    source.close()
    assert array.tobytes() == values.astype(np.float16).tobytes()


@pytest.mark.parametrize("kind", [kind for kind in GGMLType if kind.is_plain], ids=lambda kind: kind.name)
def test_every_plain_type_of_the_table_has_an_array_type(kind, tmp_path):
    data = bytes(range(3, 3 + 5 * kind.type_size))
    (tmp_path / "m.gguf").write_bytes(write.gguf_bytes((), [write.entry("a", [5], kind, 0)], data))
    array = GGUFSource(tmp_path / "m.gguf").array("a")
    letters = kind.name.rstrip("0123456789")
    assert array.dtype.name == f"{ {'F': 'float', 'BF': 'bfloat', 'I': 'int'}[letters] }{8 * kind.type_size}"
    assert array.shape == (5,) and array.tobytes() == data


def test_unknown_names_are_refused(packed, tmp_path):
    for source in (packed[0], DummySource({})):
        with pytest.raises(KeyError):
            source.array("nothing")


def test_dummy_weights_depend_on_name_shape_and_seed_alone():
    shapes = {"a.weight": (64, 256), "norm.weight": (1000,), "a.bias": (1000,)}
    first, second = DummySource(shapes), DummySource({**dict(reversed(shapes.items())), "b": (2,)})
    for name, shape in shapes.items():
        array = first.array(name)
        assert array.shape == first.info(name).shape == shape
        assert np.array_equal(array, second.array(name))
        assert not np.array_equal(array, DummySource(shapes, seed=1).array(name))
        assert first.raw(name).tobytes() == array.tobytes()
    assert first.array("a.weight").std() == pytest.approx(1 / 16, rel=0.05)
    assert first.array("norm.weight").mean() == pytest.approx(1, abs=0.02)
    assert first.array("a.bias").mean() == pytest.approx(0, abs=0.02)
