"""The torch bodies of sparse attention by an indexer."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.ops.attention import paged_attention
from kvasir.ops.attention.plan import AttentionPlan, plan_attention
from kvasir.ops.attention.sizes import TILE
from kvasir.ops.attention.weights import attention_weights
from kvasir.ops.indexer.plan import Walked
from kvasir.ops.products import products
from kvasir.plan import Work

# letters: T token rows, r rows of a work, n tiles, H heads, d, e widths, t keys of a tile, S selected tokens
_ROWS = 64  # that are attended at once
_BUDGET = 1 << 22  # elements of the scores of all heads that are computed at once


def select_tokens(
    q_THd: Tensor, weights_TH: Tensor, k_Td: Tensor, cache: Tensor, plan: tuple[Walked, ...], scale: float, top_k: int
) -> Tensor:
    out_TS = torch.full((len(q_THd), top_k), -1, dtype=torch.int32, device=q_THd.device)
    for work in plan:
        rows, at = slice(work.first, work.first + work.count), np.arange(work.start, work.end)
        slots = work.blocks[at // work.block_size] * work.block_size + at % work.block_size
        cache.view(-1, cache.shape[-1])[torch.from_numpy(slots)] = k_Td[rows]
        keys_ntd = _tiles(cache, work)
        step = max(1, _BUDGET // (len(keys_ntd) * TILE * q_THd.shape[1]))
        for first in range(0, work.count, step):
            part = slice(work.first + first, work.first + min(first + step, work.count))
            seen_r = torch.arange(work.start + first, work.start + first + part.stop - part.start) + 1
            out_TS[part] = _best(_scores(q_THd[part], weights_TH[part], keys_ntd, scale), seen_r, top_k)
    return out_TS


def _tiles(cache: Tensor, work: Walked) -> Tensor:
    """The keys of a work [n, TILE, d], with zeros after the last one."""
    keys = cache[torch.from_numpy(work.blocks)].flatten(0, 1)[: work.end]
    return F.pad(keys, (0, 0, 0, -work.end % TILE)).view(-1, TILE, keys.shape[-1])


def _scores(q_rHd: Tensor, weights_rH: Tensor, keys_ntd: Tensor, scale: float) -> Tensor:
    """[r, n * TILE]"""
    rows, tiles = len(q_rHd), len(keys_ntd)
    q = q_rHd[:, None].expand(-1, tiles, -1, -1).flatten(0, 1)
    k = keys_ntd[None].expand(rows, -1, -1, -1).flatten(0, 1)
    heads_rnHt = torch.relu(products(q, k.transpose(1, 2)) * scale).view(rows, tiles, -1, TILE)
    total = torch.zeros(rows, tiles, TILE, device=q.device)
    for h in range(q_rHd.shape[1]):
        total = total + weights_rH[:, h, None, None] * heads_rnHt[:, :, h]
    return total.flatten(1)


def _best(scores_rk: Tensor, seen_r: Tensor, top_k: int) -> Tensor:
    """The positions of the greatest scores among the first `seen` of each row, int32 [r, top_k]."""
    keys = scores_rk.shape[1]
    positions = torch.arange(keys, device=scores_rk.device)
    scores = scores_rk.masked_fill(positions >= seen_r[:, None], -torch.inf)
    found = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    found = torch.where(found < seen_r[:, None], found, keys).sort(dim=1).values
    return F.pad(torch.where(found < keys, found, -1), (0, top_k - found.shape[1]), value=-1).int()


def selected_attention(
    q_THd: Tensor,
    selected_TS: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    rows: tuple[Walked, ...],
    scale: float,
    value_dim: int,
) -> Tensor:
    out_THe = paged_attention(q_THd, k_cache, v_cache, plan, scale, value_dim=value_dim)
    top_k = selected_TS.shape[1]
    for work in rows:
        first = work.first + max(0, top_k - work.start)
        for at in range(first, work.first + work.count, _ROWS):
            part = slice(at, min(at + _ROWS, work.first + work.count))
            out_THe[part] = _attend(q_THd[part], k_cache, v_cache, work, selected_TS[part].cpu().numpy(), scale)
    return out_THe


def _attend(
    q_rHd: Tensor, k_cache: Tensor, v_cache: Tensor, work: Walked, selected_rS: np.ndarray, scale: float
) -> Tensor:
    """Attention of rows to a cache that holds the selected tokens of each row as a sequence."""
    (rows, heads, dim), count = q_rHd.shape, selected_rS.shape[1]
    k, v = (_copy(cache, work, selected_rS) for cache in (k_cache, v_cache))
    plan = plan_attention(
        [Work(i, count - 1, 1) for i in range(rows)], range(rows), np.arange(len(k)).reshape(rows, -1), group=heads,
        window=0, block_size=TILE, width=dim, device=q_rHd.device,
    )  # fmt: skip
    return paged_attention(q_rHd, k, v, plan, scale)


def _copy(cache: Tensor, work: Walked, selected_rS: np.ndarray) -> Tensor:
    """The selected tokens of each row, one row after the other, each in whole blocks [blocks, TILE, K, d]."""
    blocks, offsets = work.blocks[selected_rS // work.block_size], selected_rS % work.block_size
    rows, count = selected_rS.shape
    copy = cache.new_zeros(rows, -(-count // TILE) * TILE, *cache.shape[2:])
    copy[:, :count] = cache[torch.from_numpy(blocks), torch.from_numpy(offsets).long()]
    return copy.view(-1, TILE, *copy.shape[2:])


def selected_weights(q_rHd: Tensor, k_cache: Tensor, work: Walked, selected_rS: Tensor, scale: float) -> Tensor:
    """The attention weights of the rows of a work, float32 [r, H, end]; 0 for positions that were not selected."""
    weights_rHt = torch.zeros(work.count, q_rHd.shape[1], work.end, device=q_rHd.device)
    for i in range(work.count):
        selected = selected_rS[i].cpu().numpy()
        selected = selected[selected >= 0]
        keys, one = _copy(k_cache, work, selected[None]), Work(0, len(selected) - 1, 1)
        found = attention_weights(q_rHd[i, None], keys, one, np.arange(len(keys)), window=0, scale=scale)
        weights_rHt[i][:, torch.from_numpy(selected).long()] = found[0]
    return weights_rHt
