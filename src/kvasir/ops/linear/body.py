"""The torch body of linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.ops.linear import TILE

# float32 sums longer than this are split into an ascending chain of products: MKL splits sums from about 1000
# elements on by threads. bfloat16 products (oneDNN) never split the sum.
CHAIN = 256


def linear(x_TK: Tensor, weight_SNK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    rows = x_TK.shape[0]
    if missing := -rows % TILE:
        x_TK = F.pad(x_TK, (0, 0, 0, missing))
    parts = list(_tiles(_segments(x_TK, weight_SNK), weight_SNK))
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0][:rows] if bias_N is None else parts[0][:rows] + bias_N


def _segments(x_TK: Tensor, weight_SNK: Tensor) -> Tensor:
    """[T, S, k] in the weight's dtype, zero-padded after each segment as the weight is."""
    segments, _, padded = weight_SNK.shape
    x_TSk = x_TK.reshape(x_TK.shape[0], segments, -1).to(weight_SNK.dtype)
    missing = padded - x_TSk.shape[-1]
    return F.pad(x_TSk, (0, missing)) if missing else x_TSk


def _tiles(x_TSk: Tensor, weight_SNk: Tensor) -> Tensor:
    """The product of each segment, float32 [S, T, N], computed one tile of rows at a time."""
    rows, segments, _ = x_TSk.shape
    out = torch.empty(segments, rows, weight_SNk.shape[1], device=x_TSk.device)
    for t in range(0, rows, TILE):
        tile = x_TSk[t : t + TILE]
        if segments > 1 and weight_SNk.dtype != torch.float32:
            out[:, t : t + TILE] = torch.bmm(tile.transpose(0, 1), weight_SNk.transpose(1, 2))
        else:
            for s in range(segments):
                out[s, t : t + TILE] = _product(tile[:, s], weight_SNk[s])
    return out


def _product(x_tk: Tensor, weight_Nk: Tensor) -> Tensor:
    if weight_Nk.dtype != torch.float32:
        return F.linear(x_tk, weight_Nk)
    width = weight_Nk.shape[1]
    out = F.linear(x_tk[:, :CHAIN], weight_Nk[:, :CHAIN])
    for k in range(CHAIN, width, CHAIN):
        out += F.linear(x_tk[:, k : k + CHAIN], weight_Nk[:, k : k + CHAIN])
    return out


def round_rows(x_TK: Tensor) -> Tensor:
    largest = x_TK.abs().amax(-1, keepdim=True).clamp_min(1e-5)
    return (x_TK * (127.0 / largest)).round().clamp(-127, 127) * (largest / 127.0)
