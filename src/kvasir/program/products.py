"""Products of linear instructions, and the adapters of those that a factor or the sum over ranks still completes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.layers.adapters import Slot
from kvasir.ops.graph import Node, Traced


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a linear instruction. slot: of its adapters, which only replace the matrix here if
    `replaces`. bias: float32 vector. residual: rows to add."""

    weight: Any
    x: Traced
    out: Traced
    slot: Slot | None = None
    bias: Any = None
    residual: Traced | None = None
    replaces: bool = False


def split_adapters(nodes: Iterable[Node]) -> list[Node]:
    """The nodes, with the adapters of each product that a matrix's factor or the sum over ranks still completes applied
    after that: `adapt_inner` (x, slot, whether the rows' scales are multiplied there) and `adapt_add`."""
    found: list[Node] = []
    all_nodes, at = list(nodes), 0
    while at < len(all_nodes):
        node, at = all_nodes[at], at + 1
        product = node.inputs[0] if node.op == "linear" else None
        tail = _completing(product, all_nodes[at : at + 2]) if product is not None and product.slot else []
        if product is None or not tail:
            found.append(node)
            continue
        at += len(tail)
        *others, last = tail
        total = last.out.graph.value(last.out.domain, last.out.shape)
        reduced = (product.slot,) if last.op == "all_reduce" else ()
        scaled = getattr(product.weight, "scale", 1.0) != 1.0  # such a matrix is not replaced
        alone = replace(product, slot=None) if scaled else replace(product, replaces=True)
        found.append(Node("linear", (alone,), node.out))
        found.append(Node("adapt_inner", (product.x, product.slot, not reduced), None))
        found += [*others, Node(last.op, (*last.inputs, *reduced), total)]
        found.append(Node("adapt_add", (total, product.slot), last.out))
    return found


def _completing(product: Product, after: Sequence[Node]) -> list[Node]:
    """Those of the nodes after a product that complete it: the factor of its matrix, then the sum over ranks."""
    tail: list[Node] = []
    made, scaled = product.out, getattr(product.weight, "scale", 1.0) != 1.0
    for op in (*(("scale",) if scaled else ()), "all_reduce"):
        node = after[len(tail)] if len(tail) < len(after) else None
        if node is not None and node.op == op and node.inputs[0].base is made.base:
            tail.append(node)
            made = node.out
    return tail
