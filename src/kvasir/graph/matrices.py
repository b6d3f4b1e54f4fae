"""Matrices whose rows follow each other in memory, so that one product computes several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvasir.ops.linear.triton_matrix import DeviceMatrix, stacked


def split_rows(matrix: DeviceMatrix, sizes: Sequence[int]) -> list[DeviceMatrix]:
    """The matrix in runs of rows, as views."""
    planes = [[None] * len(sizes) if plane is None else plane.split(list(sizes)) for plane in _planes(matrix)]
    pieces = zip(sizes, *planes, strict=True)
    return [replace(matrix, rows=rows, data=data, scales=scales, mins=mins) for rows, data, scales, mins in pieces]


def adjoining(matrices: Sequence[DeviceMatrix]) -> DeviceMatrix:
    """The matrices as one: a view if they follow each other in memory, else a copy."""
    found = [_joined(parts) for parts in zip(*map(_planes, matrices), strict=True)]
    if any(part is None and plane is not None for part, plane in zip(found, _planes(matrices[0]), strict=True)):
        return stacked(matrices)
    data, scales, mins = found
    assert data is not None
    return replace(matrices[0], rows=sum(m.rows for m in matrices), data=data, scales=scales, mins=mins)


def _planes(matrix: DeviceMatrix) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return matrix.data, matrix.scales, matrix.mins


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors that follow each other in memory, as one; None if they do not."""
    first, end, rows = parts[0], None, 0
    for part in parts:
        if first is None or part is None or not part.is_contiguous() or (end is not None and part.data_ptr() != end):
            return None
        end = part.data_ptr() + part.numel() * part.element_size()
        rows += len(part)
    assert first is not None
    if first.untyped_storage().nbytes() < (rows * first[0].numel()) * first.element_size():
        return None  # neighbours by chance, of several allocations
    return first.as_strided((rows, *first.shape[1:]), first.stride())
