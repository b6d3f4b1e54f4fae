"""Where the modules of a model keep their tensors, and in which form: the executor's choice."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy as np

GROUP = 32  # elements of a 16-bit row that a product of tensors may read at once


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


class HostPlace:
    """NumPy arrays in host memory, for programs, whose matrices are packed before they get here."""

    def exact(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array, np.float32)

    def matrix(self, array_NK: np.ndarray) -> NoReturn:
        raise AssertionError("a program's matrices are packed")

    def segmented(self, array_NK: np.ndarray, segments: int) -> NoReturn:
        raise AssertionError("a program's matrices are packed")

    def in_float32(self) -> HostPlace:
        return self


class SizePlace:
    """Arrays without memory, to count the bytes that tensors will take. item_bytes: of an element of the weights."""

    def __init__(self, item_bytes: int):
        self._item_bytes = item_bytes

    def exact(self, array: np.ndarray) -> np.ndarray:
        return no_memory(array.shape)

    def matrix(self, array_NK: np.ndarray) -> np.ndarray:
        return no_memory(array_NK.shape, self._item_bytes)

    def segmented(self, array_NK: np.ndarray, segments: int) -> np.ndarray:
        rows, columns = array_NK.shape
        return no_memory((segments, rows, padded(columns // segments, self._item_bytes)), self._item_bytes)

    def in_float32(self) -> SizePlace:
        return SizePlace(4)


def no_memory(shape: tuple[int, ...], item_bytes: int = 4) -> np.ndarray:
    """An array of zeros that all lie at one address."""
    return np.broadcast_to(np.zeros((), f"f{item_bytes}"), shape)


def padded(width: int, item_bytes: int) -> int:
    """The width of a segment's rows in tensors: products of 16-bit types of other depths may read into the next row."""
    return width if item_bytes == 4 else -(-width // GROUP) * GROUP
