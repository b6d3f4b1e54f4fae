"""Matrix products whose rows do not see each other.

A library's matmul chooses its order of summation by the shape, so one row alone and the same row among many
differ in bits. Here every product has one shape, tiles of TILE rows, and where the library cuts long sums by the
number of its threads, we cut them before it can.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.ops.registry import op_with

TILE = 32
# float32 sums longer than this are cut into an ascending chain of products: MKL splits those from about 1000
# on by threads. bfloat16 products (oneDNN) never split the sum.
CHAIN = 256


def _outputs(x_TK: Tensor, weight_SNK: Tensor, bias_N: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Of [S, N, k], or of a packed matrix [N, K]."""
    return ((weight_SNK.shape[-2],),)


@op_with(_outputs)
def linear(x_TK: Tensor, weight_SNK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W^T + bias, float32 [T, N]. x: float32 [T, K]. bias: float32.

    weight: [S, N, k], S segments of the sum over K, float32 or a 16-bit type. Where S * k > K, each segment
    of the weight ends in columns of zeros. 16-bit weights meet x rounded to their type, products are summed
    in float32 and rounded to that type per segment. The segments are added by a balanced tree in float32.
    """
    rows = x_TK.shape[0]
    if missing := -rows % TILE:
        x_TK = F.pad(x_TK, (0, 0, 0, missing))
    parts = list(_tiles(_segments(x_TK, weight_SNK), weight_SNK))
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0][:rows] if bias_N is None else parts[0][:rows] + bias_N


def _segments(x_TK: Tensor, weight_SNK: Tensor) -> Tensor:
    """[T, S, k] in the weight's type, zeros after each segment where the weight has them."""
    segments, _, padded = weight_SNK.shape
    x_TSk = x_TK.reshape(x_TK.shape[0], segments, -1).to(weight_SNK.dtype)
    missing = padded - x_TSk.shape[-1]
    return F.pad(x_TSk, (0, missing)) if missing else x_TSk


def _tiles(x_TSk: Tensor, weight_SNk: Tensor) -> Tensor:
    """Each segment's products, float32 [S, T, N], a tile of rows at a time."""
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
