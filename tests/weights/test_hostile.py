"""Damaged files: whatever the bytes, readers parse them or raise `ModelFileError`, in bounded memory."""

import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ModelFileError
from kvasir.quant.gguf_types import dequantize
from kvasir.weights.gguf import GGUFFile
from kvasir.weights.safetensors import SafetensorsFile
from tests.examples import examples
from tests.weights import _files as write

# What a reader may use beside what the file itself takes: Python objects are larger than their bytes.
MAX_BYTES = 2_000_000

GGUF = write.small_gguf()
SAFETENSORS = write.safetensors_bytes(
    {
        "__metadata__": {"format": "pt"},
        "a": write.tensor_entry("BF16", [2, 3], 0, 12),
        "b": write.tensor_entry("F32", [], 12, 16),
        "c": write.tensor_entry("F8_E4M3", [0, 5], 16, 16),
        "d": write.tensor_entry("I64", [1], 16, 24),
    },
    bytes(24),
)

nasty = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
patch = st.one_of(
    st.binary(min_size=1, max_size=4),
    nasty.map(lambda number: struct.pack("<Q", number)),
    st.integers(0, 100).map(lambda number: struct.pack("<I", number)),
)


@st.composite
def damaged(draw, original: bytes) -> bytes:
    content = bytearray(original)
    for _ in range(draw(st.integers(0, 4))):
        position, new = draw(st.integers(0, len(content) - 1)), draw(patch)
        content[position : position + len(new)] = new
    cut = draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    return bytes(content[:cut]) + draw(st.binary(max_size=3))


def read_gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        for name, tensor in file.tensors.items():
            assert file.data(name).nbytes == tensor.nbytes
            assert dequantize(file.data(name), tensor.ggml_type, tensor.shape).shape == tensor.shape


def read_safetensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name, info in file.tensors.items():
        assert file.raw(name).nbytes == info.nbytes
    file.close()


def check(read, path: Path) -> bool:
    """Read a file under the memory bound; says whether it was accepted."""
    tracemalloc.start()
    try:
        read(path)
        accepted = True
    except ModelFileError as error:
        assert str(path) in str(error)
        accepted = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_BYTES
    return accepted


def check_bytes(read, content: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        return check(read, path)


@examples(200)
@given(damaged(GGUF))
def test_damaged_gguf(content):
    check_bytes(read_gguf, content)


@examples(200)
@given(damaged(SAFETENSORS))
def test_damaged_safetensors(content):
    check_bytes(read_safetensors, content)


@examples(100)
@given(st.binary(max_size=200))
def test_random_bytes_after_a_valid_beginning(content):
    check_bytes(read_gguf, b"GGUF\3\0\0\0" + content)
    check_bytes(read_safetensors, write.safetensors_bytes(content))


def test_whole_files_are_accepted_and_cut_ones_refused():
    # The GGUF ends with two bytes that belong to no tensor.
    for read, original, needed in (
        (read_gguf, GGUF, len(GGUF) - 2),
        (read_safetensors, SAFETENSORS, len(SAFETENSORS)),
    ):
        assert check_bytes(read, original) and check_bytes(read, original[:needed])
        assert not any(check_bytes(read, original[:length]) for length in range(1, needed, 3))


@pytest.mark.parametrize("counts", [((64 << 20) // 24 - 100, 0), (0, (64 << 20) // 13 - 100)])
def test_counts_that_would_just_fit_cost_nothing(tmp_path, counts):
    """64 MB of zeros, and a header that promises as many entries as they can hold."""
    path = tmp_path / "big"
    np.zeros(64 << 20, np.uint8).tofile(path)
    with path.open("r+b") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    assert not check(read_gguf, path)
