"""Large arrays in pages of their own, at a fixed address."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np


def paged(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of zeros that begins at a page. A page takes memory once it is written, and never more than its own
    size: NumPy asks the system for huge pages, which would make a few rows of a large table cost megabytes."""
    size = prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, size, **private), dtype).reshape(shape)
