"""Stages: a model divided by its layers, between processes that compute one after the other.

The traced ops of a forward are cut between two layers. What crosses a cut is every value that is made before it and
used after it: the rows of the residual stream, and in some families others beside them. A stage is a trace of its own,
which receives what crosses its first border and returns what crosses the next. The ops that follow the last layers'
rows, the head and the sampler, run once over all rows of a step, so the last stage has them in a trace of their own.

    stage 0   ids --embedding, layers--> rows                     for each part of a step
    stage 1                              rows --layers, norm--> hidden
              hidden --head--> logits                             once for a step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.layers.kv_layout import KVLayout
from kvasir.ops.graph import ROWS, Graph, Node, Traced
from kvasir.program.trace import LayerPart, Trace


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several stages. body: its layers. tail: what follows them in the last stage, None in the others. widths:
    of the values that cross each border between two stages, in their order. held: the layers whose caches it has."""

    number: int
    body: Trace
    tail: Trace | None
    widths: tuple[tuple[int, ...], ...]
    held: frozenset[int]


def cut(trace: Trace, borders: Sequence[int], number: int, layout: KVLayout) -> Stage:
    """A stage of a traced model. borders: the number of layers before each border, ascending. layout: of the model's
    caches."""
    nodes, uses = trace.graph.nodes, _Uses(trace)
    tail_from = next((i for i, node in enumerate(nodes) if node.op == "choose"), len(nodes))
    at = (0, *(trace.ends[layers - 1] for layers in borders), tail_from)
    crossing = [uses.crossing(position) for position in at]
    runs = [nodes[first:last] for first, last in zip(at, (*at[1:], len(nodes)), strict=True)]
    changed = [_changeable(trace, run) for run in runs]

    def part(run: int) -> Trace:
        elsewhere = set[str]().union(*changed[:run], *changed[run + 1 :]) - changed[run]
        return replace(
            trace,
            graph=Graph(runs[run]),
            first=at[run],
            elsewhere=trace.elsewhere | elsewhere,
            received=() if run == 0 else crossing[run],
        )

    sent = crossing[number + 1]
    body = replace(part(number), hidden=sent[0], logits=None, exports={sent_name(i): x for i, x in enumerate(sent)})
    held = {layout.owners[layer] for node in runs[number] for layer in _layers_of(node)}
    return Stage(
        number,
        body,
        part(len(borders) + 1) if number == len(borders) else None,
        tuple(tuple(x.width for x in values) for values in crossing[1:-1]),
        frozenset(held),
    )


def sent_name(index: int) -> str:
    """The export of a body that is the value of this index among those that cross its last border."""
    return f"sent.{index}"


def possible_borders(trace: Trace, layout: KVLayout) -> list[int]:
    """The numbers of layers before which a model can be cut: what crosses is rows of numbers, and no layer reads the
    cache of one on the other side."""
    uses, nodes = _Uses(trace), trace.graph.nodes
    spans: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for layer in _layers_of(node):
            spans.setdefault(layout.owners[layer], []).append(i)
    return [
        layers
        for layers, end in enumerate(trace.ends[:-1], 1)
        if all(x.kind == "float32" and x.domain == ROWS for x in uses.crossing(end))
        and not any(min(span) < end <= max(span) for span in spans.values())
    ]


def matrices_of(node: Node) -> Iterator[Any]:
    """The weights that an op reads, also those in lists."""
    for value in node.inputs:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


class _Uses:
    """Where the values of a trace are made and used for the last time."""

    def __init__(self, trace: Trace):
        self.made: dict[int, tuple[int, Traced]] = {}
        self.last: dict[int, int] = {}
        for i, node in enumerate(trace.graph.nodes):
            for value in matrices_of(node):
                if isinstance(value, Traced):
                    self.last[id(value.base)] = i
            outs = node.out if isinstance(node.out, tuple) else () if node.out is None else (node.out,)
            self.made |= {id(out.base): (i, out.base) for out in outs}
        self.last |= {id(result.base): len(trace.graph.nodes) for result in trace.results}

    def crossing(self, at: int) -> tuple[Traced, ...]:
        """The values that are made before the op `at` and used by it or later, in the order in which they are made."""
        return tuple(
            value for base, (made, value) in self.made.items() if made < at <= self.last.get(base, -1)
        )  # fmt: skip


def _layers_of(node: Node) -> Iterator[int]:
    """The layers whose caches an op reads or writes."""
    if node.op == "store_kv":
        yield node.inputs[2]
    for value in node.inputs:
        if isinstance(value, LayerPart):
            yield value.layer


def _changeable(trace: Trace, nodes: Sequence[Node]) -> set[str]:
    """The names of what adapters may change in these ops."""
    found: set[str] = set()
    for node in nodes:
        for value in matrices_of(node):
            if node.op == "linear" and id(value) in trace.slots:
                found.add(trace.slots[id(value)].name)
            elif node.op == "experts" and id(value) in trace.experts:
                found.add(trace.experts[id(value)].name)
            elif node.op != "linear" and id(value) in trace.modules:
                found.add(trace.modules[id(value)][0])
    return found
