"""Rows of a table by id."""

from __future__ import annotations

from torch import Tensor

from kvasir.ops.registry import op_with


def _width(ids_T: Tensor, weight_ND: Tensor) -> tuple[tuple[int, ...], ...]:
    return ((weight_ND.shape[-1],),)


@op_with(_width)
def embedding(ids_T: Tensor, weight_ND: Tensor) -> Tensor:
    """Float32 [T, D]. ids: int64 [T], within the table. weight: any float type."""
    return weight_ND[ids_T].float()


def row(weight_ND: Tensor, index: int) -> Tensor:
    """Row `index` as float32 [D]; of a packed table as well."""
    return weight_ND[index].float() if isinstance(weight_ND, Tensor) else weight_ND.row(index)
