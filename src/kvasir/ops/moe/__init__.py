"""Mixtures of experts: routing rows to experts, and summing the experts' outputs.

The idea: arXiv:1701.06538; in this form: Mixtral, arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvasir.ops.moe.routing import Routing
from kvasir.ops.registry import op, op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.parallel import ExpertShare

# Changes the product of an expert's matrix for the rows of adapters: (product [n, N], inputs [n, K], token rows [n],
# 0 for gate, 1 for up or 2 for down, place of the expert in the sequences) -> [n, N]. It may overwrite the product.
Change = Callable[["Tensor", "Tensor", "Tensor", int, int], "Tensor"]

# letters: T token rows, E experts, k chosen experts of a row, D model width, I an expert's inner width


def _chosen(
    logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None, scales_E: Tensor | None = None
) -> tuple[tuple[int, ...], ...]:
    return (routing.top_k,), (routing.top_k,)


@op_with(_chosen)
def route(
    logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None, scales_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each row: ids int64 [T, k], ascending, and weights float32 [T, k].

    The choice is by logit, or by score plus bias if there is a bias; among equals the lower id, or the lower group,
    wins. A weight is the expert's score, times the expert's scale if there are scales. All sums use the halving tree,
    in ascending id. logits, bias, scales: float32.
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
    act: Callable[..., Tensor],
    share: ExpertShare | None = None,
    biases: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]] | None = None,
    weigh_inputs: bool = False,
    change: Change | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Each row's sum over its experts of weight * down(act(gate(x)) * up(x)), float32 [T, D].

    x, weights: float32. ids: int64 [T, k], distinct and ascending in a row. gate, up: per expert [1, I, D]; down: per
    expert [S, D, I / S], all as in `linear`. act: an op of `ACTIVATIONS`, or `clamped_swiglu` in place of
    act(gate) * up. up is empty for experts without a gate: down(act(gate(x))). The sum starts at zero and adds the
    rounded products in ascending expert id. share: how ranks split the experts or their sums; results are exchanged
    before they are weighted. biases: float32 vectors of gate, up and down, per expert. weigh_inputs: whether the weight
    is applied to the expert's input, not to its output. change: of each product, before its bias. limit: of the
    magnitudes of act(gate(x)) and up(x), 0 for none.
    """
    ...
