"""How fast a disk reads."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_BLOCK = 8 << 20  # bytes


def read_rate(path: Path, most: int = 256 << 20) -> float:
    """Bytes per second of reading the beginning of a file, at most `most` bytes, past the page cache where the system
    allows that; 0 for a file that is too small to tell. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    try:
        size = min(os.fstat(fd).st_size, most) // _BLOCK * _BLOCK
        memory = mmap.mmap(-1, _BLOCK)
        begun = time.perf_counter()
        for at in range(0, size, _BLOCK):
            if os.preadv(fd, [memory], at) < _BLOCK:
                raise OSError(f"{path} has become shorter")
        return size / (time.perf_counter() - begun) if size else 0.0
    finally:
        os.close(fd)
