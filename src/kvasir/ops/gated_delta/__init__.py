"""The gated delta rule over paged states: linear attention with one matrix per head as its state.

    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q          for one token after the other

(arXiv:2412.06464), with q and k normalised, after a short causal convolution of the inputs. A head has one decay
exp(g), or one for each dimension of k (Kimi Delta Attention, arXiv:2510.26692). It is computed token by token, as
written: a row's operations are those from the start of its block up to it, however that range was chunked
into steps. Sums use the halving tree; all else is elementwise.

A block of the cache holds the state at its start and, as rows, the inputs of the preceding tokens that the convolution
needs, then those of its own tokens:

    state [V, e, d] | before [K - 1, I] | own [block size, I]        I = channels of q, k, v, then beta and decays
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.ops.registry import op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.gated_delta.plan import StatePlan

# letters: T token rows, C channels of q, k and v, I numbers of an input row, K taps of the convolution, H heads of q
# and k, V heads of v, d their width of q and k, e of v, G decays of all heads of v


@dataclass(frozen=True, slots=True)
class Heads:
    """qk heads of q and k, of width dim; v heads of v, of width v_dim. v / qk heads of v share a q and a k: adjacent
    ones or, if tiled, those whose numbers have the same remainder. decays: of a head of v, 1 or dim."""

    qk: int
    v: int
    dim: int
    v_dim: int
    tiled: bool = False
    decays: int = 1

    @property
    def channels(self) -> int:
        return 2 * self.qk * self.dim + self.v * self.v_dim

    @property
    def inputs(self) -> int:
        return self.channels + (1 + self.decays) * self.v


def _two(
    beta_TV: Tensor, dt_TG: Tensor, log_rate_G: Tensor, bias_G: Tensor, strength: float = 1.0
) -> tuple[tuple[int, ...], ...]:
    return beta_TV.shape[-1:], dt_TG.shape[-1:]


@op_with(_two)
def delta_gates(
    beta_TV: Tensor, dt_TG: Tensor, log_rate_G: Tensor, bias_G: Tensor, strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The write strength, strength * sigmoid(beta), and the decay, exp(-exp(log_rate) * softplus(dt + bias)).

    beta: float32 [T, V]. dt: float32 [T, G]. log_rate, bias: float32 [G]. With a strength of 2, eigenvalues of the
    state's transition may be negative (arXiv:2411.12537).
    """
    ...


def _joined(*parts: Tensor) -> tuple[tuple[int, ...], ...]:
    return ((sum(part.shape[-1] for part in parts),),)


@op_with(_joined)
def delta_inputs(q: Tensor, k: Tensor, v: Tensor, beta_TV: Tensor, decay_TG: Tensor) -> Tensor:
    """The input rows of `gated_delta`, float32 [T, I]: the columns of q, k and v, then beta and decays.

    q, k: float32 [T, H * d]. v: float32 [T, V * e].
    """
    ...


def _outputs(x_TI: Tensor, kernel: Tensor, state: Tensor, rows: Tensor, plan: StatePlan, heads: Heads, act: Callable):
    return ((heads.v, heads.v_dim),)


@op_with(_outputs)
def gated_delta(
    x_TI: Tensor,
    kernel_CK: Tensor,
    state: Tensor,
    rows: Tensor,
    plan: StatePlan,
    heads: Heads,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """o of each planned row, float32 [T, V, e]; zeros for rows that are in no walk. All arrays are float32.

    x: channels of q, k and v, then beta per head of v, then its decays. kernel: the last tap is the token's own. state:
    [blocks, V, e, d] and rows: [blocks, K - 1 + block size, I], both of the layer. Writes the step's inputs, and the
    states and first rows of newly opened blocks. act: an op of `ACTIVATIONS`, applied after the convolution.
    """
    ...
