"""Matrices that another process holds."""

from __future__ import annotations

import numpy as np


class AbsentMatrix:
    """The sizes of a matrix [rows, cols], with which a forward can be traced. Nothing can be computed with it."""

    format = "absent"
    nbytes = 0
    scale = 1.0
    inputs = None

    def __init__(self, rows: int, cols: int):
        self.rows, self.cols = rows, cols

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    def row(self, index: int) -> np.ndarray:
        """Zeros, float32 [cols]."""
        return np.zeros(self.cols, np.float32)
