"""Sparse attention by an indexer (DeepSeek-V3.2, arXiv:2512.02556): each token attends to the tokens with the greatest
scores among the earlier ones and itself.

    score of a key = sum over heads of weight * relu(q k * scale)        equal scores: the earlier token

While there are no more tokens than are selected, all are, and attention has the bits of `paged_attention`. Otherwise it
has those of a sequence of the selected tokens alone, in ascending order. A score depends on its two rows only: products
have fixed shapes, and heads are added in ascending order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.attention.plan import AttentionPlan
    from kvasir.ops.indexer.plan import Walked

# letters: T token rows, H heads, K KV heads, d, e widths, S selected tokens


def _positions(
    q_THd: Tensor, weights_TH: Tensor, k_Td: Tensor, cache: Tensor, plan: tuple[Walked, ...], scale: float, top_k: int
) -> tuple[tuple[int, ...], ...]:
    return ((top_k,),)


@op_with(_positions)
def select_tokens(
    q_THd: Tensor, weights_TH: Tensor, k_Td: Tensor, cache: Tensor, plan: tuple[Walked, ...], scale: float, top_k: int
) -> Tensor:
    """The positions that each row attends to: int32 [T, top_k], ascending, then -1. Rows that are in no work have -1.

    q, weights, k: float32. cache: the layer's keys, float32 [blocks, block size, d]; those of the step, k, are written
    first.
    """
    ...


def _mixed(
    q_THd: Tensor,
    selected_TS: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    rows: tuple[Walked, ...],
    scale: float,
    value_dim: int,
) -> tuple[tuple[int, ...], ...]:
    return ((q_THd.shape[-2], value_dim),)


@op_with(_mixed)
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
    """softmax(q k^T * scale) v over the selected positions of each row, float32 [T, H, e].

    selected: as `select_tokens` returns it. plan: of attention to all positions. rows: of the step. Other arguments as
    in `paged_attention`; there is one KV head.
    """
    ...
