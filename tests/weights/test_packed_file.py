"""Files of packed weights: what is written is read again, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest

from kvasir.errors import ConfigError
from kvasir.weights import packed_file
from kvasir.weights.packed_file import ALIGN, Damaged, PackedWriter, check_disk, open_packed, packed_folder, prune

FACTS = {
    "format": "F32", "rows": 1, "cols": 1, "segments": 1, "activation": "float32", "scale": 1.0, "note": "",
}  # fmt: skip


@pytest.fixture(params=[ALIGN, packed_file.CHUNK], ids=["small chunks", "one chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(packed_file, "CHUNK", request.param)


def written(folder, key="k", layers=3, seed=0):
    rng = np.random.default_rng(seed)
    writer, found = PackedWriter(folder, key), {}
    for layer in range(layers):
        for i, size in enumerate((100, ALIGN, 3 * ALIGN + 1)):
            assert writer.takes(layer)
            found[f"{layer}.{i}"] = data = rng.integers(0, 255, size, np.uint8)
            writer.add(f"{layer}.{i}", layer, data, **FACTS)
    return writer.finish(), found


def memory_for(file, layer):
    raw = np.full(file.layers[layer].nbytes + ALIGN, 77, np.uint8)
    return raw[-raw.ctypes.data % ALIGN :]


def test_layers_are_read_as_they_were_written(tmp_path, chunk):
    written(tmp_path)[0].close()
    file, (_, data) = open_packed(tmp_path, "k"), written(tmp_path, "other")
    assert file and len(data) == len(file.matrices) == 9
    for layer in file.layers:
        memory = memory_for(file, layer)
        file.read(layer, memory)
        for name, matrix in file.matrices.items():
            if matrix.layer == layer:
                assert np.array_equal(memory[matrix.offset : matrix.offset + matrix.nbytes], data[name])
    file.close()


def test_without_direct_reads_the_bytes_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_file, "_open_direct", lambda path: -1)
    file, data = written(tmp_path)
    memory = memory_for(file, 1)
    file.read(1, memory)
    assert np.array_equal(memory[:100], data["1.0"])
    file.close()


def test_a_layer_is_written_once(tmp_path):
    writer = PackedWriter(tmp_path, "k")
    writer.add("a", 0, np.zeros(8, np.uint8), **FACTS)
    writer.add("b", 1, np.zeros(8, np.uint8), **FACTS)
    assert writer.takes(1) and writer.takes(2) and not writer.takes(0)
    writer.abandon()
    assert not list(tmp_path.iterdir())


def flip(path, at=5):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "harm",
    [flip, lambda path: os.truncate(path, ALIGN), lambda path: os.truncate(path, 0)],
    ids=["bit", "cut", "empty"],
)
def test_a_file_that_changes_under_an_engine_is_noticed_and_written_anew_by_the_next(tmp_path, harm, chunk):
    file, _ = written(tmp_path)
    harm(file.path)
    with pytest.raises(Damaged, match=f"layer 0 cannot be read from {file.path}"):
        file.read(0, memory_for(file, 0))
    file.close()
    assert open_packed(tmp_path, "k") is None


def test_a_removed_file_is_still_read(tmp_path):
    file, data = written(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    memory = memory_for(file, 2)
    file.read(2, memory)
    assert np.array_equal(memory[:100], data["2.0"])
    file.close()


def test_a_file_of_another_length_or_another_key_is_not_opened(tmp_path):
    written(tmp_path)[0].close()
    (tmp_path / "k2.json").write_bytes((tmp_path / "k.json").read_bytes())
    os.link(tmp_path / "k.weights", tmp_path / "k2.weights")
    assert open_packed(tmp_path, "k2") is None
    with (tmp_path / "k.weights").open("ab") as more:
        more.write(b"x")
    assert open_packed(tmp_path, "k") is None and open_packed(tmp_path, "none") is None


HOSTILE = {
    "a matrix beyond its layer": lambda index: index["matrices"][0].update(offset=1 << 40),
    "a matrix before its layer": lambda index: index["matrices"][0].update(offset=-ALIGN),
    "a layer beyond the file": lambda index: index["layers"][0].update(offset=1 << 40),
    "a layer that is not aligned": lambda index: index["layers"][0].update(offset=8),
    "too few checksums": lambda index: index["layers"][0].update(checks=[]),
    "a layer twice": lambda index: index["layers"].append(index["layers"][0]),
    "a matrix twice": lambda index: index["matrices"].append(index["matrices"][0]),
    "a matrix of no layer": lambda index: index["matrices"][0].update(layer=9),
    "another type": lambda index: index["matrices"][0].update(rows="1"),
    "an unknown field": lambda index: index.update(more=1),
    "a huge number": lambda index: index["layers"][0].update(nbytes=1 << 80),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_index_that_does_not_fit_its_file_is_not_used(tmp_path, change):
    written(tmp_path)[0].close()
    path = tmp_path / "k.json"
    index = json.loads(path.read_bytes().partition(b"\n")[2])
    change(index)
    text = json.dumps(index).encode()
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    assert open_packed(tmp_path, "k") is None


def test_an_index_that_is_not_sealed_is_not_used(tmp_path):
    written(tmp_path)[0].close()
    for harm in (lambda data: data[:-1], lambda data: data[1:], lambda data: b"", lambda data: b"\n" * 99):
        kept = (tmp_path / "k.json").read_bytes()
        (tmp_path / "k.json").write_bytes(harm(kept))
        assert open_packed(tmp_path, "k") is None
        (tmp_path / "k.json").write_bytes(kept)
    found = open_packed(tmp_path, "k")
    assert found
    found.close()


def test_a_folder_that_is_open_to_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to other users"), packed_folder(tmp_path / "open"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be kept"), packed_folder(tmp_path / "file"):
        pass
    with packed_folder(tmp_path / "new" / "folder") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ends", [("",), ("-0of2", "-1of2")])
def test_the_files_of_the_last_two_ways_to_run_a_model_are_kept(tmp_path, ends):
    for i, key in enumerate(("m-1", "m-2", "other-1", "m-3")):
        for end in ends:
            written(tmp_path, key + end, layers=1)[0].close()
            os.utime(tmp_path / f"{key}{end}.weights", (i, i))
    for end in ends:
        prune(tmp_path, "m-", f"m-1{end}")  # the one in use counts as the newest
        left = {path.stem for path in tmp_path.iterdir()}
        assert left == {key + end for key in ("m-1", "m-3", "other-1") for end in ends}


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="are free in"):
        check_disk(tmp_path, 1 << 60)
