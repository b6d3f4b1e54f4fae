"""The Gated DeltaNet layer (arXiv:2412.06464), which replaces attention, as in Qwen3-Next, and Kimi Delta Attention
(arXiv:2510.26692), whose state has a decay for each dimension of a key."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvasir.caches import State
from kvasir.layers.convolution import Convolution
from kvasir.layers.linear import Linear, Out, Plain
from kvasir.layers.module import Module, Segments
from kvasir.layers.norm import RMSNorm
from kvasir.layers.places import Place
from kvasir.ops.activation import ACTIVATIONS, sigmoid, silu
from kvasir.ops.columns import take_columns
from kvasir.ops.gated_delta import Heads, delta_gates, delta_inputs, gated_delta
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, D model width, H heads of q and k, V heads of v


class GatedDelta(Module):
    """x: float32 [T, D] -> [T, D]. Its recurrent state is a State (kvasir.caches).

    layer: its number, which identifies it in the cache. heads: this rank's heads; rates: the range of v heads among
    them. taps: length of the convolution. act: a name of `ACTIVATIONS`, applied after the convolution. z gates the
    output; b is the write strength and a the decay, before their functions. eps: of the output's norm. strength: the
    greatest write strength. apart: whether the checkpoint has a convolution for each of q, k and v.
    """

    gate = silu  # the function of z

    log_rate: Tensor
    bias: Tensor

    def __init__(
        self,
        layer: int,
        width: int,
        heads: Heads,
        taps: int,
        eps: float,
        act: str = "silu",
        *,
        strength: float = 1.0,
        apart: bool = False,
    ):
        self.layer, self.heads, self.strength = layer, heads, strength
        self.num_rates, self.rates = heads.v, (0, heads.v)
        self.act = ACTIVATIONS[act]
        wide, v_wide = heads.qk * heads.dim, heads.v * heads.v_dim
        parts = {"q": wide, "k": wide, "v": v_wide}
        self.conv = Convolution(heads.channels, taps, parts=parts if apart else {})
        self.norm = RMSNorm(heads.v_dim, eps)
        self.out = Out(heads.v * heads.v_dim, width)
        self._make_inputs(width, parts)

    def _make_inputs(self, width: int, parts: dict[str, int]) -> None:
        self.inputs = Linear(width, {**parts, "z": parts["v"]})
        self.gates = Linear(width, {"b": self.heads.v, "a": self.heads.v})

    def cache(self, window: int = 0) -> State:
        """window is ignored: a state has none."""
        h = self.heads
        return State((h.v, h.v_dim, h.dim), h.inputs, self.conv.taps - 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        h = self.heads
        q, k, v, z, b, a = self._project(x_TD, batch)
        beta_TV, decay_TG = delta_gates(b, a, self.log_rate, self.bias, self.strength)
        inputs_TI = delta_inputs(q, k, v, beta_TV, decay_TG)
        mixed_TVe = gated_delta(
            inputs_TI,
            self.conv.kernel,
            batch.kv.state(self.layer),
            batch.kv.inputs(self.layer),
            batch.states(self.layer),
            h,
            self.act,
        )
        normed_TVe = self.norm(mixed_TVe)
        return self.out((self.gate(z.view(-1, h.v, h.v_dim)) * normed_TVe).flatten(1), batch)

    def _project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """q, k, v, z, b and a."""
        inputs = (self.inputs.apply(part, x_TD, batch) for part in ("q", "k", "v", "z"))
        return *inputs, *(self._own(self.gates.apply(part, x_TD, batch)) for part in ("b", "a"))

    def _own(self, gates_TV: Tensor) -> Tensor:
        """The columns of this rank's heads."""
        return gates_TV if self.rates == (0, self.num_rates) else take_columns(gates_TV, *self.rates)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Splits the heads of q and k, with their heads of v and the matching segments of the output projection."""
        h, cuts = self.heads, segments(self.out)
        if h.tiled:  # the heads of v that share a q are not adjacent
            return
        parts = mesh.most_parts(lambda parts: cuts % parts == 0 and h.qk % parts == 0)
        part = mesh.part(parts)
        self.heads = here = replace(h, qk=h.qk // parts, v=h.v // parts)
        self.rates = part * here.v, (part + 1) * here.v
        for name in ("q", "k", "v", "z"):  # b and a stay whole: libraries add in another order for few columns
            self.inputs.hold_units(name, parts, part, 1)
        starts, sizes = (0, h.qk * h.dim, 2 * h.qk * h.dim), (here.qk * h.dim, here.qk * h.dim, here.v * h.v_dim)
        self.conv.runs = tuple((s + part * size, s + (part + 1) * size) for s, size in zip(starts, sizes, strict=True))
        self.out.hold_part(mesh, parts)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"A_log": (self.num_rates,), "dt_bias": (self.num_rates,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(self._rates(name, array))
        setattr(self, {"A_log": "log_rate", "dt_bias": "bias"}[name], kept)
        return kept

    def _rates(self, name: str, array: Any) -> Any:
        return array[slice(*self.rates)]


class KimiDelta(GatedDelta):
    """A Gated DeltaNet with a decay for each dimension of a key. Two low-rank products give the decays and the gate of
    the output, a sigmoid; each of q, k and v has its own convolution. heads: as many of v as of q and k."""

    gate = sigmoid

    def __init__(self, layer: int, width: int, heads: Heads, taps: int, eps: float, act: str = "silu"):
        assert heads.decays == heads.dim and heads.qk == heads.v
        super().__init__(layer, width, heads, taps, eps, act, apart=True)

    def _make_inputs(self, width: int, parts: dict[str, int]) -> None:
        h = self.heads
        self.inputs = Linear(width, {**parts, "b": h.v, "a": h.dim, "z": h.v_dim})
        self.decay = Plain(h.dim, h.v * h.dim)
        self.out_gate = Plain(h.v_dim, h.v * h.v_dim)

    def _project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        q, k, v, b, a, z = (self.inputs.apply(part, x_TD, batch) for part in ("q", "k", "v", "b", "a", "z"))
        return q, k, v, self.out_gate(z, batch), b, self.decay(a, batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole on every rank."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"A_log": (1, 1, self.heads.v, 1), "dt_bias": (self.heads.v * self.heads.dim,)}

    def _rates(self, name: str, array: Any) -> Any:
        """One rate for each decay: those of a head are equal."""
        dim = self.heads.dim
        return array.reshape(-1)[[i // dim for i in range(self.heads.v * dim)]] if name == "A_log" else array
