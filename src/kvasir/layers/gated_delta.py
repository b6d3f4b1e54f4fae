"""Gated DeltaNet (arXiv:2412.06464) in the place of attention, as Qwen3-Next has it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.layers.batch import Batch
from kvasir.layers.kv_cache import LayerCache
from kvasir.layers.linear import Out, Plain
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.ops.activation import ACTIVATIONS, silu
from kvasir.ops.gated_delta import Heads, delta_gates, gated_delta

# letters: T token rows, D model width, H heads of q and k, V heads of v


class Convolution(Module):
    """The weights of a convolution along the tokens, each channel by itself: float32 [channels, taps]."""

    keeps_float32 = True
    kernel: Tensor

    def __init__(self, channels: int, taps: int):
        self.channels, self.taps = channels, taps

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.channels, 1, self.taps)}

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.kernel = tensor[:, 0].to(device, torch.float32).contiguous()
        return self.kernel


class GatedDelta(Module):
    """x: float32 [T, D] -> [T, D]. What it remembers is a cache of the kind "state".

    layer: its number, by which the cache knows it. taps: of the convolution. act: a name of `ACTIVATIONS`, after
    it. Of qkvz's rows each head of q and k has its own together: q, k, its heads of v, and their gates z; of ba's
    those of beta, then those of the decay.
    """

    log_rate: Tensor
    bias: Tensor

    def __init__(self, layer: int, width: int, heads: Heads, taps: int, eps: float, act: str = "silu"):
        self.layer, self.heads = layer, heads
        self.act = ACTIVATIONS[act]
        self.qkvz = Plain(width, heads.channels + heads.v * heads.v_dim)
        self.ba = Plain(width, 2 * heads.v)
        self.conv = Convolution(heads.channels, taps)
        self.norm = RMSNorm(heads.v_dim, eps)
        self.out = Out(heads.v * heads.v_dim, width)

    def cache(self) -> LayerCache:
        h = self.heads
        return LayerCache("state", state=(h.v, h.v_dim, h.dim), inputs=h.inputs, before=self.conv.taps - 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        h = self.heads
        shared = h.v // h.qk * h.v_dim
        qkvz_TH = self.qkvz(x_TD, batch).view(-1, h.qk, 2 * h.dim + 2 * shared)
        q, k, v, z = qkvz_TH.split((h.dim, h.dim, shared, shared), dim=-1)
        b, a = self.ba(x_TD, batch).view(-1, h.qk, 2, h.v // h.qk).unbind(2)
        beta_TV, decay_TV = delta_gates(b.flatten(1), a.flatten(1), self.log_rate, self.bias)
        inputs_TI = torch.cat([*(part.flatten(1) for part in (q, k, v)), beta_TV, decay_TV], dim=1)
        mixed_TVe = gated_delta(
            inputs_TI,
            self.conv.kernel,
            batch.kv.state(self.layer),
            batch.kv.inputs(self.layer),
            batch.states(self.layer),
            h,
            self.act,
        )
        gate_TVe = silu(z.reshape(-1, h.v, h.v_dim))
        return self.out((self.norm(mixed_TVe) * gate_TVe).flatten(1), batch)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"A_log": (self.heads.v,), "dt_bias": (self.heads.v,)}

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept = tensor.to(device, torch.float32).contiguous()
        setattr(self, {"A_log": "log_rate", "dt_bias": "bias"}[name], kept)
        return kept
