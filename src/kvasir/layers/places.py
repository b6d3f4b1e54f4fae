"""Where the modules of a model keep their tensors, and in which form: the executor's choice."""

from __future__ import annotations

from typing import Any, Protocol


class Place(Protocol):
    """Takes arrays of any float type, NumPy's or torch's, and returns what modules keep; it may share their memory."""

    def exact(self, array: Any) -> Any:
        """The array in float32, contiguous."""
        ...

    def matrix(self, array_NK: Any) -> Any:
        """The array, [N, K], in the dtype of the weights."""
        ...

    def segmented(self, array_NK: Any, segments: int) -> Any:
        """The array as [S, N, k] in the dtype of the weights, for `ops.linear`: S segments of the columns."""
        ...

    def in_float32(self) -> Place:
        """The same place for a module whose matrices are not rounded."""
        ...
