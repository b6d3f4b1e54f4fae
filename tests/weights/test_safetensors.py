"""Reading safetensors: what the `safetensors` package writes, sharded folders, and hostile headers."""

import json

import pytest
import safetensors.torch
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.tensors import tensor_of
from kvasir.weights.safetensors import DTYPES, INDEX, SafetensorsFile, SafetensorsFolder
from tests._shared import need
from tests.weights import _files as write

TORCH_DTYPES = {name: getattr(torch, torch_name) for name, (_, torch_name) in DTYPES.items() if torch_name}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return ours.reshape(-1).view(torch.uint8).equal(theirs.reshape(-1).view(torch.uint8))


@pytest.fixture
def shards(tmp_path):
    """A folder with three tensors in two shards, and the tensors."""
    tensors = {name: random_tensor(torch.float32, (3, n)) for n, name in enumerate("abc", start=1)}
    safetensors.torch.save_file({"a": tensors["a"]}, tmp_path / "m-1.safetensors", {"format": "pt"})
    safetensors.torch.save_file({name: tensors[name] for name in "bc"}, tmp_path / "m-2.safetensors")
    index = {
        "metadata": {},
        "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"},
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path, tensors


def package_writes(dtype: torch.dtype) -> bool:
    try:
        return bool(safetensors.torch.save({"x": torch.empty(1, dtype=dtype)}))
    except KeyError:
        return False


def test_metadata_may_be_null(tmp_path):
    """As MLX writes it."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(write.safetensors_bytes({"__metadata__": None}))
    with SafetensorsFolder(path) as file:
        assert file.metadata == {}


def test_every_dtype_that_the_package_writes(tmp_path):
    known = {name for name in TORCH_DTYPES if package_writes(TORCH_DTYPES[name])}
    assert known >= {"F32", "F16", "BF16", "I64", "U8", "BOOL"}
    tensors = {name: random_tensor(TORCH_DTYPES[name], (2, 3)) for name in known}
    tensors["scalar"], tensors["none"] = torch.tensor(2.5), torch.empty(0, 4)
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"note": "x"})
    with SafetensorsFolder(tmp_path / "m.safetensors") as file:
        assert file.metadata == {"note": "x"}
        assert set(file.names()) == set(tensors)
        for name, theirs in tensors.items():
            assert same_bits(tensor_of(file.array(name)), theirs)
            assert file.raw(name).tobytes() == theirs.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert file.info(name).nbytes == theirs.nbytes and file.info(name).shape == tuple(theirs.shape)
        assert all(file.info(name).dtype == name for name in known)


def test_packed_dtypes_are_read_raw_only(tmp_path):
    header = {"a": write.tensor_entry("F4", [2, 3], 0, 3), "b": write.tensor_entry("F6_E2M3", [4], 3, 6)}
    (tmp_path / "m.safetensors").write_bytes(write.safetensors_bytes(header, b"abcdef"))
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.raw("a").tobytes() == b"abc"
        with pytest.raises(UnsupportedModel, match="F6_E2M3"):
            folder.array("b")


def test_tensors_share_the_file_where_they_are_aligned(tmp_path):
    header = {"a": write.tensor_entry("U8", [1], 0, 1), "b": write.tensor_entry("F32", [2], 1, 9)}
    for padding in range(4):  # moves the data through all alignments
        path = tmp_path / "m.safetensors"
        path.write_bytes(write.safetensors_bytes(json.dumps(header) + " " * padding, b"x" + bytes(8)))
        file = SafetensorsFile(path)
        assert file.array("b").tolist() == [0, 0]
        assert file.array("b").ctypes.data % 4 == 0
        assert file.array("a").ctypes.data == file.raw("a").ctypes.data


@pytest.mark.parametrize("name", ["stories260K", "TinyStories-656K", "gpt-nano-sort"])
def test_real_models(name):
    folder = need("models", name)
    theirs = safetensors.torch.load_file(folder / "model.safetensors")
    with SafetensorsFolder(folder) as ours:
        assert set(ours.names()) == set(theirs)
        assert all(same_bits(tensor_of(ours.array(tensor)), theirs[tensor]) for tensor in theirs)


def test_shards_are_one_folder(shards):
    path, tensors = shards
    with SafetensorsFolder(path) as folder:
        assert folder.names() == ["a", "b", "c"]
        assert folder.metadata == {"format": "pt"}
        assert folder.info("c").file == path / "m-2.safetensors"
        assert all(same_bits(tensor_of(folder.array(name)), tensor) for name, tensor in tensors.items())
        folder.drop("a")
        assert same_bits(tensor_of(folder.array("a")), tensors["a"])


def test_missing_shards_and_names_are_named(shards):
    path, _ = shards
    (path / "m-2.safetensors").rename(path / "elsewhere")
    with pytest.raises(ModelFileError, match=r"m-2\.safetensors"):
        SafetensorsFolder(path)
    safetensors.torch.save_file({"b": torch.ones(1)}, path / "m-2.safetensors")
    with pytest.raises(ModelFileError, match="'c'"):
        SafetensorsFolder(path)


@pytest.mark.parametrize(
    "shard",
    [
        *("../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "m.bin", ""),
        *("..", "C:x.safetensors", "x\0.safetensors", 3, None, ["m-1.safetensors"], "m-1.safetensors/"),
        *("m" * 5000 + ".safetensors", "é" * 130 + ".safetensors"),
    ],
)
def test_an_index_cannot_point_outside_its_folder(shards, shard):
    path, _ = shards
    folder = path / "model"
    folder.mkdir()
    (path / "m-1.safetensors").rename(path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match="plain name"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff", "[" * 10**6])
def test_a_malformed_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelFileError, match=INDEX):
        SafetensorsFolder(tmp_path)


def test_a_lone_shard_is_not_a_model(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelFileError, match="index"):
        SafetensorsFolder(tmp_path)


def one(dtype="F32", shape=(2,), start=0, stop=8) -> dict:
    return {"a": write.tensor_entry(dtype, list(shape), start, stop)}


def two(*spans: tuple[int, int]) -> dict:
    return {name: write.tensor_entry("U8", [b - a], a, b) for name, (a, b) in zip("ab", spans, strict=True)}


EIGHT = bytes(8)
HOSTILE = {
    "too short": (b"abc", "too few"),
    "length beyond the file": (write.safetensors_bytes("{}", length=100), "header length is 100"),
    "length beyond all": (write.safetensors_bytes("{}", length=2**64 - 1), "header length"),
    "not UTF-8": (write.safetensors_bytes(b'{"\xff": 1}'), "UTF-8"),
    "not JSON": (write.safetensors_bytes("{]"), "not valid JSON"),
    "no object": (write.safetensors_bytes("[]"), "expected an object"),
    "nested too deeply": (write.safetensors_bytes('{"a":' * 100_000), "nested too deeply"),
    "a number of a million digits": (write.safetensors_bytes('{"a": ' + "9" * 10**6 + "}"), "not valid JSON"),
    "not a number": (write.safetensors_bytes('{"a": NaN}'), "not a JSON number"),
    "a name twice": (write.safetensors_bytes('{"a": 1, "a": 1}'), "same key twice"),
    "metadata not of strings": (write.safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry not an object": (write.safetensors_bytes({"a": []}), "dtype"),
    "unknown dtype": (write.safetensors_bytes(one("F128"), EIGHT), "'F128', expected one of"),
    "dtype not a text": (write.safetensors_bytes(one([1]), EIGHT), "dtype"),
    "negative size": (write.safetensors_bytes(one(shape=(-2,)), EIGHT), "list of sizes"),
    "fractional size": (write.safetensors_bytes(one(shape=(2.0,)), EIGHT), "list of sizes"),
    "size true": (write.safetensors_bytes(one("U8", (True,), 0, 1), b"x"), "list of sizes"),
    "size beyond 64 bits": (write.safetensors_bytes(one(shape=(2**64,)), EIGHT), "list of sizes"),
    "shape that wraps": (write.safetensors_bytes(one(shape=(2**32, 2**32, 0)), EIGHT), "too large"),
    "too many dimensions": (write.safetensors_bytes(one(shape=(1,) * 65, stop=4), EIGHT), "too large"),
    "three offsets": (
        write.safetensors_bytes({"a": {**one()["a"], "data_offsets": [0, 4, 8]}}, EIGHT),
        "data_offsets",
    ),
    "offsets backwards": (write.safetensors_bytes(one(start=8, stop=0), EIGHT), "data_offsets"),
    "offsets negative": (write.safetensors_bytes(one(start=-8, stop=0), EIGHT), "data_offsets"),
    "bytes that do not fit the shape": (write.safetensors_bytes(one(shape=(3,)), EIGHT), "expected 12"),
    "half a byte": (write.safetensors_bytes(one("F4", (1,), 0, 1), b"x"), r"expected 0\.5"),
    "end beyond the file": (write.safetensors_bytes(one(shape=(4,), stop=16), EIGHT), "the file has 8"),
    "bytes of no tensor": (write.safetensors_bytes(one(), bytes(9)), "the file has 9"),
    "gap": (write.safetensors_bytes(two((0, 3), (4, 8)), EIGHT), "gap or overlap at byte 3"),
    "overlap": (write.safetensors_bytes(two((0, 5), (4, 8)), EIGHT), "gap or overlap at byte 4"),
    "not from the start": (write.safetensors_bytes(two((1, 4), (4, 8)), EIGHT), "gap or overlap at byte 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_their_name_and_the_reason(tmp_path, case):
    content, reason = HOSTILE[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 700
