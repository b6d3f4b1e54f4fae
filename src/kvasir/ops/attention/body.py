"""The torch bodies of the paged cache and of attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.ops.attention.plan import TILE, AttentionPlan, Pass
from kvasir.ops.attention.relative import EDGE, Relative
from kvasir.ops.products import products

# letters: T token rows, H heads, K KV heads, G heads per KV head, R rows of an item, d head width, n tiles, u
# items, s sequences
_PAD = 16  # columns appended to the values; the first accumulates the sum of the weights


def store_kv(cache: Tensor, x_TKd: Tensor, slots_T: Tensor) -> None:
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots_T, x_TKd.to(cache.dtype))


def paged_attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    relative: Relative | None = None,
    k_TKd: Tensor | None = None,
    value_dim: int = 0,
) -> Tensor:
    out_THe = q_THd.new_zeros(*q_THd.shape[:2], v_cache.shape[-1])
    kv_heads = k_cache.shape[2]
    sinks_KR = _sink_rows(sinks_H, plan, kv_heads)
    for part in plan.parts:
        k_snKtd = _read(k_cache, part.blocks, part.outside)
        v_snKte = _with_counter(_read(v_cache, part.blocks, part.outside))
        for item in part.passes:
            tiles = slice(item.first, item.first + item.count)
            q_uKRd = _item_rows(q_THd[item.rows], plan, kv_heads)
            added = None if relative is None else _by_position(q_uKRd, k_TKd, item, plan, relative, scale)
            scores_unKRt = _scores(q_uKRd, k_snKtd[:, tiles], item, scale, softcap, added)
            mixed_uKRe = _mix(scores_unKRt, v_snKte[:, tiles], item, sinks_KR)
            rows_xHe = _token_rows(mixed_uKRe, plan)
            out_THe[item.targets] = rows_xHe if item.keep is None else rows_xHe[item.keep]
    return out_THe


def _read(cache: Tensor, blocks: Tensor, outside: Tensor) -> Tensor:
    """Blocks [s, b] of a layer's keys or values as float32 [s, n, K, TILE, d], with zeros for masked keys."""
    _, _, kv_heads, dim = cache.shape
    gathered = cache[blocks].view(blocks.shape[0], -1, TILE, kv_heads, dim)
    tiles = torch.empty(gathered.transpose(2, 3).shape, device=cache.device)
    return tiles.copy_(gathered.transpose(2, 3)).masked_fill_(outside, 0.0)


def _with_counter(v: Tensor) -> Tensor:
    """Appends a column of ones to the values: its weighted sum is the sum of the weights."""
    v = F.pad(v, (0, _PAD))
    v[..., -_PAD] = 1.0
    return v


def _item_rows(q_xHd: Tensor, plan: AttentionPlan, kv_heads: int) -> Tensor:
    """[u * tokens, H, d] -> [u, K, R, d]: an item's query tokens times the heads of a KV head, padded to R."""
    dim = q_xHd.shape[-1]
    q = q_xHd.view(-1, plan.tokens, kv_heads, plan.group, dim).transpose(1, 2)
    q = q.reshape(q.shape[0], kv_heads, plan.tokens * plan.group, dim)
    return F.pad(q, (0, 0, 0, plan.rows - q.shape[2]))


def _token_rows(mixed_uKRd: Tensor, plan: AttentionPlan) -> Tensor:
    """[u, K, R, d] -> [u * tokens, H, d]."""
    items, kv_heads, _, dim = mixed_uKRd.shape
    rows = mixed_uKRd[:, :, : plan.tokens * plan.group]
    rows = rows.view(items, kv_heads, plan.tokens, plan.group, dim).transpose(1, 2)
    return rows.reshape(items * plan.tokens, kv_heads * plan.group, dim)


def _scores(
    q_uKRd: Tensor, k_unKtd: Tensor, item: Pass, scale: float, softcap: float, added_unKRt: Tensor | None
) -> Tensor:
    q_unKRd = q_uKRd.unsqueeze(1).expand(-1, item.count, -1, -1, -1)
    scores = _matmul(q_unKRd, k_unKtd.transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if added_unKRt is not None:
        scores = scores + added_unKRt
    return scores.masked_fill_(item.blocked, -torch.inf)


def _by_position(
    q_uKRd: Tensor, k_TKd: Tensor | None, item: Pass, plan: AttentionPlan, relative: Relative, scale: float
) -> Tensor:
    """The parts of the scores by relative position, [u, n, K, R, t]: (q keys + k queries) * scale + bias."""
    items, kv_heads, rows, dim = q_uKRd.shape
    device = q_uKRd.device
    at_R = torch.clamp(torch.arange(rows, device=device) // plan.group, max=plan.tokens - 1)
    queries_uR = item.positions[:, at_R]
    keys_unt = item.start[:, None] + torch.arange(item.count * TILE, device=device)
    keys_unt = keys_unt.view(items, item.count, TILE)
    away = keys_unt[:, :, None, None] - queries_uR[:, None, None, :, None]  # [u, n, 1, R, t]
    column = away.clamp(-relative.reach, relative.reach) + relative.reach + EDGE
    heads_KR = torch.arange(kv_heads, device=device)[:, None] * plan.group
    heads_KR1 = (heads_KR + torch.arange(rows, device=device) % plan.group)[..., None]
    total = torch.zeros(items, item.count, kv_heads, rows, TILE, device=device)
    if relative.keys is not None:
        table = torch.from_numpy(relative.keys).to(device)
        total = total + _chain(table, heads_KR1, column, [q_uKRd[:, None, :, :, i, None] for i in range(dim)])
    if relative.queries is not None:
        assert k_TKd is not None, "a table of queries needs the step's keys"
        table = torch.from_numpy(relative.queries).to(device)
        first_u = item.rows.view(items, -1)[:, 0] - item.positions[:, 0]
        row_unt = (first_u[:, None, None] + keys_unt).clamp(0, len(k_TKd) - 1)
        k_unKtd = k_TKd[row_unt].transpose(2, 3)
        total = total + _chain(table, heads_KR1, column, [k_unKtd[:, :, :, None, :, i] for i in range(dim)])
    total = total * scale
    if relative.bias is None:
        return total
    return total + torch.from_numpy(relative.bias).to(device)[heads_KR1, column]


def _chain(table_HdC: Tensor, heads_KR1: Tensor, column: Tensor, factors: list[Tensor]) -> Tensor:
    """The sum over i of the factor i times row i of the table, in ascending order."""
    total = factors[0] * table_HdC[:, 0][heads_KR1, column]
    for i in range(1, len(factors)):
        total = total + factors[i] * table_HdC[:, i][heads_KR1, column]
    return total


def _mix(scores_unKRt: Tensor, v_unKte: Tensor, item: Pass, sinks_KR: Tensor | None) -> Tensor:
    """The softmax-weighted values [u, K, R, d]; zeros for rows that attend to nothing."""
    top_uKR = scores_unKRt.amax(dim=(1, 4))
    if sinks_KR is not None:
        top_uKR = torch.maximum(top_uKR, sinks_KR)
    top_uKR = torch.where(top_uKR == -torch.inf, 0.0, top_uKR)
    weights_unKRt = torch.exp(scores_unKRt - top_uKR[:, None, ..., None])
    total_uKRe = _ascending_sum(_matmul(weights_unKRt, v_unKte))
    if not bool(torch.isfinite(total_uKRe).all()):
        total_uKRe = _ascending_sum(_matmul_apart(weights_unKRt, v_unKte, item.blocked))
    weight_uKR = total_uKRe[..., -_PAD]
    if sinks_KR is not None:
        weight_uKR = weight_uKR + torch.exp(sinks_KR - top_uKR)
    return total_uKRe[..., :-_PAD] / torch.where(weight_uKR == 0.0, 1.0, weight_uKR).unsqueeze(-1)


def _ascending_sum(tiles_unKRe: Tensor) -> Tensor:
    total = tiles_unKRe[:, 0]
    for j in range(1, tiles_unKRe.shape[1]):
        total = total + tiles_unKRe[:, j]
    return total


def _matmul_apart(weights_unKRt: Tensor, v_unKte: Tensor, blocked_un1Rt: Tensor) -> Tensor:
    """The same product when some value is not finite. 0 * NaN would spread to masked rows, so each row gets values that
    are zero where it is masked. Shapes, and so the bits of unaffected rows, stay the same."""
    out = torch.empty(*weights_unKRt.shape[:-1], v_unKte.shape[-1], device=v_unKte.device)
    for r in range(weights_unKRt.shape[3]):
        seen = v_unKte.masked_fill(blocked_un1Rt[:, :, :, r, :, None], 0.0)
        out[:, :, :, r] = _matmul(weights_unKRt, seen)[:, :, :, r]
    return out


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched over all leading dimensions: one product of fixed shape for each."""
    lead = a.shape[:-2]
    product = products(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    return product.view(*lead, *product.shape[-2:])


def _sink_rows(sinks_H: Tensor | None, plan: AttentionPlan, kv_heads: int) -> Tensor | None:
    """Expands a value per head to a value per row of an item, [K, R]."""
    if sinks_H is None:
        return None
    per_token = sinks_H.view(kv_heads, 1, plan.group).expand(-1, plan.tokens, -1)
    return F.pad(per_token.reshape(kv_heads, -1), (0, plan.rows - plan.tokens * plan.group))
