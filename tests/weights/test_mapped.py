"""Mapped files: what may be mapped, and that no view outlives its memory."""

import os

import numpy as np
import pytest

from kvasir.errors import ModelFileError
from kvasir.weights.mapped import MappedFile


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(np.arange(5000, dtype="<u4").tobytes())
    return path


def test_empty_irregular_and_absent_files_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, problem in {"empty": "empty", "pipe": "regular", ".": "regular", "none": "No such"}.items():
        with pytest.raises(ModelFileError, match=problem) as caught:
            MappedFile(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_views_survive_closing_and_dropping(path):
    file = MappedFile(path)
    view, tensor = file.view(4, 16384), file.array(8, np.dtype("u4"), (4, 1024), 16384)
    file.drop(0, file.size)
    file.close()
    assert view.view("<u4")[:3].tolist() == [1, 2, 3]
    assert tensor[1, 0].item() == 2 + 1024


def test_arrays_are_read_only_and_a_stray_write_to_a_tensor_spares_the_file(path):
    file, before = MappedFile(path), path.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        file.view(0, 4)[:] = 0
    file.array(0, np.dtype("u1"), (20000,), 20000).fill(7)
    assert path.read_bytes() == before


def test_misaligned_tensors_are_copied(path):
    array = MappedFile(path).array(2, np.dtype("i4"), (3,), 12)
    assert array.tolist() == [1 << 16, 2 << 16, 3 << 16]
    assert array.ctypes.data % 4 == 0


def test_a_file_larger_than_memory_can_be_mapped(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 42)
    mapped = MappedFile(tmp_path / "sparse")
    assert mapped.view((1 << 42) - 8, 8).tolist() == [0] * 8
