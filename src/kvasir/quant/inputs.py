"""What a checkpoint says about the input rows of one of its matrices: their order, and how they are rounded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROUNDINGS = ("", "int8", "fp8", "outliers")  # in the order of csrc/input_rule.h


class Inputs(NamedTuple):
    """rounding: "" as the packed format does it; "int8": x / scale, clamped to [-128, 127], to the nearest integer;
    "fp8": x / scale, clamped to [-448, 448], to the nearest E4M3; "outliers": values of at least `scale`, a threshold,
    stay float32, and the others become int8 in [-127, 127] by one scale (LLM.int8). scale: static, or 0 for a dynamic
    one, the largest magnitude over 127.5 or 448; for a threshold, 0 is none. group: columns that share a dynamic scale,
    0 for all of a row. order: int32 [cols], a permutation: the matrix's column k is multiplied by column order[k] of a
    row; None for their own order."""

    rounding: str = ""
    scale: float = 0.0
    group: int = 0
    order: np.ndarray | None = None

    @property
    def key(self) -> tuple:
        """Equal for matrices whose rows are converted in the same way."""
        order = b"" if self.order is None else self.order.tobytes()
        return self.rounding, self.scale, self.group, order

    @property
    def is_shared(self) -> bool:
        """Whether the matrices of several experts have the same rule."""
        return self.order is None and (self.scale == 0 or self.rounding == "outliers")

    @property
    def needs_row(self) -> bool:
        """Whether the whole row decides how a value is rounded."""
        return self.rounding == "outliers" or (self.rounding != "" and self.scale == 0 and self.group == 0)

    def record(self) -> np.ndarray:
        """struct InputRule of csrc/input_rule.h with its order, uint8."""
        head = np.zeros((), np.dtype([("rounding", "<i4"), ("group", "<i4"), ("scale", "<f4"), ("ordered", "<i4")]))
        head["rounding"], head["group"], head["scale"] = ROUNDINGS.index(self.rounding), self.group, self.scale
        head["ordered"] = self.order is not None
        order = b"" if self.order is None else np.ascontiguousarray(self.order, np.int32).tobytes()
        return np.frombuffer(head.tobytes() + order, np.uint8)
