"""Matrices that follow each other in memory, so that one launch computes with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module
from kvasir.layers.moe import MoE
from kvasir.ops.graph import CannotTrace
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


def of_experts(matrices: Sequence[DeviceMatrix]) -> DeviceMatrix:
    """The matrices of a layer's experts as one, whose planes have a first dimension of experts."""
    whole = adjoining(matrices)
    shape = len(matrices), -1
    data, scales, mins = (None if plane is None else plane.unflatten(0, shape) for plane in _planes(whole))
    assert data is not None
    return replace(matrices[0], data=data, scales=scales, mins=mins)


def stack_experts(model: Module) -> None:
    """Moves the matrices of each layer's experts to adjoining memory, a layer at a time; those of experts without gates
    stay, for no kernel computes them."""
    for _, moe in model.walk():
        if isinstance(moe, MoE) and all(isinstance(expert, GatedMLP) for expert in moe.experts):
            held = moe.held()
            gate_up, down = [e.gate_up.weights for e in held], [e.down.weights for e in held]
            for holders, part in ((gate_up, "gate"), (gate_up, "up"), (down, "weight")):
                _stack(holders, part)


def _stack(holders: Sequence[dict[str, Any]], part: str) -> None:
    matrices = [weights[part] for weights in holders]
    if len({matrix.format for matrix in matrices}) > 1:
        raise CannotTrace("the experts of a layer have different weight formats")
    parts = split_rows(stacked(matrices), [matrix.rows for matrix in matrices])
    for weights, matrix in zip(holders, parts, strict=True):
        weights[part] = matrix


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
