"""A mixture of experts, which replaces an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvasir.layers.changes import change_product
from kvasir.layers.linear import Linear, Plain
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.module import Module, Segments, Vector
from kvasir.layers.places import Place
from kvasir.ops.activation import ACTIVATIONS, clamped_swiglu, relu2, scale_rows, sigmoid
from kvasir.ops.moe import Change, experts, route
from kvasir.ops.moe.routing import Routing
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
    """x: float32 [T, D] -> [T, D]: the weighted sum of the outputs of each row's experts, which are gated MLPs.

    act: one of EXPERT_ACTIVATIONS, or clamped_swiglu. bias: whether the router and the experts have biases. selection:
    the name of a vector in the checkpoint that is added to the scores for the choice only, "" if there is none.
    weigh_inputs: whether the weights apply to the experts' inputs. limit: as of a `GatedMLP`. The expert modules only
    hold weights; they are not called individually. share: how ranks split the experts, None if this rank has all of
    them.
    """

    share: ExpertShare | None = None

    def __init__(
        self,
        width: int,
        inner: int,
        num_experts: int,
        routing: Routing,
        *,
        act: str = "silu",
        bias: bool = False,
        selection: str = "",
        weigh_inputs: bool = False,
        limit: float = 0.0,
    ):
        self.router = Router(width, num_experts, bias)
        self.selection = Vector(num_experts, selection) if selection else None
        self.experts = [GatedMLP(width, inner, bias=bias) for _ in range(num_experts)]
        _share_inputs(self.experts)
        self.routing, self.weigh_inputs, self.limit = routing, weigh_inputs, limit
        self.act = clamped_swiglu if act == "clamped_swiglu" else ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        selection_E = self.selection.values if self.selection else None
        return self.mixed(x_TD, *route(self.router(x_TD, batch), self.routing, selection_E))

    def mixed(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The weighted sum of the outputs of the rows' experts, float32 [T, D]. ids, weights: as `route` gives them."""
        here = self.held()
        biases = None
        if here[0].gate_up.bias:
            biases = (
                [expert.gate_up.biases["gate"] for expert in here],
                [expert.gate_up.biases["up"] for expert in here],
                [expert.down.biases["weight"] for expert in here],
            )
        return experts(
            x_TD,
            ids_Tk,
            weights_Tk,
            [expert.gate_up.weights["gate"] for expert in here],
            [expert.gate_up.weights["up"] for expert in here],
            [expert.down.weights["weight"] for expert in here],
            self.act,
            self.share,
            biases,
            self.weigh_inputs,
            _change([((e.gate_up, "gate"), (e.gate_up, "up"), (e.down, "weight")) for e in here]),
            self.limit,
        )

    def held(self) -> Sequence[Any]:
        """This rank's experts, which all have the same sizes."""
        first, last = self.share.held if self.share else (0, len(self.experts))
        return self.experts[first:last]

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Splits by expert id if there are at least as many experts as ranks, else each expert as an MLP."""
        if self.goes_by_id(mesh):
            self._hold_experts(mesh)
            return
        if self.router.bias:  # the parts' sums would each add the bias
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


def _share_inputs(experts: Sequence[GatedMLP | MLP]) -> None:
    """The rows of all experts are converted at once."""
    for expert in experts:
        for linear in (*([expert.gate_up] if isinstance(expert, GatedMLP) else [expert.up]), expert.down):
            linear.own_inputs = False


def _change(parts: Sequence[tuple[tuple[Linear, str], ...]]) -> Change | None:
    """How adapters change the products of experts; None if they do not. parts: of each expert, its layers of gate, up
    and down, with the parts' names."""
    if not any(linear.changes for expert in parts for linear, _ in expert):
        return None

    def change(out_nN: Tensor, x_nK: Tensor, rows_n: Tensor, part: int, place: int) -> Tensor:
        linear, name = parts[place][part]
        found = tuple(linear.changes[name].within(rows_n)) if name in linear.changes else ()
        return change_product(out_nN, x_nK, found)

    return change


class PlainMoE(MoE):
    """A mixture whose experts are MLPs without gates. total_bias: whether there is a bias of their weighted sum. Ranks
    do not split it."""

    def __init__(self, width: int, inner: int, num_experts: int, routing: Routing, act: str, total_bias: bool = False):
        self.router = Router(width, num_experts, False)
        self.experts = [MLP(width, inner, act, bias=False) for _ in range(num_experts)]
        _share_inputs(self.experts)
        self.bias = Vector(width, "bias") if total_bias else None
        self.routing, self.act = routing, ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        ids_Tk, weights_Tk = route(self.router(x_TD, batch), self.routing)
        up = [expert.up.weights["weight"] for expert in self.experts]
        down = [expert.down.weights["weight"] for expert in self.experts]
        out_TD = experts(x_TD, ids_Tk, weights_Tk, up, (), down, self.act, change=self._change())
        return out_TD if self.bias is None else out_TD + self.bias.values

    def _change(self) -> Change | None:
        return _change([((e.up, "weight"), (e.up, "weight"), (e.down, "weight")) for e in self.experts])

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""


class LatentMoE(PlainMoE):
    """A mixture of MLPs without gates, and a shared one that processes every row. latent: the width of the experts'
    inputs and outputs, with a projection before and after them; 0 for that of the model. bias: of these projections and
    of the shared MLP. selection: as in `MoE`."""

    def __init__(
        self,
        width: int,
        inner: int,
        num_experts: int,
        routing: Routing,
        act: str,
        *,
        shared_inner: int,
        latent: int = 0,
        bias: bool = False,
        selection: str,
    ):
        super().__init__(latent or width, inner, num_experts, routing, act)
        self.router = Router(width, num_experts)
        self.selection = Vector(num_experts, selection)
        self.shared = MLP(width, shared_inner, act, bias)
        self.enter = Plain(width, latent, bias) if latent else None
        self.leave = Plain(latent, width, bias) if latent else None

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        ids_Tk, weights_Tk = route(self.router(x_TD, batch), self.routing, self.selection.values)
        up = [expert.up.weights["weight"] for expert in self.experts]
        down = [expert.down.weights["weight"] for expert in self.experts]
        read_TL = x_TD if self.enter is None else self.enter(x_TD, batch)
        out_TL = experts(read_TL, ids_Tk, weights_Tk, up, (), down, self.act, change=self._change())
        out_TD = out_TL if self.leave is None else self.leave(out_TL, batch)
        return out_TD + self.shared(x_TD, batch)


class SharedMoE(MoE):
    """A mixture with an additional shared expert, of its own width, that processes every row. gated: whether it is
    weighted by a gate of its own. shared_scale: of its output. shared_limit: as `limit`."""

    def __init__(
        self,
        width: int,
        inner: int,
        num_experts: int,
        routing: Routing,
        shared_inner: int,
        *,
        gated: bool = True,
        shared_scale: float = 1.0,
        shared_limit: float = 0.0,
        **options: Any,
    ):
        super().__init__(width, inner, num_experts, routing, **options)
        self.shared_scale = shared_scale
        self.shared = GatedMLP(width, shared_inner, options.get("act", "silu"), limit=shared_limit)
        self.shared_gate = Plain(width, 1) if gated else None

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        shared_TD = self.shared(x_TD, batch)
        if self.shared_gate is not None:
            shared_TD = scale_rows(shared_TD, sigmoid(self.shared_gate(x_TD, batch)))
        if self.shared_scale != 1.0:
            shared_TD = shared_TD * self.shared_scale
        return super().__call__(x_TD, batch) + shared_TD

    def split(self, mesh: Mesh, segments: Segments) -> None:
        super().split(mesh, segments)
        self.shared.split(mesh, segments)
