"""The torch bodies of the collective ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.parallel import Cut, ExpertShare, Mesh, each_part, tree_sum
from kvasir.parallel.group import GroupRank


def all_reduce(x_TN: Tensor, mesh: Mesh, parts: int) -> Tensor:
    return tree_sum(_everyones(x_TN, mesh), parts)


def all_gather(x_TN: Tensor, mesh: Mesh, columns: Cut) -> Tensor:
    widths = [last - first for first, last in map(columns.range, range(columns.parts))]
    padded = pad(x_TN, (0, max(widths) - x_TN.shape[1]))  # all tensors of a group have one shape
    everyones = each_part(_everyones(padded, mesh), columns.parts)
    return torch.cat([theirs[:, :width] for theirs, width in zip(everyones, widths, strict=True)], 1)


def pick_rows(x_TD: Tensor, ids_T: Tensor, mesh: Mesh, table: Cut) -> Tensor:
    everyones = torch.stack([*each_part(_everyones(x_TD, mesh), table.parts)])
    borders = torch.tensor(table.borders, device=ids_T.device)
    part_T = torch.searchsorted(borders, ids_T, right=True) - 1
    return everyones[part_T, torch.arange(len(ids_T), device=ids_T.device)]


def complete(rows_SD: Tensor, begins: Sequence[int], share: ExpertShare) -> None:
    """As ExpertShare.complete."""
    everyones = _everyones(rows_SD, share.mesh)
    if share.parts > 1:
        rows_SD[:] = tree_sum(everyones, share.parts)
    if share.experts.parts == 1:
        return
    for part, theirs in enumerate(each_part(everyones, share.experts.parts)):
        first, last = (begins[e] for e in share.experts.range(part))
        rows_SD[first:last] = theirs[first:last]


def _everyones(x: Tensor, mesh: Mesh) -> Sequence[Tensor]:
    """The tensors of all ranks."""
    if isinstance(mesh, GroupRank):
        return mesh.gather(x)
    return [torch.from_numpy(theirs) for theirs in mesh.meet(x.numpy())]
