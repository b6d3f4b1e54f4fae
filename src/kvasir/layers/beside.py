"""A dense MLP and a mixture of experts side by side, as in Gemma 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module, Vector
from kvasir.layers.moe import MoE
from kvasir.layers.norm import RMSNorm
from kvasir.layers.places import Place
from kvasir.ops.moe import route
from kvasir.ops.moe.routing import Routing

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class RouterNorm(RMSNorm):
    """The norm of a router's input, whose weights are the checkpoint's `scale` divided by the root of the width."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"scale": (self.width,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        self.weight = place.exact(array) * self.width**-0.5
        return self.weight


class ScaledMoE(MoE):
    """A mixture with norms of its own for the router and for the experts. The weight of each expert is multiplied by
    the expert's scale."""

    def __init__(self, width: int, inner: int, num_experts: int, routing: Routing, act: str, eps: float):
        super().__init__(width, inner, num_experts, routing, act=act)
        self.router_norm, self.norm = RouterNorm(width, eps), RMSNorm(width, eps)
        self.scales = Vector(num_experts, "per_expert_scale")

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        logits_TE = self.router(self.router_norm(x_TD), batch)
        return self.mixed(self.norm(x_TD), *route(logits_TE, self.routing, None, self.scales.values))


class DenseAndExperts(Module):
    """x: float32 [T, D], not normalised -> [T, D]: the normalised output of the MLP plus that of the experts."""

    def __init__(self, dense: GatedMLP, moe: ScaledMoE, width: int, eps: float):
        self.dense, self.moe = dense, moe
        self.dense_norm, self.dense_post_norm, self.moe_post_norm = (RMSNorm(width, eps) for _ in range(3))

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        dense_TD = self.dense_post_norm(self.dense(self.dense_norm(x_TD), batch))
        return dense_TD + self.moe_post_norm(self.moe(x_TD, batch))
