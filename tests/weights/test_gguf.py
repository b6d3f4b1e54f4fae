"""Reading GGUF files: what the `gguf` package writes and reads, and files of llama.cpp."""

import gguf
import numpy as np
import pytest

from kvasir.errors import ModelFileError
from kvasir.quant.gguf_types import GGMLType
from kvasir.weights.gguf import GGUFFile
from tests._shared import need
from tests.weights import _files as write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_every_kind_of_value(path):
    path.write_bytes(write.small_gguf())
    with GGUFFile(path) as file:
        values = dict(file.metadata)
    assert values.pop("general.architecture") == "llama"
    assert values.pop("words") == ["a", "", "Käse"]
    assert values.pop("flag") is True
    assert (values.pop("number.f32"), values.pop("number.f64")) == (0.5, -0.25)
    scores, flags, none, nested = (values.pop(key) for key in ("scores", "flags", "none", "nested"))
    assert scores.dtype == np.float32 and scores.tolist() == [1.0, 2.5]
    assert flags.dtype == bool and flags.tolist() == [False, True, True]
    assert none.dtype == np.uint16 and none.size == 0
    assert nested[0].tolist() == [1, -2] and nested[1] == [["x"]]
    assert len(values) == 8 and all(type(number) is int and number == 3 for number in values.values())


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_views_with_shapes_outermost_first(path, version):
    content = bytearray(write.small_gguf())
    content[4] = version
    path.write_bytes(content)
    with GGUFFile(path) as file:
        shapes = {name: (tensor.shape, tensor.ggml_type) for name, tensor in file.tensors.items()}
        data = {name: file.data(name) for name in file.tensors}
    assert shapes == {"a": ((2, 32), GGMLType.Q4_0), "b": ((3,), GGMLType.F32), "c": ((), GGMLType.BF16)}
    assert data["a"].tolist() == [list(range(18)), list(range(18, 36))]
    assert data["b"].shape == (1, 12) and data["b"][0, 0] == 64
    assert data["c"].tolist() == [[96, 97]]
    assert not data["a"].flags.owndata


def test_files_of_the_gguf_package_are_read(path):
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "▁a", b"\xf0\x9f\xa6\x99"])
    writer.add_token_scores([0.0, -1.5, 2.0])
    writer.add_custom_alignment(128)
    writer.add_tensor("plain", values)
    writer.add_tensor("packed", gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "▁a", "🦙"]
        assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, 2.0]
        assert file.tensors["plain"].shape == file.tensors["packed"].shape == (4, 64)
        assert file.tensors["packed"].offset % 128 == 0
        assert (file.data("plain").view("<f4") == values).all()


def example_files():
    return [
        *(f"models/gguf/TinyStories-656K-{kind}.gguf" for kind in ("BF16", "F16", "Q8_0", "Q4_0")),
        "models/gguf/stories260K-F32.gguf",
        "models/gguf/all-MiniLM-L6-v2-Q4_K_M.gguf",
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", example_files())
def test_files_of_llama_cpp_as_the_gguf_package_reads_them(name):
    path = need(name)
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert ours.ggml_type == theirs.tensor_type
            assert file.data(theirs.name).tobytes() == theirs.data.tobytes()
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert set(file.metadata) == set(fields)
        for key, field in fields.items():
            assert np.array_equal(file.metadata[key], field.contents()), key


def test_a_large_vocabulary_is_read_whole():
    with GGUFFile(need("tokenizers/gguf-vocab/ggml-vocab-deepseek-llm.gguf")) as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 102400
        assert len(file.metadata["tokenizer.ggml.merges"]) == 99757
        assert file.metadata["tokenizer.ggml.token_type"].shape == (102400,)
        assert not file.tensors


def tensors(*entries: bytes, data: int = 4096, **options) -> bytes:
    return write.gguf_bytes([], entries, bytes(data), **options)


def aligned(kind: int, alignment) -> bytes:
    return write.gguf_bytes([write.pair("general.alignment", kind, alignment)])


def deep_array(levels: int) -> bytes:
    content = (write.U8, [1])
    for _ in range(levels - 1):
        content = (write.ARRAY, [content])
    return write.gguf_bytes([write.pair("deep", write.ARRAY, content)])


HUGE = 2**64 - 1
HOSTILE = {
    "not a GGUF": (b"GGML" + bytes(60), "begins with b'GGML'"),
    "no content": (b"GG", "left"),
    "only a magic": (b"GGUF", "version"),
    "version 0": (write.gguf_bytes(version=0), "version 0"),
    "version 1": (write.gguf_bytes(version=1), "version 1"),
    "version 4": (write.gguf_bytes(version=4), "version 4"),
    "big-endian": (write.gguf_bytes(version=3 << 24), "big-endian"),
    "more tensors than bytes": (write.gguf_bytes(counts=(HUGE, 0)), "tensor entries"),
    "more pairs than bytes": (write.gguf_bytes(counts=(0, HUGE)), "metadata pairs"),
    "fewer pairs than stated": (write.gguf_bytes(data=bytes(40), counts=(0, 3)), "empty"),
    "key twice": (write.gguf_bytes([write.pair("k", write.U8, 1)] * 2), "'k' is empty or comes twice"),
    "key too long": (write.gguf_bytes([write.pair("k" * 65536, write.U8, 1)]), "at most 65535"),
    "key length beyond the file": (write.gguf_bytes([b"\xff" * 8 + bytes(40)]), "at most"),
    "key not UTF-8": (write.gguf_bytes([write.pair(b"\xff", write.U8, 1)]), "UTF-8"),
    "string length beyond the file": (
        write.gguf_bytes([write.text("k") + b"\x08\0\0\0" + b"\xff" * 8]),
        "the file has 0 left|the file has [0-9]+ left",
    ),
    "unknown value type": (write.gguf_bytes([write.text("k") + b"\x0d\0\0\0" + bytes(8)]), "type 13"),
    "bool of 2": (write.gguf_bytes([write.pair("k", write.BOOL, 2)]), "expected 0 or 1"),
    "array of unknown type": (
        write.gguf_bytes([write.text("k") + b"\x09\0\0\0\x63\0\0\0" + b"\xff" * 8]),
        "type 99",
    ),
    "array longer than the file": (
        write.gguf_bytes([write.text("k") + b"\x09\0\0\0\x0c\0\0\0" + b"\xff" * 7 + b"\x1f"]),
        "elements of 'k'",
    ),
    "strings longer than the file": (
        write.gguf_bytes([write.text("k") + b"\x09\0\0\0\x08\0\0\0" + b"\x01" + bytes(7) + b"\xff" * 8]),
        "string 0 of 'k' reaches beyond",
    ),
    "array string not UTF-8": (
        write.gguf_bytes([write.pair("k", write.ARRAY, (write.STRING, [b"a", b"\xc3"]))]),
        "string 1 of 'k' is not UTF-8",
    ),
    "arrays too deep": (deep_array(5), "deeper than 4"),
    "alignment 0": (aligned(write.U32, 0), "power of two"),
    "alignment 24": (aligned(write.U32, 24), "power of two"),
    "alignment of text": (aligned(write.STRING, "32"), "power of two"),
    "alignment beyond the file": (
        write.gguf_bytes([write.pair("general.alignment", write.U32, 1 << 31)], [write.entry("t", [4], 0, 0)]),
        "ends at byte",
    ),
    "tensor twice": (tensors(write.entry("t", [4], 0, 0), write.entry("t", [4], 0, 32)), "comes twice"),
    "tensor name too long": (tensors(write.entry("t" * 65, [4], 0, 0)), "at most 64"),
    "tensor name not UTF-8": (tensors(write.entry(b"\xff", [4], 0, 0)), "UTF-8"),
    "five dimensions": (tensors(write.entry("t", [1] * 5, 0, 0)), "at most 4"),
    "a dimension of zero": (tensors(write.entry("t", [4, 0], 0, 0)), "nonzero sizes"),
    "unknown tensor type": (tensors(write.entry("t", [4], 36, 0)), "unknown type 36"),
    "a type of our own": (tensors(write.entry("t", [64], 1003, 0)), "unknown type 1003"),
    "row not of whole blocks": (tensors(write.entry("t", [33], 2, 0)), "multiples of 32"),
    "product of dimensions beyond 64 bits": (tensors(write.entry("t", [2**62] * 4, 0, 0)), "ends at byte"),
    "product that wraps to something small": (
        tensors(write.entry("t", [2**32, 2**32], 0, 0)),
        "ends at byte",
    ),
    "offset that wraps": (tensors(write.entry("t", [4], 0, 2**64 - 32)), "ends at byte"),
    "tensor cut off": (tensors(write.entry("t", [1024], 0, 0), data=4095), "ends at byte"),
    "offset not aligned": (tensors(write.entry("t", [4], 0, 16)), "multiple of 32"),
    "tensors that overlap": (tensors(write.entry("t", [64], 0, 0), write.entry("u", [4], 0, 224)), "overlap"),
    "tensors at one place": (tensors(write.entry("t", [4], 0, 0), write.entry("u", [4], 0, 0)), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_their_name_and_the_reason(path, case):
    content, reason = HOSTILE[case]
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_gaps_between_tensors_and_any_order_are_accepted(path):
    path.write_bytes(tensors(write.entry("t", [4], 0, 256), write.entry("u", [4], 0, 64)))
    with GGUFFile(path) as file:
        assert list(file.tensors) == ["t", "u"]


def test_no_torch_is_needed(run_python, path):
    path.write_bytes(write.small_gguf())
    run_python(
        "import sys; from kvasir.weights.find import find_model;"
        "from kvasir.weights.gguf_split import open_gguf;"
        f"open_gguf({str(path)!r}); find_model({str(path)!r});"
        "assert not {'torch', 'gguf', 'huggingface_hub'} & set(sys.modules)"
    )
