"""The torch bodies of operations on streams."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.norm.body import tree_sum

# letters: T token rows, S streams, D their width


def predict_streams(x_TN: Tensor, coefs_TSS: Tensor, streams: int) -> Tensor:
    x_TSD, coefs_Tjs = x_TN.unflatten(1, (streams, -1)), coefs_TSS.unflatten(1, (streams, streams))
    out_TSD = x_TSD
    for s in range(streams):
        out_TSD = out_TSD + x_TSD[:, s : s + 1] * coefs_Tjs[:, :, s : s + 1]
    return out_TSD.flatten(1)


def correct_streams(x_TN: Tensor, computed_TD: Tensor, coefs_TS: Tensor, streams: int, active: int) -> Tensor:
    x_TSD = x_TN.unflatten(1, (streams, -1))
    change_T1D = (computed_TD - x_TSD[:, active]).unsqueeze(1)
    return (x_TSD + change_T1D * (coefs_TS + 1.0).unsqueeze(2)).flatten(1)


def add_to_streams(x_TN: Tensor, added_TD: Tensor, streams: int) -> Tensor:
    x_TSD = x_TN.unflatten(1, (streams, -1))
    return torch.cat([x_TSD[:, :1], x_TSD[:, 1:] + added_TD.unsqueeze(1)], dim=1).flatten(1)


def match_magnitude(x_TD: Tensor, like_TD: Tensor, least: float) -> Tensor:
    square, target = (tree_sum(rows * rows) / rows.shape[-1] for rows in (x_TD, like_TD))
    return x_TD * torch.sqrt(target) / torch.sqrt(torch.clamp_min(square, least))


def scale_columns(x_TD: Tensor, factors_D: Tensor) -> Tensor:
    return x_TD * factors_D


def gaussian_cut(x_TD: Tensor, deviations: float) -> Tensor:
    mean = tree_sum(x_TD) / x_TD.shape[-1]
    centred = x_TD - mean
    deviation = torch.sqrt(tree_sum(centred * centred) / x_TD.shape[-1])
    return torch.clamp_min(x_TD - (mean + deviation * deviations), 0.0)
