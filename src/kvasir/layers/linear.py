"""Linear layers by role. The role says how the sum is cut and where ranks meet, so that models do no such
arithmetic.

    role      parts         cut        behind it
    QKV       q, k, v       rows       -
    Out       out           segments   all_reduce
    GateUp    gate, up      rows       -
    Down      down          segments   all_reduce
    Head      head          rows       all_gather
    Plain     weight        none       -

A role with several parts keeps them apart, each in its own matmul: so they stay views of the mapped file, and
each result lies densely in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.layers.embedding import Embedding
from kvasir.layers.module import Module
from kvasir.ops.linear import linear
from kvasir.parallel import SOLO, Mesh

if TYPE_CHECKING:
    from kvasir.layers.batch import Batch

MAX_SEGMENTS = 8
_GROUP = 32  # sums are made of whole groups where the width allows it
_MIN_SEGMENT = 16


def num_segments(width: int) -> int:
    """S, the segments of a reducing role's sum over `width` inputs: at most 8, a power of two that divides
    the width into whole groups of 32; a width without such a cut is divided as often as 16 inputs are
    left."""
    for least, step in ((_GROUP, _GROUP), (_MIN_SEGMENT, 1)):
        for segments in (8, 4, 2):
            size = width // segments
            if width % segments == 0 and size >= least and size % step == 0:
                return segments
    return 1


def _segment(weight_NK: Tensor, segments: int) -> Tensor:
    """[N, K] -> [S, N, k]; a 16-bit type gets zeros behind each segment up to a multiple of 32, for products
    of other depths may read into the next row. A view where nothing has to move."""
    weight = weight_NK.unflatten(1, (segments, -1)).transpose(0, 1)
    missing = -weight.shape[-1] % _GROUP if weight.dtype != torch.float32 else 0
    return (F.pad(weight, (0, missing)) if missing else weight).contiguous()


class Linear(Module):
    """Named matrices over the same input. x: float32 [T, inputs], T a multiple of 32; results float32 [T,
    outputs].

    With one part, "weight" and "bias" are its tensors; with more, "q.weight", "q.bias", ...
    """

    segments = 1

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool = False):
        self.inputs = inputs
        self.outputs = dict(parts)
        self.bias = bias
        self.weights: dict[str, Tensor] = {}  # [S, N, k]
        self.biases: dict[str, Tensor] = {}

    def apply(self, part: str, x_TK: Tensor) -> Tensor:
        return linear(x_TK, self.weights[part], self.biases.get(part))

    def expects(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, outputs in self.outputs.items():
            prefix = f"{part}." if len(self.outputs) > 1 else ""
            shapes[f"{prefix}weight"] = (outputs, self.inputs)
            if self.bias:
                shapes[f"{prefix}bias"] = (outputs,)
        return shapes

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        prefix, _, kind = name.rpartition(".")
        part = prefix or next(iter(self.outputs))
        if kind == "bias":
            kept = self.biases[part] = tensor.to(device, torch.float32)
        else:
            kept = self.weights[part] = _segment(tensor.to(device, dtype), self.segments)
        return kept


class QKV(Linear):
    """x -> q [T, heads * d], k and v [T, kv_heads * d]."""

    def __init__(self, inputs: int, q: int, kv: int, bias: bool = False):
        super().__init__(inputs, {"q": q, "k": kv, "v": kv}, bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        return self.apply("q", x_TD), self.apply("k", x_TD), self.apply("v", x_TD)


class GateUp(Linear):
    """x -> gate and up, both [T, width]."""

    def __init__(self, inputs: int, width: int, bias: bool = False):
        super().__init__(inputs, {"gate": width, "up": width}, bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.apply("gate", x_TD), self.apply("up", x_TD)


class Plain(Linear):
    """One matrix."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, {"weight": outputs}, bias)

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        return self.apply("weight", x_TK)


class Reducing(Plain):
    """One matrix whose sum is cut into segments; ranks hold segments, and add their parts. The bias comes
    last."""

    mesh: Mesh = SOLO

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)
        self.segments = num_segments(inputs)

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        out_TN = self.mesh.all_reduce(linear(x_TK, self.weights["weight"]))
        return out_TN + self.biases["weight"] if self.bias else out_TN


class Out(Reducing):
    """The projection behind attention."""


class Down(Reducing):
    """The projection that ends an MLP."""


class Head(Plain):
    """Hidden rows to logits over the vocabulary. `tied`: the table that lends its weight, if one does."""

    mesh: Mesh = SOLO

    def __init__(self, inputs: int, outputs: int, bias: bool = False, tied: Embedding | None = None):
        super().__init__(inputs, outputs, bias)
        self.tied = tied

    @property
    def weight(self) -> Tensor:
        """[1, N, k]"""
        if self.tied is not None and not self.weights:
            self.weights["weight"] = _segment(self.tied.weight, 1)
        return self.weights["weight"]

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        return self.mesh.all_gather(linear(x_TK, self.weight, self.biases.get("weight")))

    def expects(self) -> dict[str, tuple[int, ...]]:
        shapes = super().expects()
        if self.tied is not None:
            del shapes["weight"]
        return shapes
