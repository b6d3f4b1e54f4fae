"""A transformer block that several layers use, each with adapters of its own, as in Zamba2 (arXiv:2411.15242)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvasir.layers.attention import Attention
from kvasir.layers.linear import QKV, Down, GateUp, Linear, Out, Plain
from kvasir.layers.module import Module, Segments
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope
from kvasir.ops.activation import ACTIVATIONS
from kvasir.ops.heads import join_heads
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class Adapter(Module):
    """x -> up(down(x)), in parts: of each part, a `down` and an `up`, or one `down` for all of them."""

    def __init__(self, inputs: int, rank: int, parts: Mapping[str, int]):
        self.down = Plain(inputs, rank)
        self.up = Linear(rank, parts)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        inner_TR = self.down(x_TD, batch)
        return tuple(self.up.apply(part, inner_TR, batch) for part in self.up.outputs)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""


class SharedBlock(Module):
    """x, embedded: float32 [T, D] -> [T, D]: attention over both side by side, then a gated MLP, without residuals.

    uses: the numbers of its uses among those of all blocks, with the cache of each. heads: of q, of k and v, and their
    width. rank: of the adapters, which q, k and v have only if `attn_adapters`. scale: of the scores. Every rank holds
    the whole block.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        uses: Mapping[int, int],
        heads: tuple[int, int, int],
        *,
        eps: float,
        act: str,
        mlp_bias: bool,
        rank: int,
        attn_adapters: bool,
        rope: Rope | None,
        scale: float | None,
    ):
        wide, (q_heads, kv_heads, head_dim) = 2 * width, heads
        count = max(uses) + 1
        self.attn_norm, self.mlp_norm = RMSNorm(wide, eps), RMSNorm(width, eps)
        self.qkv, self.out = QKV(wide, q_heads * head_dim, kv_heads * head_dim), Out(q_heads * head_dim, width)
        self.gate_up, self.down = GateUp(width, inner, mlp_bias), Down(inner, width, mlp_bias)
        self.act = ACTIVATIONS[act]
        places: list[Any] = [None] * count
        self.q, self.k, self.v, self.mlp = (list(places) for _ in range(4))
        for use in uses:
            self.mlp[use] = Adapter(width, rank, {"gate": inner, "up": inner})
            for adapters in (self.q, self.k, self.v) if attn_adapters else ():
                adapters[use] = Adapter(wide, rank, {"weight": wide})
        # In a mapping, not modules of this one: they have no weights of their own.
        self.attention = {use: Attention(at, wide, *heads, rope=rope, scale=scale) for use, at in uses.items()}

    def __call__(self, x_TD: Tensor, embedded_TD: Tensor, use: int, batch: Batch) -> Tensor:
        attention = self.attention[use]
        width = self.mlp_norm.width
        read_TW = self.attn_norm(join_heads(x_TD.view(-1, 1, width), embedded_TD.view(-1, 1, width)).flatten(1))
        q, k, v = self.qkv(read_TW, batch)
        if self.q[use] is not None:
            (dq,), (dk,), (dv,) = (adapters[use](read_TW, batch) for adapters in (self.q, self.k, self.v))
            q, k, v = q + dq, k + dk, v + dv
        mixed_THd = attention.mix(q.view(-1, attention.heads, attention.head_dim), k, v, batch)
        read_TD = self.mlp_norm(self.out(mixed_THd.flatten(1), batch))
        gate_TI, up_TI = self.gate_up(read_TD, batch)
        dgate_TI, dup_TI = self.mlp[use](read_TD, batch)
        return self.down(self.act(gate_TI + dgate_TI) * (up_TI + dup_TI), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""
