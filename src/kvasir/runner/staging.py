"""Divides a model between stages: which layers each computes, and which tensors it loads for that.

Both are known before a weight is read: a forward is traced with matrices that have only sizes. The stages get layers
with about equal numbers of weights; a stage loads the matrices that its ops read, and vectors except those of other
stages' layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from kvasir.errors import ConfigError
from kvasir.layers.embedding import Embedding
from kvasir.layers.kv_layout import KVLayout
from kvasir.layers.linear import Linear
from kvasir.layers.places import SizePlace, no_memory
from kvasir.ops.linear.absent import AbsentMatrix
from kvasir.parallel import Mesh
from kvasir.program.stages import matrices_of, possible_borders
from kvasir.program.trace import Trace, trace
from kvasir.weights.load import fill
from kvasir.weights.source import WeightSource

Tensor = tuple[str, str]  # (path of a module, name)
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Division:
    """borders: the number of layers before each border. layers: [first, last) of this stage. matrices: that it loads,
    and all: of the model."""

    borders: tuple[int, ...]
    layers: tuple[int, int]
    matrices: frozenset[Tensor]
    all: frozenset[Tensor]

    def leaves_out(self, model: Any) -> Callable[[Any, str], bool]:
        """A function that gives a module without the tensors that other stages have, and says whether a tensor is one
        of them."""
        paths = {id(leaf): path for path, leaf in model.walk()}

        def leave_out(leaf: Any, name: str) -> bool:
            path = paths.get(id(leaf))
            if path is None or self._holds(path, name):
                return False
            put_absent(leaf, name)
            return True

        return leave_out

    def _holds(self, path: str, name: str) -> bool:
        if (path, name) in self.all:
            return (path, name) in self.matrices
        layer = _LAYER.match(f"{path}.")
        return layer is None or self.layers[0] <= int(layer[1]) < self.layers[1]


def divide(model: Any, source: WeightSource, mesh: Mesh, with_table: bool) -> Division:
    """How the stages of a mesh share a model, which is whole and without weights; it gets absent ones. with_table:
    whether this stage holds the table of embeddings in any case, for a head that drafts. Raises ConfigError if the
    model has too few layers that can be divided, CannotTrace."""
    held: dict[int, Tensor] = {}
    paths = {id(leaf): path for path, leaf in model.walk()}

    def hold(leaf: Any, name: str, source: WeightSource, stored: str, take: Any) -> bool:
        if matrix := put_absent(leaf, name):
            held[id(matrix)] = paths[id(leaf)], name
        return True

    fill(model, source, None, hold=hold)  # reads no weights
    traced, layout = trace(model), KVLayout.of(model.cache_spec())
    borders = _balanced(_weights(traced), possible_borders(traced, layout), mesh.stages)
    if borders is None:
        raise ConfigError(
            f"{type(model).__name__} cannot be divided into {mesh.stages} stages: its {len(traced.ends)} layers have "
            f"{len(possible_borders(traced, layout))} places between them for a cut",
            "use fewer, or leave --pipeline-parallel out",
        )
    ends = traced.ends
    at = (0, *(ends[layers - 1] for layers in borders), len(traced.graph.nodes))
    run = traced.graph.nodes[at[mesh.stage] : at[mesh.stage + 1]]
    read = {id(value) for node in traced.graph.nodes for value in matrices_of(node)}
    own = {id(value) for node in run for value in matrices_of(node)} | {matrix for matrix in held if matrix not in read}
    if with_table:
        own |= {matrix for matrix, (path, _) in held.items() if path == "embed"}
    layers = (0, *borders, len(ends))
    return Division(
        borders,
        (layers[mesh.stage], layers[mesh.stage + 1]),
        frozenset(tensor for matrix, tensor in held.items() if matrix in own),
        frozenset(held.values()),
    )


def put_absent(leaf: Any, name: str) -> AbsentMatrix | None:
    """Gives a module a tensor without memory; returns it if it is a matrix."""
    if isinstance(leaf, Linear | Embedding) and name.rpartition(".")[2] == "weight":
        shape = leaf.shard(name).shape
        if not all(shape):
            return None  # another rank has all of it
        matrix = AbsentMatrix(*shape)
        leaf.hold(name, matrix)
        return matrix
    leaf.put(name, no_memory(leaf.expects()[name]), SizePlace(4))
    return None


def _weights(traced: Trace) -> list[float]:
    """The weights that a row reads in each layer, those before the first and after the last included."""
    nodes, ends = traced.graph.nodes, (0, *traced.ends[:-1], len(traced.graph.nodes))
    return [sum(map(_read_by, nodes[first:last])) for first, last in pairwise(ends)]


def _read_by(node: Any) -> float:
    found = [value.rows * value.cols for value in matrices_of(node) if isinstance(value, AbsentMatrix)]
    if node.op in ("embedding", "type_rows"):
        return 0.0
    if node.op == "experts":
        stacks = [stack for stack in node.inputs[3:6] if stack]
        return sum(found) * node.inputs[1].width / len(stacks[0])
    return float(sum(found))


def _balanced(weights: Sequence[float], possible: Sequence[int], stages: int) -> tuple[int, ...] | None:
    """The borders with the smallest largest stage, of equal ones the first; None if there are too few."""
    sums = [0.0]
    for one in weights:
        sums.append(sums[-1] + one)
    ends = [*possible, len(weights)]
    best = {end: (sums[end], ()) for end in ends}  # by the end of the stages so far: (largest, borders)
    for _ in range(stages - 1):
        more: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            options = [
                (max(largest, sums[end] - sums[last]), (*borders, last))
                for last, (largest, borders) in best.items()
                if last < end
            ]
            if options:
                more[end] = min(options)
        best = more
    return best.get(len(weights), (inf, None))[1]
