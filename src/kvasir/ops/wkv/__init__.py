"""RWKV-7 (arXiv:2503.14456) over paged states: the token shift, and linear attention with one matrix per head as its
state, from which a vector of its own, not the written key, removes.

    S <- S diag(w) - (S n) (rate n)^T + v k^T;   o = S r          for one token after the other

with n = k_k key, normalised; k = key (1 + k_a (rate - 1)); rate = sigmoid(a); w = exp(-e^-0.5 sigmoid(w)). Then, per
head, a norm of o and a bonus: (sum of r k r_k) v. It is computed token by token, as written: a row's operations are
those from the start of its block up to it, however that range was chunked into steps. Sums use the halving tree; all
else is elementwise.

A block of the cache holds the state at its start and, as rows, the inputs of the token before it and of its own:

    state [H, d, d] | before [1, I] | own [block size, I]        I = inputs of the shift, then w, key, v and a
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.ops.registry import op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.gated_delta.plan import StatePlan

# letters: T token rows, D channels of the shift, M mixes, C channels of all heads, H heads, d their width, I numbers of
# an input row


@dataclass(frozen=True, slots=True)
class WkvSizes:
    """heads of width dim. eps: of the norm, None for no norm."""

    heads: int
    dim: int
    eps: float | None

    @property
    def channels(self) -> int:
        return self.heads * self.dim


@dataclass(frozen=True, slots=True)
class WkvWeights:
    """The weights of the rule, float32 [C] each. weight, bias: of the norm, None without one."""

    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    weight: Tensor | None
    bias: Tensor | None


def _mixes(x_TD: Tensor, mix_MD: Tensor, rows: Tensor, plan: StatePlan) -> tuple[tuple[int, ...], ...]:
    return (x_TD.shape[-1:],) * mix_MD.shape[0]


@op_with(_mixes)
def token_shift(x_TD: Tensor, mix_MD: Tensor, rows: Tensor, plan: StatePlan) -> tuple[Tensor, ...] | Tensor:
    """For each mix, x + mix * (the x of the sequence's previous token - x), float32 [T, D]; 0 stands for the token
    before the first. One mix gives one tensor.

    mix: float32 [M, D], at most six. rows: [blocks, 1 + block size, I] of the layer, of which x is the beginning.
    Writes the step's x, and the first rows of newly opened blocks.
    """
    ...


def _outputs(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, weights: WkvWeights, state: Tensor, rows: Tensor,
             plan: StatePlan, sizes: WkvSizes) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    return ((sizes.channels,),)


@op_with(_outputs)
def wkv(
    r_TC: Tensor,
    w_TC: Tensor,
    k_TC: Tensor,
    v_TC: Tensor,
    a_TC: Tensor,
    weights: WkvWeights,
    state: Tensor,
    rows: Tensor,
    plan: StatePlan,
    sizes: WkvSizes,
) -> Tensor:
    """The normalised o of each planned row with its bonus, float32 [T, C]; rows that are in no walk have o = 0.

    w, a: before their functions. state: [blocks, H, d, d], of a value's dimensions, then a key's. rows: [blocks, 1 +
    block size, I] of the layer, of which w, k, v and a are the end. Writes the step's w, k, v and a, and the states of
    newly opened blocks.
    """
    ...
