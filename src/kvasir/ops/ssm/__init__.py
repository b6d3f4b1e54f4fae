"""Selective state spaces over paged states: Mamba (arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).

    x <- f(conv(x));   S <- exp(-rate step) S + (step x) B;   y = C S + D x        for one token after the other

with step = softplus(dt + bias) within limits. Mamba 2 convolves B and C too; its heads have one rate, step and D each,
and groups of heads share a B and a C. Mamba has a step and a D for each channel, and a rate for each number of the
state. Both are computed token by token, as written: a row's operations are those from the start of its block up to it,
however that range was chunked into steps. Sums use the halving tree; all else is elementwise.

A block of the cache holds the state at its start and, as rows, the inputs of the preceding tokens that the convolution
needs, then those of its own tokens:

    state [H, P, N] | before [K - 1, I] | own [block size, I]        I = channels, then dt and, in Mamba, B
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.ops.registry import op, op_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.gated_delta.plan import StatePlan

# letters: T token rows, C channels of the convolution, K its taps, H heads, P channels of a head, G groups, N numbers
# of the state per channel, M numbers of dt


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """heads of `width` channels, each with `dim` numbers of state per channel; heads / groups adjacent heads share a B
    and a C. per_channel: Mamba, whose heads are only shares of the channels, and which has one group.

    low, high: limits of the steps.
    """

    heads: int
    groups: int
    dim: int
    width: int
    per_channel: bool = False
    low: float = 0.0
    high: float = float("inf")

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.heads * self.width

    @property
    def shared(self) -> int:
        """Numbers of B, and of C."""
        return self.groups * self.dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + (0 if self.per_channel else 2 * self.shared)

    @property
    def steps(self) -> int:
        """Numbers of dt."""
        return self.inner if self.per_channel else self.heads

    @property
    def inputs(self) -> int:
        """Numbers of a row that a block keeps."""
        return self.channels + self.steps + (self.shared if self.per_channel else 0)


@dataclass(frozen=True, slots=True)
class Taps:
    """The weights of a depthwise convolution along the tokens, float32: kernel [C, K], whose last tap is the token's
    own; bias [C] or None. act: an op of `ACTIVATIONS`, applied after it."""

    kernel: Tensor
    bias: Tensor | None
    act: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """The weights of a scan, float32. rates: [H], in Mamba [H * P, N]; bias, skip: of dt, and D, [M]."""

    rates: Tensor
    bias: Tensor
    skip: Tensor


@op
def causal_convolution(
    x_TC: Tensor, taps: Taps, state: Tensor, rows: Tensor, plan: StatePlan, sizes: ScanSizes
) -> Tensor:
    """f(conv(x) + bias) of each planned row, float32 [T, C]; zeros for rows that are in no walk.

    Writes the step's x, and the first rows of newly opened blocks, into rows: [blocks, K - 1 + block size, I].
    """
    ...


def _outputs(u: Tensor, dt: Tensor, b: object, c: object, weights: ScanWeights, taps: Taps, state: Tensor,
             rows: Tensor, plan: StatePlan, sizes: ScanSizes) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    return ((sizes.inner,),)


@op_with(_outputs)
def selective_scan(
    u_TC: Tensor,
    dt_TM: Tensor,
    b_TS: Tensor | None,
    c_TS: Tensor | None,
    weights: ScanWeights,
    taps: Taps,
    state: Tensor,
    rows: Tensor,
    plan: StatePlan,
    sizes: ScanSizes,
) -> Tensor:
    """y of each planned row, float32 [T, H * P]; zeros for rows that are in no walk.

    u: the result of `causal_convolution` with the same taps, state and rows. b, c: float32 [T, G * N], None if they are
    convolved. state: [blocks, H, P, N]. Writes the step's dt and b, and the states of newly opened blocks.
    """
    ...


@op
def grouped_rms_norm(x_TGd: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` over the last dimension with weights of its own for each group: x float32 [T, G, d], weight
    [G * d]."""
    ...
