"""Collective ops over ranks. Layers call them only where a rank holds just a part of a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op, op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.parallel import Cut, Mesh


@op
def all_reduce(x_TN: Tensor, mesh: Mesh, parts: int) -> Tensor:
    """Float32 [T, N], the sum of the ranks' partial sums, by a balanced tree."""
    ...


def _all_columns(x_TN: Tensor, mesh: Mesh, columns: Cut) -> tuple[tuple[int, ...], ...]:
    return ((columns.size,),)


@op_with(_all_columns)
def all_gather(x_TN: Tensor, mesh: Mesh, columns: Cut) -> Tensor:
    """Float32 [T, columns.size], the columns of all parts. x: this rank's columns."""
    ...


@op
def pick_rows(x_TD: Tensor, ids_T: Tensor, mesh: Mesh, table: Cut) -> Tensor:
    """Float32 [T, D]: row i from a rank whose part of the table includes ids[i]."""
    ...
