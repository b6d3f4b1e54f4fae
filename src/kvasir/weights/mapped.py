"""A model file mapped into memory, and what is known of a tensor in it: the ground of all readers."""

import contextlib
import mmap
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from kvasir.errors import ModelFileError

if TYPE_CHECKING:
    import torch

# Private and writable, because torch knows no read-only tensors: a stray write then changes our memory and
# not the file, and does not end the process. Without NORESERVE, Linux refuses files larger than memory.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
if sys.platform == "win32":
    _MAPPING = {"access": mmap.ACCESS_COPY}
else:
    _MAPPING = {"flags": mmap.MAP_PRIVATE | _NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor. `dtype` is the file format's own name for it ("BF16", "Q4_K")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


class MappedFile:
    """A regular file in memory. Views of it keep the mapping alive, so `close` leaves none dangling.

    A mapped file must not be cut short by another process: touching the lost pages ends this one (SIGBUS).
    """

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` where there is no such file, it is not a regular one, or it is empty."""
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
        """Raise `ModelFileError` that names this file."""
        raise ModelFileError(f"{self.path}: {problem}", hint)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], read-only, sharing the mapping's memory. The range must lie inside the file."""
        view = self._slice(offset, nbytes)
        view.flags.writeable = False
        return view

    def tensor(self, offset: int, dtype: "torch.dtype", shape: tuple[int, ...], nbytes: int) -> "torch.Tensor":
        """A range as a torch tensor that shares the mapping's memory, or a copy where it is not aligned."""
        import torch

        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        source = self._slice(offset, nbytes)
        if offset % dtype.itemsize:
            source = source.copy()
        return torch.from_numpy(source).view(dtype).reshape(shape)

    def drop(self, offset: int, nbytes: int) -> None:
        """Give the whole pages of a range back to the system; they are read again when touched again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Unmap the file, or leave that to the last view of it. Nothing may be asked of this object after."""
        self._bytes = np.empty(0, np.uint8)
        self.size = 0
        with contextlib.suppress(BufferError):
            self.map.close()

    def _slice(self, offset: int, nbytes: int) -> np.ndarray:
        assert 0 <= offset <= offset + nbytes <= self.size, "a reader let a range outside the file through"
        return self._bytes[offset : offset + nbytes]
