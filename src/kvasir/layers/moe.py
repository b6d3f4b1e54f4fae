"""A mixture of experts, which replaces an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.layers.linear import Plain
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module, Segments
from kvasir.layers.places import Place
from kvasir.ops.activation import ACTIVATIONS, relu2, scale_rows, sigmoid
from kvasir.ops.moe import experts, route
from kvasir.parallel import ExpertShare, Mesh, cut

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

EXPERT_ACTIVATIONS = tuple(name for name, act in ACTIVATIONS.items() if act is not relu2)  # those that are one op


class Router(Plain):
    """One logit per expert. Its weights stay float32: rounding could change the selected experts."""

    keeps_float32 = True

    def put(self, name: str, array: Any, place: Place) -> Any:
        return super().put(name, array, place.in_float32())


class MoE(Module):
    """x: float32 [T, D] -> [T, D]: the weighted sum of the outputs of each row's top_k experts, which are gated MLPs.

    normalise: whether a row's expert weights are scaled to sum to 1. act: one of EXPERT_ACTIVATIONS. The expert modules
    only hold weights; they are not called individually. share: how ranks split the experts, None if this rank has all
    of them.
    """

    share: ExpertShare | None = None

    def __init__(
        self, width: int, inner: int, num_experts: int, top_k: int, *, act: str = "silu", normalise: bool = True
    ):
        self.router = Router(width, num_experts)
        self.experts = [GatedMLP(width, inner, act) for _ in range(num_experts)]
        self.top_k, self.normalise = top_k, normalise
        self.act = ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        ids_Tk, weights_Tk = route(self.router(x_TD, batch), self.top_k, self.normalise)
        first, last = self.share.held if self.share else (0, len(self.experts))
        here = self.experts[first:last]
        return experts(
            x_TD,
            ids_Tk,
            weights_Tk,
            [expert.gate_up.weights["gate"] for expert in here],
            [expert.gate_up.weights["up"] for expert in here],
            [expert.down.weights["weight"] for expert in here],
            self.act,
            self.share,
        )

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Splits by expert id if there are at least as many experts as ranks, else each expert as an MLP."""
        if self.goes_by_id(mesh):
            self._hold_experts(mesh)
            return
        cuts = [segments(expert.down) for expert in self.experts]
        parts = mesh.most_parts(lambda parts: all(cut % parts == 0 for cut in cuts))
        for expert in self.experts:
            expert.hold_part(mesh, parts)
        if parts > 1:
            self.share = ExpertShare(mesh, cut(len(self.experts), 1), parts)

    def goes_by_id(self, mesh: Mesh) -> bool:
        return 1 < mesh.size <= len(self.experts)

    def _hold_experts(self, mesh: Mesh) -> None:
        self.share = ExpertShare(mesh, cut(len(self.experts), mesh.size), 1)
        first, last = self.share.held
        for expert in (*self.experts[:first], *self.experts[last:]):
            expert.leave_out()


class SharedMoE(MoE):
    """A mixture with an additional shared expert, of its own width, that processes every row and is weighted by its own
    gate."""

    def __init__(self, width: int, inner: int, num_experts: int, top_k: int, shared_inner: int, **options: Any):
        super().__init__(width, inner, num_experts, top_k, **options)
        self.shared = GatedMLP(width, shared_inner, options.get("act", "silu"))
        self.shared_gate = Plain(width, 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        weight_T1 = sigmoid(self.shared_gate(x_TD, batch))
        return super().__call__(x_TD, batch) + scale_rows(self.shared(x_TD, batch), weight_T1)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        super().split(mesh, segments)
        self.shared.split(mesh, segments)
