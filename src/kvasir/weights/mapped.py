"""A model file mapped into memory, and the description of a tensor in it: the basis of all readers."""

import contextlib
import mmap
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.quant.inputs import Inputs

# Private and writable, because torch has no read-only tensors: an accidental write then changes our memory instead of
# the file, and does not crash the process. Without NORESERVE, Linux refuses to map files larger than memory.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
if sys.platform == "win32":
    _MAPPING = {"access": mmap.ACCESS_COPY}
else:
    _MAPPING = {"flags": mmap.MAP_PRIVATE | _NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A file's description of a tensor. dtype: the file format's own name for it ("BF16", "Q4_K"). inputs: what the
    checkpoint says about the input rows of a quantized matrix; bytes (`WeightSource.raw`) are in its order of columns,
    values (`array`) in the model's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path
    inputs: Inputs | None = None


class MappedFile:
    """A regular file mapped into memory. Views keep the mapping alive, so `close` leaves no dangling view.

    Another process must not truncate a mapped file: accessing the lost pages kills this process (SIGBUS).
    """

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` if the file does not exist, is not a regular file, or is empty."""
        self.path = Path(path)
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):
                self.refuse("this is not a regular file")
            if not status.st_size:
                self.refuse("the file is empty", "was the download interrupted?")
            with self.path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, **_MAPPING)
        except OSError as error:
            raise ModelFileError(f"{self.path}: {error.strerror or error}") from error
        self.size = len(self.map)
        self._bytes = np.frombuffer(self.map, np.uint8)

    def refuse(self, problem: str, hint: str = "") -> NoReturn:
        """Raises `ModelFileError` that names this file."""
        raise ModelFileError(f"{self.path}: {problem}", hint)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], a read-only view of the mapping. The range must lie inside the file."""
        view = self._slice(offset, nbytes)
        view.flags.writeable = False
        return view

    def array(self, offset: int, dtype: np.dtype, shape: tuple[int, ...], nbytes: int) -> np.ndarray:
        """A range as an array that shares the mapping's memory, or a copy if the offset is not aligned to the dtype."""
        source = self._slice(offset, nbytes)
        return (source.copy() if offset % dtype.itemsize else source).view(dtype).reshape(shape)

    def drop(self, offset: int, nbytes: int) -> None:
        """Returns the whole pages of a range to the system; they are read again on the next access."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Unmaps the file, or leaves that to its last view. The object must not be used afterwards."""
        self._bytes = np.empty(0, np.uint8)
        self.size = 0
        with contextlib.suppress(BufferError):
            self.map.close()

    def _slice(self, offset: int, nbytes: int) -> np.ndarray:
        assert 0 <= offset <= offset + nbytes <= self.size, "a reader passed a range outside the file"
        return self._bytes[offset : offset + nbytes]
