"""Lookup of table rows by id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.ops.registry import op_with

if TYPE_CHECKING:
    from torch import Tensor


def _width(ids_T: Tensor, weight_ND: Tensor, first: int | None, or_first: bool) -> tuple[tuple[int, ...], ...]:
    return ((weight_ND.shape[-1],),)


@op_with(_width)
def embedding(ids_T: Tensor, weight_ND: Tensor, first: int | None = None, or_first: bool = False) -> Tensor:
    """Float32 [T, D]. ids: int64 [T], within the table. weight: any float dtype.

    first: if given, the weight is the part of the table that starts at this id; rows for ids outside it are zeros, or
    with or_first the part's first row.
    """
    ...


@op_with(lambda types_T, weight_ND: ((weight_ND.shape[-1],),))
def type_rows(types_T: Tensor, weight_ND: Tensor) -> Tensor:
    """Float32 [T, D]: rows of a small table. types: int64 [T], within the table. weight: any float dtype."""
    ...


def row(weight_ND: Any, index: int) -> Any:
    """Row `index` as float32 [D], of a tensor or of a packed table."""
    row_of = getattr(weight_ND, "row", None)
    return row_of(index) if row_of else weight_ND[index].float()
