"""Content hashes of weight files: right, remembered, and never those of another content."""

from __future__ import annotations

import os
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from kvasir.weights import content
from kvasir.weights.content import Contents, Stopped, content_of, known_content
from tests.kv._tiers import until

GO = threading.Event()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache" / "contents"


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_hash_is_computed_once(tmp_path, folder, monkeypatch):
    path = write(tmp_path / "model.safetensors", b"weights" * 1000)
    assert known_content(path, folder) is None
    assert content_of(path, folder, GO) == sha256(b"weights" * 1000).hexdigest()
    monkeypatch.setattr(content, "sha256", lambda data=b"": _only_names(data))
    assert content_of(path, folder, GO) == sha256(b"weights" * 1000).hexdigest()
    (entry,) = folder.iterdir()
    assert entry.stat().st_mode & 0o077 == 0 or entry.parent.stat().st_mode & 0o077 == 0


def _only_names(data: bytes):
    assert data, "the file is hashed again"
    return sha256(data)


@pytest.mark.parametrize("change", ["longer", "same size and time"])
def test_a_changed_file_is_hashed_again(tmp_path, folder, change):
    path = write(tmp_path / "model.gguf", b"one")
    content_of(path, folder, GO)
    info = path.stat()
    path.write_bytes(b"three" if change == "longer" else b"two")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert content_of(path, folder, GO) == sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["{}", "sha256-{}"])
def test_blobs_have_their_hash_in_their_name(tmp_path, folder, name):
    digest = sha256(b"x").hexdigest()
    blob = write(tmp_path / "blobs" / name.format(digest), b"not read")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert known_content(blob, folder) == known_content(link, folder) == digest
    other = write(tmp_path / "elsewhere" / digest, b"x")
    assert known_content(other, folder) is None


@pytest.mark.parametrize("text", ["", "abc", "f" * 63, "F" * 64, "\xff" * 64])
def test_damaged_entries_are_not_believed(tmp_path, folder, text):
    path = write(tmp_path / "model.gguf", b"one")
    content_of(path, folder, GO)
    (entry,) = folder.iterdir()
    entry.write_text(text, encoding="latin-1")
    assert content_of(path, folder, GO) == sha256(b"one").hexdigest()


def test_a_folder_that_others_can_write_is_not_believed(tmp_path, folder):
    path = write(tmp_path / "model.gguf", b"one")
    content_of(path, folder, GO)
    folder.chmod(0o777)
    assert known_content(path, folder) is None
    assert content_of(path, folder, GO) == sha256(b"one").hexdigest()


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path):
    path, blocked = write(tmp_path / "model.gguf", b"one"), write(tmp_path / "file", b"")
    for _ in range(2):
        assert content_of(path, blocked / "contents", GO) == sha256(b"one").hexdigest()


def test_hashing_stops_when_it_is_told_to(tmp_path, folder):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        content_of(write(tmp_path / "model.gguf", b"one"), folder, stop)


def test_the_identity_comes_in_the_background_and_then_at_once(tmp_path, folder):
    paths = [write(tmp_path / f"{i}.gguf", bytes([i])) for i in range(3)]
    expected = "+".join(sha256(path.read_bytes()).hexdigest() for path in paths)

    def describe(digest) -> str:
        return "+".join(map(digest, paths))

    first = Contents(paths, folder, describe)
    until(lambda: first.value)
    again = Contents(paths, folder, describe)
    assert first.value == again.value == expected
    first.close()
    again.close()


def test_files_that_cannot_be_read_have_no_identity(tmp_path, folder):
    found = Contents([tmp_path / "none.gguf"], folder, lambda digest: "x")
    assert found.value is None
    found.close()
