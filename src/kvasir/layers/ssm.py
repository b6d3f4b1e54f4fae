"""Selective state spaces, which replace attention: Mamba 2 (arXiv:2405.21060) and Mamba (arXiv:2312.00752)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import State
from kvasir.layers.linear import Linear, Out, Plain
from kvasir.layers.module import Module, Segments
from kvasir.layers.norm import RMSNorm
from kvasir.layers.places import Place
from kvasir.ops.activation import ACTIVATIONS, silu
from kvasir.ops.ssm import ScanSizes, ScanWeights, Taps, causal_convolution, grouped_rms_norm, selective_scan
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, D model width, C channels of the convolution, X channels of x, H heads


class CausalConvolution(Module):
    """The weights of a depthwise convolution along the tokens: float32 [channels, taps], with a bias or without.
    act: a name of `ACTIVATIONS`, applied after it. scale: of each channel's inputs, float32 [channels], or None."""

    keeps_float32 = True
    kernel: Tensor

    def __init__(self, channels: int, taps: int, act: str, bias: bool, scale: np.ndarray | None = None):
        self.channels, self.taps, self.act, self.scale = channels, taps, ACTIVATIONS[act], scale
        self.has_bias, self.bias = bias, None

    @property
    def weights(self) -> Taps:
        """As the ops take them."""
        return Taps(self.kernel, self.bias, self.act)

    def expects(self) -> dict[str, tuple[int, ...]]:
        bias = {"bias": (self.channels,)} if self.has_bias else {}
        return {"weight": (self.channels, 1, self.taps), **bias}

    def put(self, name: str, array: Any, place: Place) -> Any:
        if name == "bias":
            self.bias = place.exact(array)
            return self.bias
        self.kernel = place.exact(array[:, 0])
        if self.scale is not None:
            self.kernel = self.kernel * place.exact(self.scale[:, None])
        return self.kernel


class GroupedRMSNorm(RMSNorm):
    """An RMSNorm of each of `groups` equal parts of a row. x: float32 [T, width]."""

    def __init__(self, width: int, groups: int, eps: float):
        super().__init__(width, eps)
        self.groups = groups

    def normalised(self, x: Tensor) -> Tensor:
        grouped = x.view(-1, self.groups, self.width // self.groups)
        return grouped_rms_norm(grouped, self.weight, self.eps).flatten(1)


class Mamba2(Module):
    """x: float32 [T, D] -> [T, D]. Its recurrent state is a State (kvasir.caches).

    layer: its number, which identifies it in the cache. taps, act, conv_bias: of the convolution. bias, out_bias: of
    the projections. norm: of the gated result, in `sizes.groups` parts unless `norm_groups` says otherwise; None for
    none. norm_first: whether it precedes the gate. scales: of z, x, B, C and dt. Every rank holds the whole layer.
    """

    rates: Tensor
    bias: Tensor
    skip: Tensor

    def __init__(
        self,
        layer: int,
        width: int,
        sizes: ScanSizes,
        taps: int,
        *,
        eps: float | None,
        act: str = "silu",
        conv_bias: bool = True,
        bias: bool = False,
        out_bias: bool | None = None,
        norm_groups: int | None = None,
        norm_first: bool = False,
        scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0),
    ):
        s = self.sizes = sizes
        self.layer, self.norm_first = layer, norm_first
        self.z_scale, *mixed, self.dt_scale = scales
        self.inputs = Linear(width, {"z": s.inner, "x": s.channels, "dt": s.heads}, bias)
        repeats = (s.inner, s.shared, s.shared)
        scale = np.repeat(np.array(mixed, np.float32), repeats) if any(m != 1.0 for m in mixed) else None
        self.conv = CausalConvolution(s.channels, taps, act, conv_bias, scale)
        self.norm = None if eps is None else GroupedRMSNorm(s.inner, norm_groups or s.groups, eps)
        self.out = Out(s.inner, width, bias if out_bias is None else out_bias)

    def cache(self, window: int = 0) -> State:
        """window is ignored: a state has none."""
        s = self.sizes
        return State((s.heads, s.width, s.dim), s.inputs, self.conv.taps - 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        z, x_TC, dt_TH = (self.inputs.apply(part, x_TD, batch) for part in ("z", "x", "dt"))
        z, dt_TH = scaled(z, self.z_scale), scaled(dt_TH, self.dt_scale)
        memory = batch.kv.state(self.layer), batch.kv.inputs(self.layer), batch.states(self.layer), self.sizes
        taps = self.conv.weights
        mixed_TC = causal_convolution(x_TC, taps, *memory)
        weights = ScanWeights(self.rates, self.bias, self.skip)
        y_TX = selective_scan(mixed_TC, dt_TH, None, None, weights, taps, *memory)
        if self.norm is not None and self.norm_first:
            y_TX = self.norm(y_TX)
        y_TX = silu(z) * y_TX
        if self.norm is not None and not self.norm_first:
            y_TX = self.norm(y_TX)
        return self.out(y_TX, batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("A_log", "dt_bias", "D"), (self.sizes.heads,))

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = exp_of(array, place) if name == "A_log" else place.exact(array)
        setattr(self, {"A_log": "rates", "dt_bias": "bias", "D": "skip"}[name], kept)
        return kept


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number."""
    return x if factor == 1.0 else x * factor


def exp_of(array: Any, place: Place) -> Any:
    """e to the power of an array, rounded from float64."""
    exact = place.exact(array)
    if isinstance(exact, np.ndarray):
        return place.exact(np.exp(exact.astype(np.float64)))
    return exact.double().exp().float()


class Mamba1(Module):
    """Mamba (arXiv:2312.00752). x: float32 [T, D] -> [T, D]. Its recurrent state is a State (kvasir.caches).

    layer: its number, which identifies it in the cache. inner: channels. dim: numbers of state per channel. rank: of
    the projection of dt. taps, act, conv_bias: of the convolution. bias: of the projections. eps: if not None, what dt
    is projected from, B and C are normalised; with `norm_weights` or without. Every rank holds the whole layer.
    """

    rates: Tensor
    bias: Tensor
    skip: Tensor

    def __init__(
        self,
        layer: int,
        width: int,
        inner: int,
        dim: int,
        rank: int,
        taps: int,
        *,
        act: str = "silu",
        conv_bias: bool = True,
        bias: bool = False,
        eps: float | None = None,
        norm_weights: bool = True,
    ):
        share = head_share(inner)
        s = self.sizes = ScanSizes(inner // share, 1, dim, share, per_channel=True)
        self.layer, self.norm_weights = layer, norm_weights
        self.inputs = Linear(width, {"x": s.inner, "z": s.inner}, bias)
        self.conv = CausalConvolution(s.channels, taps, act, conv_bias)
        self.steps = Linear(s.inner, {"dt": rank, "b": dim, "c": dim})
        self.norms = [] if eps is None else [RMSNorm(size, eps) for size in (rank, dim, dim)]
        if not norm_weights:
            self.plain_norms, self.norms = tuple(self.norms), []
        else:
            self.plain_norms = ()
        self.dt = Plain(rank, s.inner)
        self.out = Out(s.inner, width, bias)

    def cache(self, window: int = 0) -> State:
        """window is ignored: a state has none."""
        s = self.sizes
        return State((s.heads, s.width, s.dim), s.inputs, self.conv.taps - 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        x_TC, z_TC = (self.inputs.apply(part, x_TD, batch) for part in ("x", "z"))
        memory = batch.kv.state(self.layer), batch.kv.inputs(self.layer), batch.states(self.layer), self.sizes
        taps = self.conv.weights
        mixed_TC = causal_convolution(x_TC, taps, *memory)
        parts = [self.steps.apply(part, mixed_TC, batch) for part in ("dt", "b", "c")]
        if norms := self.norms or self.plain_norms:
            parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
        dt_TC = self.dt(parts[0], batch)
        weights = ScanWeights(self.rates, self.bias, self.skip)
        y_TC = selective_scan(mixed_TC, dt_TC, parts[1], parts[2], weights, taps, *memory)
        return self.out(silu(z_TC) * y_TC, batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        s = self.sizes
        return {"A_log": (s.inner, s.dim), "dt_proj.bias": (s.inner,), "D": (s.inner,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = exp_of(array, place) if name == "A_log" else place.exact(array)
        setattr(self, {"A_log": "rates", "dt_proj.bias": "bias", "D": "skip"}[name], kept)
        for norm in self.plain_norms:
            norm.weight = place.exact(np.ones(norm.width, np.float32))
        return kept


def head_share(inner: int) -> int:
    """The channels that are scanned together: a divisor of all, at most 64, and a multiple of 16 if there is one."""
    divisors = [size for size in range(1, 65) if inner % size == 0]
    return max(divisors, key=lambda size: (size % 16 == 0, size))
