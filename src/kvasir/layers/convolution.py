"""Depthwise convolutions along the tokens: their weights, and the gated short convolution of LFM2 (arXiv:2511.23404),
which replaces attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import State
from kvasir.layers.linear import Linear, Out
from kvasir.layers.module import Module, Segments
from kvasir.layers.places import Place
from kvasir.ops.short_conv import short_conv
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, D model width


class Convolution(Module):
    """The weights of a depthwise convolution along the tokens: float32 [channels, taps], and with `has_bias` a bias
    [channels], else None. parts: the channels of each of several adjacent tensors, "q.weight", ...; empty if there is
    one. runs: this rank's channel ranges, (first, last), of several parts one for each."""

    keeps_float32 = True
    kernel: Tensor
    bias: Tensor | None = None

    def __init__(self, channels: int, taps: int, has_bias: bool = False, parts: Mapping[str, int] = {}):
        assert not (parts and has_bias), "a bias in parts"
        self.channels, self.taps, self.has_bias = channels, taps, has_bias
        ends = tuple(accumulate(parts.values())) or (channels,)
        self.starts = dict(zip(parts, (0, *ends), strict=False))
        self.runs: tuple[tuple[int, int], ...] = tuple(zip((0, *ends), ends, strict=False))
        self._parts: dict[str, Any] = {}

    def expects(self) -> dict[str, tuple[int, ...]]:
        if self.starts:
            ends = (*self.starts.values(), self.channels)[1:]
            sizes = (end - start for start, end in zip(self.starts.values(), ends, strict=True))
            return {f"{part}.weight": (size, 1, self.taps) for part, size in zip(self.starts, sizes, strict=True)}
        bias = {"bias": (self.channels,)} if self.has_bias else {}
        return {"weight": (self.channels, 1, self.taps), **bias}

    def put(self, name: str, array: Any, place: Place) -> Any:
        if self.starts:
            return self._put_part(name.removesuffix(".weight"), array, place)
        whole = place.exact(array[:, 0] if name == "weight" else array)
        kept = place.exact(whole[[i for run in self.runs for i in range(*run)]])
        setattr(self, "kernel" if name == "weight" else "bias", kept)
        return kept

    def _put_part(self, part: str, array: Any, place: Place) -> Any:
        start, (first, last) = self.starts[part], self.runs[list(self.starts).index(part)]
        kept = self._parts[part] = place.exact(array[first - start : last - start, 0])
        if len(self._parts) == len(self.starts):
            self.kernel = _stacked([self._parts[name] for name in self.starts])
            self._parts = {}
        return kept


def _stacked(matrices: Sequence[Any]) -> Any:
    """The rows of all matrices, which are tensors or arrays."""
    first, rows = matrices[0], sum(len(matrix) for matrix in matrices)
    shape = (rows, first.shape[1])
    whole = np.empty(shape, np.float32) if isinstance(first, np.ndarray) else first.new_empty(shape)
    at = 0
    for matrix in matrices:
        whole[at : at + len(matrix)] = matrix
        at += len(matrix)
    return whole


class ShortConvolution(Module):
    """x: float32 [T, D] -> [T, D]. The inputs of its convolution are a State (kvasir.caches) without a state proper.

    layer: its number, which identifies it in the cache. taps: length of the convolution. b and c gate what enters the
    convolution and what leaves it.
    """

    def __init__(self, layer: int, width: int, taps: int, bias: bool = False):
        self.layer, self.width = layer, width
        self.inputs = Linear(width, {"b": width, "c": width, "x": width}, bias)
        self.conv = Convolution(width, taps, bias)
        self.out = Out(width, width, bias)

    def cache(self, window: int = 0) -> State:
        """window is ignored: a state has none."""
        return State((0,), self.width, self.conv.taps - 1)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        b_TD, c_TD, x_TD = (self.inputs.apply(part, x_TD, batch) for part in ("b", "c", "x"))
        kv, plan = batch.kv, batch.states(self.layer)
        mixed_TD = short_conv(b_TD, c_TD, x_TD, self.conv.kernel, self.conv.bias, kv.inputs(self.layer), plan)
        return self.out(mixed_TD, batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole on every rank."""
