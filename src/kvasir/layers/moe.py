"""A mixture of experts in the place of an MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvasir.layers.batch import Batch
from kvasir.layers.linear import Plain
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module
from kvasir.ops.activation import ACTIVATIONS, sigmoid
from kvasir.ops.moe import experts, route
from kvasir.parallel import SOLO, Mesh


class Router(Plain):
    """One logit per expert, from weights kept in float32: a rounded one could choose other experts."""

    keeps_float32 = True

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().put(name, tensor, torch.float32, device)


class MoE(Module):
    """x: float32 [T, D] -> [T, D]: the weighted outputs of each row's top_k experts, which are gated MLPs.

    normalise: the weights of a row's experts add up to one. act: a name of `ACTIVATIONS`. The experts hold
    the weights and are never called one by one.
    """

    mesh: Mesh = SOLO

    def __init__(
        self, width: int, inner: int, num_experts: int, top_k: int, *, act: str = "silu", normalise: bool = True
    ):
        self.router = Router(width, num_experts)
        self.experts = [GatedMLP(width, inner, act) for _ in range(num_experts)]
        self.top_k, self.normalise = top_k, normalise
        self.act = ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        ids_Tk, weights_Tk = route(self.router(x_TD, batch), self.top_k, self.normalise)
        out_TD = experts(
            x_TD,
            ids_Tk,
            weights_Tk,
            [expert.gate_up.weights["gate"] for expert in self.experts],
            [expert.gate_up.weights["up"] for expert in self.experts],
            [expert.down.weights["weight"] for expert in self.experts],
            self.act,
        )
        return self.mesh.all_reduce(out_TD)


class SharedMoE(MoE):
    """With one more expert of its own width that every row goes to, weighted by a gate of its own."""

    def __init__(self, width: int, inner: int, num_experts: int, top_k: int, shared_inner: int, **options: Any):
        super().__init__(width, inner, num_experts, top_k, **options)
        self.shared = GatedMLP(width, shared_inner, options.get("act", "silu"))
        self.shared_gate = Plain(width, 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        share_T1 = sigmoid(self.shared_gate(x_TD, batch))
        return super().__call__(x_TD, batch) + share_T1 * self.shared(x_TD, batch)
