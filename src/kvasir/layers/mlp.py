"""The two kinds of MLP: gated and plain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.layers.linear import Down, GateUp, Plain
from kvasir.layers.module import Module, Segments
from kvasir.ops.activation import ACTIVATIONS, clamp
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202). act: a name of `ACTIVATIONS`. down_bias: of the last matrix, None
    for that of the others. limit: of the magnitudes of both factors, 0 for none."""

    def __init__(
        self,
        width: int,
        inner: int,
        act: str = "silu",
        bias: bool = False,
        down_bias: bool | None = None,
        limit: float = 0.0,
    ):
        self.gate_up = GateUp(width, inner, bias)
        self.down = Down(inner, width, bias if down_bias is None else down_bias)
        self.act, self.limit = ACTIVATIONS[act], limit

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, batch)
        gate_TI = self.act(gate_TI)
        if self.limit:
            gate_TI, up_TI = (clamp(part, -self.limit, self.limit) for part in (gate_TI, up_TI))
        return self.down(gate_TI * up_TI, batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        cuts = segments(self.down)
        self.hold_part(mesh, mesh.most_parts(lambda parts: cuts % parts == 0))

    def hold_part(self, mesh: Mesh, parts: int) -> None:
        for name in self.gate_up.outputs:
            self.gate_up.hold_units(name, parts, mesh.part(parts), 1)
        self.down.hold_part(mesh, parts)

    def leave_out(self) -> None:
        """Keeps nothing: other ranks hold this MLP."""
        for linear in (self.gate_up, self.down):
            for name in linear.outputs:
                linear.hold_units(name, 1, 0, 0)


class MLP(Module):
    """down(act(up(x)))."""

    def __init__(self, width: int, inner: int, act: str = "gelu", bias: bool = True):
        self.up = Plain(width, inner, bias)
        self.down = Down(inner, width, bias)
        self.act = ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return self.down(self.act(self.up(x_TD, batch)), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        cuts = segments(self.down)
        parts = mesh.most_parts(lambda parts: cuts % parts == 0)
        self.up.hold_units("weight", parts, mesh.part(parts), 1)
        self.down.hold_part(mesh, parts)
