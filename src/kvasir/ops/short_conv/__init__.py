"""The gated short convolution over paged inputs, as in LFM2: depthwise, causal, of a few tokens.

    u = b * x;   out = c * (bias + sum over the taps of kernel * u of the last tokens)

A block of the cache holds u of its own tokens and of those before it that its first token needs:

    before [K - 1, D] | own [block size, D]

So a row's operations are the same however the sequence was chunked into steps. Taps are added in ascending order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.gated_delta.plan import StatePlan

# letters: T token rows, D channels, K taps


@op
def short_conv(
    b_TD: Tensor,
    c_TD: Tensor,
    x_TD: Tensor,
    kernel_DK: Tensor,
    bias_D: Tensor | None,
    rows: Tensor,
    plan: StatePlan,
) -> Tensor:
    """c * (bias + convolution of b * x), float32 [T, D]; of rows that are in no walk, c * bias. All arrays are float32.

    kernel: the last tap is the token's own. rows: [blocks, K - 1 + block size, D] of the layer. Writes b * x of the
    step, and the first rows of newly opened blocks.
    """
    ...
