"""Where ranks meet, as ops: layers call them where a rank has a part alone, and only there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.registry import op, op_with
from kvasir.parallel import Cut, Mesh, picked, side_by_side, tree_sum


@op
def all_reduce(x_TN: Tensor, mesh: Mesh, parts: int) -> Tensor:
    """Float32 [T, N], the sum of the parts that ranks have of it, by a balanced tree."""
    return torch.from_numpy(tree_sum(mesh.meet(x_TN.numpy()), parts))


def _all_columns(x_TN: Tensor, mesh: Mesh, columns: Cut) -> tuple[tuple[int, ...], ...]:
    return ((columns.size,),)


@op_with(_all_columns)
def all_gather(x_TN: Tensor, mesh: Mesh, columns: Cut) -> Tensor:
    """Float32 [T, columns.size] of each part's columns; x: this rank's."""
    return torch.from_numpy(side_by_side(mesh.meet(x_TN.numpy()), columns.parts))


@op
def pick_rows(x_TD: Tensor, ids_T: Tensor, mesh: Mesh, table: Cut) -> Tensor:
    """Float32 [T, D]: row i from the ranks that hold the part of the table with ids[i]."""
    return torch.from_numpy(picked(mesh.meet(x_TD.numpy()), ids_T.numpy(), table))
