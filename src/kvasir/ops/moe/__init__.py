"""Mixtures of experts: routing rows to experts, and summing the experts' outputs.

The idea: arXiv:1701.06538; in this form: Mixtral, arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvasir.ops.registry import op, op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.parallel import ExpertShare

# letters: T token rows, E experts, k chosen experts of a row, D model width, I an expert's inner width


def _chosen(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[tuple[int, ...], ...]:
    return (top_k,), (top_k,)


@op_with(_chosen)
def route(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row by logit: ids int64 [T, k], ascending, and weights float32 [T, k].

    A weight is the expert's probability in the softmax over all experts or, with normalise, over the selected ones. On
    equal logits the lower id wins. Both sums use the halving tree, in ascending id. logits: float32.
    """
    ...


@op
def experts(
    x_TD: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    act: Callable[[Tensor], Tensor],
    share: ExpertShare | None = None,
) -> Tensor:
    """Each row's sum over its experts of weight * down(act(gate(x)) * up(x)), float32 [T, D].

    x, weights: float32. ids: int64 [T, k], distinct and ascending in a row. gate, up: per expert [1, I, D]; down: per
    expert [S, D, I / S], all as in `linear`. act: an op of `ACTIVATIONS`. The sum starts at zero and adds the rounded
    products in ascending expert id. share: how ranks split the experts or their sums; results are exchanged before they
    are weighted.
    """
    ...
