"""The two shapes of a transformer's MLP."""

from __future__ import annotations

from torch import Tensor

from kvasir.layers.batch import Batch
from kvasir.layers.linear import Down, GateUp, Plain
from kvasir.layers.module import Module
from kvasir.ops.activation import ACTIVATIONS


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202). act: a name of `ACTIVATIONS`."""

    def __init__(self, width: int, inner: int, act: str = "silu", bias: bool = False):
        self.gate_up = GateUp(width, inner, bias)
        self.down = Down(inner, width, bias)
        self.act = ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, batch)
        return self.down(self.act(gate_TI) * up_TI, batch)


class MLP(Module):
    """down(act(up(x)))."""

    def __init__(self, width: int, inner: int, act: str = "gelu", bias: bool = True):
        self.up = Plain(width, inner, bias)
        self.down = Down(inner, width, bias)
        self.act = ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return self.down(self.act(self.up(x_TD, batch)), batch)
