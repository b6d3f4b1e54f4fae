"""Linear layers by role. The role determines how the sum is segmented and where ranks synchronise, so that models need
not.

    role      parts         ranks share   after it
    QKV       q, k, v       heads         -
    Out       out           segments      all_reduce
    GateUp    gate, up      rows          -
    Down      down          segments      all_reduce
    Head      head          rows          all_gather
    Plain     weight        nothing       -
    HeadLinear weight       nothing       -

A role with several parts keeps them separate, with one matmul each: the weights stay views of the mapped file, and each
result is contiguous. A row's adapter adds b (a x) to the whole product: for a sum that ranks share, the products and
the a x are reduced separately, before b; the bias is added last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvasir.layers.changes import Found, add_bias, change_product
from kvasir.layers.embedding import Embedding, vocabulary_cut
from kvasir.layers.module import Module, Segments, Shard
from kvasir.layers.places import Place
from kvasir.ops.collective import all_gather, all_reduce
from kvasir.ops.heads import head_linear
from kvasir.ops.linear import linear, round_rows
from kvasir.ops.linear.packed import num_segments
from kvasir.parallel import SOLO, Mesh, cut

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class Linear(Module):
    """Named matrices applied to the same input. x: float32 [T, inputs], T a multiple of 32; results float32 [T,
    outputs].

    With one part, its tensors are "weight" and "bias"; with more, "q.weight", "q.bias", ...
    """

    adaptable = True
    segments = 1
    reduces = False  # whether ranks may split the sum
    own_inputs = True  # whether its rows are converted for it alone, and not for several matrices at once
    mesh: Mesh = SOLO
    sum_parts = 1  # the number of parts that ranks split the sum into

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool = False):
        self.inputs = inputs
        self.outputs = dict(parts)
        self.bias = bias
        self.weights: dict[str, Tensor] = {}  # [S, N, k]
        self.biases: dict[str, Tensor] = {}
        self.rows = {part: (0, size) for part, size in parts.items()}  # held by this rank
        self.scales: dict[str, float] = {}  # of packed matrices, applied to their products
        self.rounding: set[str] = set()  # parts whose input rows are rounded; packed matrices do that themselves

    def apply(self, part: str, x_TK: Tensor, batch: Batch | None) -> Tensor:
        out_TN = self.product(part, x_TK)
        return add_bias(out_TN, self.biases[part], self._changes(part)) if part in self.biases else out_TN

    def product(self, part: str, x_TK: Tensor) -> Tensor:
        """The product without bias, with adapters."""
        out_TN = linear(round_rows(x_TK) if part in self.rounding else x_TK, self.weights[part])
        if part in self.scales:
            out_TN = out_TN * self.scales[part]
        if self.sum_parts > 1:
            out_TN = all_reduce(out_TN, self.mesh, self.sum_parts)
        return change_product(out_TN, x_TK, self._changes(part), self._whole_inner)

    def _changes(self, part: str) -> Found:
        """The changes of adapters that are in effect."""
        return tuple(self.changes[part].in_effect()) if part in self.changes else ()

    def _whole_inner(self, inner_TR: Tensor) -> Tensor:
        """An adapter's a x, reduced over the ranks if they split the sum."""
        return all_reduce(inner_TR, self.mesh, self.sum_parts) if self.sum_parts > 1 else inner_TR

    def hold_units(self, part: str, units: int, first: int, count: int) -> None:
        """Divides a part's rows into `units` equal runs, and keeps `count` of them from `first` on."""
        unit = self.outputs[part] // units
        self.rows[part] = first * unit, (first + count) * unit

    def shard(self, name: str) -> Shard:
        """This rank's part of the named matrix."""
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
        """Takes a weight as a packed matrix (kvasir.ops.linear.packed) instead of a tensor."""
        part = name.rpartition(".")[0] or next(iter(self.outputs))
        self.weights[part] = matrix
        if (scale := getattr(matrix, "scale", 1.0)) != 1.0:
            self.scales[part] = scale

    def round_rows(self, name: str) -> None:
        """Rounds the input rows of a weight to int8, as BitNet does. For a weight that is put, not held."""
        self.rounding.add(name.rpartition(".")[0] or next(iter(self.outputs)))

    def put(self, name: str, array: Any, place: Place) -> Any:
        prefix, _, kind = name.rpartition(".")
        part = prefix or next(iter(self.outputs))
        shard = self.shard(name)
        if kind == "bias":
            kept = self.biases[part] = place.exact(array[slice(*shard.rows)])
        else:
            kept = self.weights[part] = place.segmented(shard.of(array), self.segments // shard.parts)
        return kept


class QKV(Linear):
    """x -> q [T, heads * d], k and v [T, kv_heads * d]. parts: those that there are. v: the width of v, 0 for k's."""

    def __init__(self, inputs: int, q: int, kv: int, bias: bool = False, parts: str = "qkv", v: int = 0):
        widths = {"q": q, "k": kv, "v": v or kv}
        super().__init__(inputs, {part: widths[part] for part in parts}, bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        return self.apply("q", x_TD, batch), self.apply("k", x_TD, batch), self.apply("v", x_TD, batch)


class GateUp(Linear):
    """x -> gate and up, both [T, width]."""

    def __init__(self, inputs: int, width: int, bias: bool = False):
        super().__init__(inputs, {"gate": width, "up": width}, bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.apply("gate", x_TD, batch), self.apply("up", x_TD, batch)


class Plain(Linear):
    """A single matrix."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, {"weight": outputs}, bias)

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        return self.apply("weight", x_TK, batch)


class Reducing(Plain):
    """A single matrix whose sum is computed in segments. Ranks hold segments and add their partial sums. The bias is
    added last."""

    reduces = True

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)
        self.segments = num_segments(inputs, "F32")

    def hold_part(self, mesh: Mesh, parts: int) -> None:
        """Keeps this rank's segments; `parts` must divide their number."""
        self.mesh, self.sum_parts = mesh, parts


class Out(Reducing):
    """The output projection of attention."""


class Down(Reducing):
    """The last projection of an MLP."""


class HeadLinear(Plain):
    """A matrix for each head of the rows: x float32 [T, heads, inputs] -> [T, heads, outputs]. The checkpoint has them
    below each other, [heads * outputs, inputs]. No adapter changes them."""

    adaptable = own_inputs = False

    def __init__(self, heads: int, inputs: int, outputs: int):
        super().__init__(inputs, heads * outputs)

    def __call__(self, x_THK: Tensor, batch: Batch | None = None) -> Tensor:
        return head_linear(x_THK, self.weights["weight"])


class Head(Plain):
    """Hidden rows to logits over the vocabulary. tied: the embedding whose weight the head shares, or None."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, tied: Embedding | None = None):
        super().__init__(inputs, outputs, bias)
        self.tied = tied
        self.vocabulary = cut(outputs, 1)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Splits the vocabulary as `VocabularyEmbedding` does, because the weight may be tied."""
        super().split(mesh, segments)
        self.mesh, self.vocabulary = mesh, vocabulary_cut(self.outputs["weight"], mesh)
        self.rows["weight"] = self.vocabulary.range(mesh.part(self.vocabulary.parts))

    @property
    def weight(self) -> Tensor:
        """[1, N, k]"""
        if self.tied is not None and not self.weights:
            table, place = self.tied.weight, self.tied.place
            self.weights["weight"] = place.segmented(table, 1) if place else table
        return self.weights["weight"]

    def __call__(self, x_TK: Tensor, batch: Batch | None = None) -> Tensor:
        found, bias_N = self._changes("weight"), self.biases.get("weight")
        if not found:
            out_TN = linear(x_TK, self.weight, bias_N)
        else:
            out_TN = change_product(linear(x_TK, self.weight), x_TK, found)
            out_TN = out_TN if bias_N is None else add_bias(out_TN, bias_N, found)
        return all_gather(out_TN, self.mesh, self.vocabulary) if self.vocabulary.parts > 1 else out_TN

    def expects(self) -> dict[str, tuple[int, ...]]:
        shapes = super().expects()
        if self.tied is not None:
            del shapes["weight"]
        return shapes
