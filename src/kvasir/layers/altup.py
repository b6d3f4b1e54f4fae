"""The parts of a Gemma 3n block (arXiv:2301.13310, arXiv:2411.07501): several streams, of which the block computes one
and corrects all; a low-rank layer beside attention; a sparse gate of the MLP."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.layers.linear import Plain
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module, Segments, Vector
from kvasir.layers.norm import RMSNorm
from kvasir.layers.places import Place
from kvasir.ops.activation import softcap
from kvasir.ops.columns import take_columns
from kvasir.ops.heads import join_heads
from kvasir.ops.streams import (
    add_to_streams,
    correct_streams,
    gaussian_cut,
    match_magnitude,
    predict_streams,
    scale_columns,
)
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, S streams, D their width, N = S * D

_LEAST = 1e-5  # the mean square of a projected stream counts as at least this


class Exact(Plain):
    """A small matrix that stays float32."""

    keeps_float32 = True

    def put(self, name: str, array: Any, place: Place) -> Any:
        return super().put(name, array, place.in_float32())


class AltUp(Module):
    """Alternating updates of S streams, x: float32 [T, N]. The coefficients depend on the active stream.

    scaled: whether the stream that `scaled_stream` gives is multiplied by the checkpoint's factors.
    """

    def __init__(self, width: int, streams: int, active: int, eps: float, *, scaled: bool):
        self.width, self.streams, self.active, self.scaled = width, streams, active, scaled
        self.router_norm, self.router = RMSNorm(width, eps), Exact(width, streams)
        self.prediction = Exact(streams, streams * streams)
        self.correction = Exact(streams, streams)
        self.scale = Vector(width, "correct_output_scale")

    def predict(self, x_TN: Tensor, batch: Batch) -> Tensor:
        """The streams before the block, float32 [T, N]."""
        modes_TS = self._modes(self.active_stream(x_TN), batch)
        return predict_streams(x_TN, self.prediction(modes_TS, batch), self.streams)

    def correct(self, x_TN: Tensor, computed_TD: Tensor, batch: Batch) -> Tensor:
        """The predicted streams, corrected by what the block computed of the active one, float32 [T, N]."""
        coefs_TS = self.correction(self._modes(computed_TD, batch), batch)
        return correct_streams(x_TN, computed_TD, coefs_TS, self.streams, self.active)

    def active_stream(self, x_TN: Tensor) -> Tensor:
        """Float32 [T, D]."""
        return take_columns(x_TN, self.active * self.width, (self.active + 1) * self.width)

    def scaled_stream(self, x_TN: Tensor) -> Tensor:
        """The active stream for the layer's own vector, float32 [T, D]."""
        x_TD = self.active_stream(x_TN)
        return scale_columns(x_TD, self.scale.values) if self.scaled else x_TD

    def add(self, x_TN: Tensor, added_TD: Tensor) -> Tensor:
        """Adds rows to all streams but the first, float32 [T, N]."""
        return add_to_streams(x_TN, added_TD, self.streams)

    def _modes(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return softcap(self.router(self.router_norm(x_TD) * (1 / self.width), batch), 1.0)  # tanh


class Streams(Module):
    """How the streams begin, as projections of the embedded token with its magnitude, and end, as the mean of their
    projections with the first one's magnitude."""

    def __init__(self, width: int, streams: int):
        self.width, self.streams = width, streams
        self.inputs = [Plain(width, width) for _ in range(streams - 1)]
        self.outputs = [Plain(width, width) for _ in range(streams - 1)]

    def begin(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, N], the first stream being x."""
        width, x_TN = self.width, x_TD
        for count, project in enumerate(self.inputs, 1):
            new_TD = match_magnitude(project(x_TD, batch), x_TD, _LEAST)
            x_TN = join_heads(x_TN.view(-1, 1, count * width), new_TD.view(-1, 1, width)).flatten(1)
        return x_TN

    def end(self, x_TN: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]."""
        width = self.width
        first_TD = total_TD = take_columns(x_TN, 0, width)
        for i, project in enumerate(self.outputs, 1):
            x_TD = take_columns(x_TN, i * width, (i + 1) * width)
            total_TD = total_TD + match_magnitude(project(x_TD, batch), first_TD, _LEAST)
        return total_TD * (1 / self.streams)


class Laurel(Module):
    """x + norm(right(left(x))): a learned residual of low rank, float32 [T, D]."""

    def __init__(self, width: int, rank: int, eps: float):
        self.left, self.right, self.norm = Plain(width, rank), Plain(rank, width), RMSNorm(width, eps)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return x_TD + self.norm(self.right(self.left(x_TD, batch), batch))


class CutMLP(GatedMLP):
    """A gated MLP whose gate keeps only what exceeds the row's mean by so many standard deviations. The statistics are
    of the whole row, so every rank holds all of it."""

    def __init__(self, width: int, inner: int, act: str, deviations: float):
        super().__init__(width, inner, act)
        self.deviations = deviations

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, batch)
        return self.down(self.act(gaussian_cut(gate_TI, self.deviations)) * up_TI, batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""


def deviations_of(sparsity: float) -> float:
    """How many standard deviations above the mean the given part of a normal distribution ends, as a float32."""
    return float(np.float32(NormalDist().inv_cdf(sparsity)))
