"""Symbolic values: a forward, run once on them, records the list of ops that it calls.

    x_TD  --rms_norm-->  h_TD  --linear-->  q  --rope-->  ...        each arrow a Node, each name a Traced

A `Traced` stands for float32 rows [rows, *shape] (or ids [rows]). The number of rows is known only when the list is
executed, so a forward must not depend on it. On rows, a forward may use: ops, `+` and `*`, and `view` and `flatten` of
the dimensions after the rows. Anything else raises CannotTrace, and the model runs on the eager executor, which needs
no list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

ROWS = "rows"  # the domain of a step's token rows
CHOSEN = "chosen"  # the domain of the rows whose logits are computed


class CannotTrace(Exception):
    """A forward applied an operation to a symbolic value that cannot be recorded."""


@dataclass(frozen=True, slots=True)
class _Device:
    type: str = "trace"


_DEVICE = _Device()


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One op. inputs: values and constants, in the order of the op's signature. out: None if the op only has side
    effects."""

    op: str
    inputs: tuple[Any, ...]
    out: Any  # Traced, or a tuple of them, or None


@dataclass(slots=True)
class Graph:
    """The nodes in call order."""

    nodes: list[Node] = field(default_factory=list)

    def value(self, domain: str, shape: tuple[int, ...], kind: str = "float32") -> Traced:
        """An input: a value that no node produces."""
        return Traced(self, domain, shape, kind)

    def record(self, op: str, inputs: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], domain: str) -> Any:
        """Adds a node. shapes: of its results, without the rows dimension."""
        outs = tuple(Traced(self, domain, shape) for shape in shapes)
        out = outs[0] if len(outs) == 1 else outs or None
        self.nodes.append(Node(op, inputs, out))
        return out


class Traced:
    """Symbolic rows. kind: "float32" or "ids"."""

    __slots__ = ("base", "domain", "graph", "kind", "shape")
    device = _DEVICE

    def __init__(self, graph: Graph, domain: str, shape: tuple[int, ...], kind: str = "float32", base: Any = None):
        self.graph, self.domain, self.shape, self.kind = graph, domain, shape, kind
        self.base: Traced = self if base is None else base

    @property
    def width(self) -> int:
        """Elements per row."""
        return prod(self.shape)

    def view(self, *shape: int) -> Traced:
        """[rows, ...]: the first of `shape` must be -1."""
        if not shape or shape[0] != -1 or -1 in shape[1:] or prod(shape[1:]) != self.width:
            raise CannotTrace(f"view{shape} of rows of shape {self.shape}")
        return Traced(self.graph, self.domain, shape[1:], self.kind, self.base)

    def flatten(self, start: int) -> Traced:
        if start != 1:
            raise CannotTrace(f"flatten({start})")
        return self.view(-1, self.width)

    def __add__(self, other: Any) -> Traced:
        if isinstance(other, Traced):
            return self._with("add", other)
        if getattr(other, "shape", None) == (self.width,):
            return self.graph.record("add_vector", (self, other), (self.shape,), self.domain)
        raise CannotTrace(f"adding {type(other).__name__} to rows")

    def __mul__(self, other: Any) -> Traced:
        if isinstance(other, Traced):
            return self._with("multiply", other)
        if isinstance(other, int | float):
            return self.graph.record("scale", (self, float(other)), (self.shape,), self.domain)
        raise CannotTrace(f"multiplying rows by {type(other).__name__}")

    __rmul__ = __mul__

    def _with(self, op: str, other: Traced) -> Traced:
        if (self.domain, self.width) != (other.domain, other.width):
            raise CannotTrace(f"{op} of rows of shapes {self.shape} and {other.shape}")
        return self.graph.record(op, (self, other), (self.shape,), self.domain)

    def __getattr__(self, name: str) -> Any:
        raise CannotTrace(f"the forward uses .{name} of a tensor")

    def __bool__(self) -> bool:
        raise CannotTrace("the forward branches on a tensor's values")

    def __getitem__(self, index: Any) -> Any:
        raise CannotTrace("the forward indexes a tensor")
