"""Linear layers by role. The role says how the sum is cut and where ranks meet, so that models do no such
arithmetic.

    role      parts         ranks share   after it
    QKV       q, k, v       heads         -
    Out       out           segments      all_reduce
    GateUp    gate, up      rows          -
    Down      down          segments      all_reduce
    Head      head          rows          all_gather
    Plain     weight        nothing       -

A role with several parts keeps them apart, each in its own matmul: so they stay views of the mapped file, and
each result lies densely in memory. A row's adapter adds b (a x) to the whole product: of a sum that ranks share, they
join the products and the a x, each by itself, before b; the bias comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.layers.embedding import Embedding, vocabulary_cut
from kvasir.layers.module import Module, Segments, Shard
from kvasir.ops.collective import all_gather, all_reduce
from kvasir.ops.linear import linear
from kvasir.ops.linear.low_rank import LowRank, add_low_rank
from kvasir.ops.linear.packed import num_segments
from kvasir.parallel import SOLO, Mesh, cut

if TYPE_CHECKING:
    from kvasir.layers.batch import Batch

_GROUP = 32  # elements of a 16-bit row that products may read at once


def _segment(weight_NK: Tensor, segments: int) -> Tensor:
    """[N, K] -> [S, N, k]; a 16-bit type gets zeros after each segment up to a multiple of 32, for products
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
    reduces = False  # whether ranks may hold parts of the sum
    mesh: Mesh = SOLO
    sum_parts = 1  # in how many parts ranks hold the sum

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool = False):
        self.inputs = inputs
        self.outputs = dict(parts)
        self.bias = bias
        self.weights: dict[str, Tensor] = {}  # [S, N, k]
        self.biases: dict[str, Tensor] = {}
        self.rows = {part: (0, size) for part, size in parts.items()}  # that are here
        self.adapters: dict[str, dict[int, LowRank]] = {}  # of each part, by id

    def apply(self, part: str, x_TK: Tensor, batch: Batch | None) -> Tensor:
        out_TN = self.product(part, x_TK, batch)
        return out_TN + self.biases[part] if part in self.biases else out_TN

    def product(self, part: str, x_TK: Tensor, batch: Batch | None) -> Tensor:
        """Without bias."""
        out_TN = linear(x_TK, self.weights[part])
        if self.sum_parts > 1:
            out_TN = all_reduce(out_TN, self.mesh, self.sum_parts)
        pairs = self.adapters.get(part)
        if batch is None or not pairs:
            return out_TN
        return add_low_rank(out_TN, x_TK, batch.adapters_T, pairs, self._whole_inner)

    def _whole_inner(self, inner_TR: Tensor) -> Tensor:
        """An adapter's a x, of which this rank may have a part."""
        return all_reduce(inner_TR, self.mesh, self.sum_parts) if self.sum_parts > 1 else inner_TR

    def hold_units(self, part: str, units: int, first: int, count: int) -> None:
        """Of the `units` runs of rows that a part has, keeps `count` from `first` on."""
        unit = self.outputs[part] // units
        self.rows[part] = first * unit, (first + count) * unit

    def shard(self, name: str) -> Shard:
        """What is here of the matrix of this name."""
        part = name.rpartition(".")[0] or next(iter(self.outputs))
        columns = cut(self.inputs, self.sum_parts).range(self.mesh.part(self.sum_parts))
        return Shard(self.rows[part], columns, self.sum_parts)

    def expects(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, outputs in self.outputs.items():
            prefix = f"{part}." if len(self.outputs) > 1 else ""
            shapes[f"{prefix}weight"] = (outputs, self.inputs)
            if self.bias:
                shapes[f"{prefix}bias"] = (outputs,)
        return shapes

    def hold(self, name: str, matrix: Any) -> None:
        """Takes a weight in a format of its own (kvasir.ops.linear.packed) in the place of a tensor."""
        self.weights[name.rpartition(".")[0] or next(iter(self.outputs))] = matrix

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        prefix, _, kind = name.rpartition(".")
        part = prefix or next(iter(self.outputs))
        shard = self.shard(name)
        if kind == "bias":
            kept = self.biases[part] = tensor[slice(*shard.rows)].to(device, torch.float32)
        else:
            kept = self.weights[part] = _segment(shard.of(tensor).to(device, dtype), self.segments // shard.parts)
        return kept


class QKV(Linear):
    """x -> q [T, heads * d], k and v [T, kv_heads * d]."""

    def __init__(self, inputs: int, q: int, kv: int, bias: bool = False):
        super().__init__(inputs, {"q": q, "k": kv, "v": kv}, bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        return self.apply("q", x_TD, batch), self.apply("k", x_TD, batch), self.apply("v", x_TD, batch)


class GateUp(Linear):
    """x -> gate and up, both [T, width]."""

    def __init__(self, inputs: int, width: int, bias: bool = False):
        super().__init__(inputs, {"gate": width, "up": width}, bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.apply("gate", x_TD, batch), self.apply("up", x_TD, batch)


class Plain(Linear):
    """One matrix."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, {"weight": outputs}, bias)

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        return self.apply("weight", x_TK, batch)


class Reducing(Plain):
    """One matrix whose sum is cut into segments; ranks hold segments, and add their parts. The bias comes
    last."""

    reduces = True

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)
        self.segments = num_segments(inputs, "F32")

    def hold_part(self, mesh: Mesh, parts: int) -> None:
        """Keeps this rank's segments; `parts` divides their number."""
        self.mesh, self.sum_parts = mesh, parts


class Out(Reducing):
    """The projection after attention."""


class Down(Reducing):
    """The projection that ends an MLP."""


class Head(Plain):
    """Hidden rows to logits over the vocabulary. `tied`: the table that lends its weight, if one does."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, tied: Embedding | None = None):
        super().__init__(inputs, outputs, bias)
        self.tied = tied
        self.vocabulary = cut(outputs, 1)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """As the table of the tokens, which may lend its weight."""
        super().split(mesh, segments)
        self.mesh, self.vocabulary = mesh, vocabulary_cut(self.outputs["weight"], mesh)
        self.rows["weight"] = self.vocabulary.range(mesh.part(self.vocabulary.parts))

    @property
    def weight(self) -> Tensor:
        """[1, N, k]"""
        if self.tied is not None and not self.weights:
            table = self.tied.weight
            self.weights["weight"] = _segment(table, 1) if isinstance(table, Tensor) else table
        return self.weights["weight"]

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        out_TN = linear(x_TK, self.weight, self.biases.get("weight"))
        return all_gather(out_TN, self.mesh, self.vocabulary) if self.vocabulary.parts > 1 else out_TN

    def expects(self) -> dict[str, tuple[int, ...]]:
        shapes = super().expects()
        if self.tied is not None:
            del shapes["weight"]
        return shapes
