"""How the rows of a mixture of experts choose their experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """The settings of `route`.

    top_k: experts of a row. scores: "softmax" over all experts, "sigmoid", or "sqrt_softplus", the square root of
    log(1 + e^logit) (DeepSeek-V4). "sparsemixer" chooses the two greatest logits; the weight of each is its share in a
    softmax over the logits that are close to it, relative to 2 epsilon, without the first for the second
    (arXiv:2310.00811). normalise: whether a row's weights are
    its scores divided by their sum, plus epsilon. scale: of the weights.

    groups: equal numbers of adjacent experts, of which a row chooses from the best top_groups (DeepSeek-V2,
    arXiv:2405.04434). best_of_group: 1 ranks a group by its best choice, 2 by the sum of the best two (DeepSeek-V3,
    arXiv:2412.19437).
    """

    top_k: int
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    epsilon: float = 0.0
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
