"""A model file mapped into memory, and what is known of a tensor in it: the ground of all readers."""

import mmap
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvasir.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor. `dtype` is the file format's own name for it ("BF16", "Q4_K")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


class MappedFile:
    """A regular file, mapped read-only. Views of it keep the mapping alive, so `close` leaves none dangling.

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
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{self.path}: {error.strerror or error}") from error
        self.size = len(self.map)
        self._bytes = np.frombuffer(self.map, np.uint8)

    def refuse(self, problem: str, hint: str = "") -> NoReturn:
        """Raise `ModelFileError` that names this file."""
        raise ModelFileError(f"{self.path}: {problem}", hint)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], read-only, sharing the mapping's memory. The range must lie inside the file."""
        assert 0 <= offset <= offset + nbytes <= self.size
        return self._bytes[offset : offset + nbytes]

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
        try:
            self.map.close()
        except BufferError:
            pass
