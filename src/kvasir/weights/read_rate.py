"""How fast a disk reads."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvasir.weights.packed_file import CHUNK, READERS


def read_rate(path: Path, most: int = 256 << 20) -> float:
    """Bytes per second of reading the beginning of a file as packed weights are read: at most `most` bytes, past the
    page cache where the system allows that. 0 for a file that is too small to tell. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    try:
        size = min(os.fstat(fd).st_size, most) // CHUNK * CHUNK
        memory = [mmap.mmap(-1, CHUNK) for _ in range(READERS)]

        def read(reader: int) -> None:
            for at in range(reader * CHUNK, size, READERS * CHUNK):
                if os.preadv(fd, [memory[reader]], at) < CHUNK:
                    raise OSError(f"{path} has become shorter")

        begun = time.perf_counter()
        with ThreadPoolExecutor(READERS) as readers:
            for _ in readers.map(read, range(READERS)):
                pass
        return size / (time.perf_counter() - begun) if size else 0.0
    finally:
        os.close(fd)
