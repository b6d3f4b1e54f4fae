"""The two layers of RWKV-7 (arXiv:2503.14456): the time mix, which replaces attention, and the channel mix, which
replaces the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import State
from kvasir.layers.linear import Down, Linear, Out, Plain
from kvasir.layers.module import Module, Segments
from kvasir.layers.places import Place
from kvasir.ops.activation import relu2, sigmoid, softcap
from kvasir.ops.wkv import WkvSizes, WkvWeights, token_shift, wkv
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, D model width, C channels of all heads, M mixes

_MIXES = "rwkvag"
_VECTORS = ("k_k", "k_a", "r_k", "g_norm.weight", "g_norm.bias")


class LowRank(Module):
    """Two matrices, [rank, inputs] and [outputs, rank], with a function between them: x float32 [T, inputs] -> [T,
    outputs]. bias: of the second one."""

    def __init__(self, inputs: int, rank: int, outputs: int, bias: bool = True):
        self.down, self.up = Plain(inputs, rank), Plain(rank, outputs, bias)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.up(self.between(self.down(x, batch)), batch)

    def between(self, x: Tensor) -> Tensor:
        return x


class TanhLowRank(LowRank):
    """A `LowRank` with a hyperbolic tangent."""

    def between(self, x: Tensor) -> Tensor:
        return softcap(x, 1.0)


class SigmoidLowRank(LowRank):
    """A `LowRank` with a sigmoid."""

    def between(self, x: Tensor) -> Tensor:
        return sigmoid(x)


class TimeMix(Module):
    """x: float32 [T, D] -> [T, D]. Its recurrent state is a State (kvasir.caches); every rank holds the whole layer.

    layer: its number, which identifies it in the cache. ranks: of the matrices that give the decay w, the rate a, the
    share v of the first layer's values, and the gate g. first: whether it is the first layer, which has no such share.
    """

    mix_MD: Tensor
    weights: WkvWeights

    def __init__(self, layer: int, width: int, sizes: WkvSizes, ranks: dict[str, int], *, first: bool):
        self.layer, self.width, self.sizes = layer, width, sizes
        c = sizes.channels
        self.inputs = Linear(width, {"r": c, "k": c, "v": c})
        self.decay = TanhLowRank(width, ranks["w"], c)
        self.rate = LowRank(width, ranks["a"], c)
        self.share = None if first else LowRank(width, ranks["v"], c)
        self.gate = SigmoidLowRank(width, ranks["g"], c, bias=False)
        self.out = Out(c, width)
        self._parts: dict[str, Any] = {}

    def cache(self, window: int = 0) -> State:
        """window is ignored: a state has none."""
        s = self.sizes
        return State((s.heads, s.dim, s.dim), self.width + 4 * s.channels, 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """The result of the first layer."""
        return self.mixed(x_TD, None, batch)[0]

    def mixed(self, x_TD: Tensor, first_TC: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """The layer's result, and its values. first: the first layer's values, None in the first layer."""
        state, rows, plan = batch.kv.state(self.layer), batch.kv.inputs(self.layer), batch.states(self.layer)
        mixed: Any = token_shift(x_TD, self.mix_MD, rows, plan)
        r_TD, w_TD, k_TD, v_TD, a_TD, g_TD = mixed
        r, k, v = (self.inputs.apply(part, x, batch) for part, x in (("r", r_TD), ("k", k_TD), ("v", v_TD)))
        if self.share is not None:
            assert first_TC is not None
            v = v + sigmoid(self.share(v_TD, batch)) * (first_TC + v * -1.0)
        w, a = self.decay(w_TD, batch), self.rate(a_TD, batch)
        y_TC = wkv(r, w, k, v, a, self.weights, state, rows, plan, self.sizes)
        return self.out(self.gate(g_TD, batch) * y_TC, batch), v

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        s = self.sizes
        mixes = {f"x_{part}": (1, 1, self.width) for part in _MIXES}
        keys = {"k_k": (s.channels,), "k_a": (s.channels,), "r_k": (s.heads, s.dim)}
        return {**mixes, **keys, "g_norm.weight": (s.channels,), "g_norm.bias": (s.channels,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = self._parts[name] = place.exact(array.reshape(-1))
        if len(self._parts) == len(self.expects()):
            self.mix_MD = stacked([self._parts[f"x_{part}"] for part in _MIXES])
            self.weights = WkvWeights(*(self._parts[vector] for vector in _VECTORS))
            self._parts = {}
        return kept


class ChannelMix(Module):
    """x: float32 [T, D] -> [T, D]: down(relu(up(mix of x and the previous token's x))^2). The inputs of its shift are a
    State (kvasir.caches) without a state proper; every rank holds the whole layer.

    layer: the number that identifies it in the cache. inner: width between the matrices.
    """

    mix_MD: Tensor

    def __init__(self, layer: int, width: int, inner: int):
        self.layer, self.width = layer, width
        self.up, self.down = Plain(width, inner), Down(inner, width)

    def cache(self, window: int = 0) -> State:
        """window is ignored: a state has none."""
        return State((0,), self.width, 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        shifted: Any = token_shift(x_TD, self.mix_MD, batch.kv.inputs(self.layer), batch.states(self.layer))
        return self.down(relu2(self.up(shifted, batch)), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"x_k": (self.width,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array.reshape(-1))
        self.mix_MD = kept.reshape(1, -1)
        return kept


def stacked(vectors: list[Any]) -> Any:
    """The vectors, arrays or tensors, as the rows of a matrix."""
    first, shape = vectors[0], (len(vectors), len(vectors[0]))
    whole = np.empty(shape, np.float32) if isinstance(first, np.ndarray) else first.new_empty(shape)
    for i, vector in enumerate(vectors):
        whole[i] = vector
    return whole
