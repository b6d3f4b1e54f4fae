"""Calls out of a program's step, on its first thread, while the others wait: where ranks meet, and what an executor
does in the middle of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from kvasir.ops.graph import Node
from kvasir.program import native
from kvasir.program.trace import Trace


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an executor wants to be called for. A program has calls for these alone: one without hooks is the same list
    of instructions as ever. Arrays are float32 [rows, width], views of the program's buffers, to be read until the call
    returns. An error ends the calls of the step; `Program.wait` raises it.

    before_layer(layer): may wait for the layer's weights, or for its keys and values of earlier tokens, which nothing
    has read yet. after_layer(layer, x): the layer has read its weights and stored its keys and values; x is what it
    gives the next. inputs(name, x): the rows that a linear gets, by its name (layers.adapters.linears); an expert of a
    mixture gets those that chose it, once for each of the passes that they are computed in.
    """

    before_layer: Callable[[int], None] | None = None
    after_layer: Callable[[int, np.ndarray], None] | None = None
    inputs: Callable[[str, np.ndarray], None] | None = None

    def nodes(self, trace: Trace) -> list[Node]:
        """The ops of a trace, with calls at the borders of its layers."""
        nodes, borders = [*trace.graph.nodes], [*pairwise((0, *trace.ends))]
        for layer, (begin, end) in reversed([*enumerate(borders)]):
            if self.after_layer:
                x = trace.batch.layers[f"layers.{layer}"]
                nodes.insert(end, Node("call", (partial(self.after_layer, layer), x), None))
            if self.before_layer:
                nodes.insert(begin, Node("call", (partial(self.before_layer, layer),), None))
        return nodes


NO_HOOKS = Hooks()


def for_each(names: Iterable[str], function: Callable[[str, np.ndarray], None], rows: np.ndarray) -> None:
    for name in names:
        function(name, rows)


def for_experts(
    names: Sequence[Sequence[str]],
    function: Callable[[str, np.ndarray], None],
    x: np.ndarray,
    inner: np.ndarray,
    begins: np.ndarray,
    sources: np.ndarray,
) -> None:
    """names: of gate, up and down, for each expert that is here. x: the rows of a pass. inner: what down gets, a row
    for each slot. begins: where the slots of each expert begin, and the end of the last. sources: each slot's row."""
    for expert, (begin, end) in enumerate(pairwise(begins)):
        if begin < end:
            *of_x, of_inner = names[expert]
            for_each(of_x, function, x[sources[begin:end]])
            function(of_inner, inner[begin:end])


class Calls:
    """No error may pass through C: it is kept, and the rest of the step calls nothing. errors: of the step under way.
    The thread flushes denormals, as all kernels do."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._kept: list[Any] = []

    def address(self, function: Callable[[int], None]) -> int:
        """What C calls as `function(rows)`."""
        errors = self.errors

        def call(_: Any, rows: int) -> None:
            try:
                if not errors:
                    function(rows)
            except BaseException as error:
                errors.append(error)

        made = native.CALL(call)
        self._kept.append(made)
        address = ctypes.cast(made, ctypes.c_void_p).value
        assert address is not None
        return address
