"""Attention over a paged cache, and writing to the cache.

Keys are processed in tiles aligned to absolute position. A row's weights in a tile, and their products with the values,
are computed by matmuls of a fixed shape, whatever else is in the batch; the tiles' results are added in ascending
order. Masked keys get the weight 0 by selection, and keys that no row may attend to (unwritten slots, freed blocks) are
replaced by zeros before any arithmetic, so that a NaN in them does not spread.

The softmax first takes its maximum over the whole row, which is exact in any order, so no tile's result is ever
rescaled. Mathematics: arXiv:1706.03762; the paged cache: arXiv:2309.06180.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op, op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.attention.plan import AttentionPlan
    from kvasir.ops.attention.relative import Relative


@op
def store_kv(cache: Tensor, x_TKd: Tensor, slots_T: Tensor) -> None:
    """Writes rows into a layer's keys or values [blocks, block size, K, d], rounded to the cache's dtype.

    slots: int64, block * block size + offset in the block.
    """
    ...


def _mixed(
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
) -> tuple[tuple[int, ...], ...]:
    return ((q_THd.shape[-2], value_dim or q_THd.shape[-1]),)


@op_with(_mixed)
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
    """softmax(q k^T * scale) v of each planned row, float32 [T, H, e]; zeros for rows that are in no item.

    q: float32. Caches: [blocks, block size, K, d] and [.., e], of any float dtype, read as float32. softcap: if not 0,
    scores become softcap * tanh(score / softcap). sinks: an additional score per head, without a value. relative: the
    parts of the scores by relative position. k: the step's keys, for `relative` with queries: texts are then computed
    whole. value_dim: e, 0 if it is d.
    """
    ...
