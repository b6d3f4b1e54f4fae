"""Calls from a program's step into Python, on its first thread, while the other threads wait: collectives of ranks, and
hooks of the executor."""

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
    """The hooks of an executor. A program calls only the hooks that are given; without hooks its instructions are
    unchanged. Arrays are float32 [rows, width], views of the program's buffers that are valid until the call returns.
    After an error the step makes no more calls; `Program.wait` raises it.

    before_layer(layer): may wait for the layer's weights, or for its keys and values of earlier tokens; the layer has
    read neither yet. after_layer(layer, x): the layer has read its weights and stored its keys and values; x is its
    output. inputs(name, x): the input rows of a linear, by its name (layers.adapters.linears); for an expert of a
    mixture, the rows routed to it, once for each pass over the experts.
    """

    before_layer: Callable[[int], None] | None = None
    after_layer: Callable[[int, np.ndarray], None] | None = None
    inputs: Callable[[str, np.ndarray], None] | None = None

    def nodes(self, trace: Trace) -> list[Node]:
        """The ops of a trace, with calls inserted at the borders of its layers."""
        nodes = [*trace.graph.nodes]
        for layer, begin, end in reversed([*trace.layers]):
            if self.after_layer:
                x = trace.batch.layers[f"layers.{layer}"]
                nodes.insert(end, Node("call", (partial(self.after_layer, layer), x), None))
            if self.before_layer:
                nodes.insert(begin, Node("call", (partial(self.before_layer, layer),), None))
        return nodes


NO_HOOKS = Hooks()


def for_each(names: Iterable[str], function: Callable[[str, np.ndarray], None], rows: np.ndarray) -> None:
    """Calls function(name, rows) for each name."""
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
    """Calls function(name, rows) for the linears of each expert with rows. names: of gate, up and down, for each expert
    of this rank. x: the rows of a pass. inner: the input of down, one row per slot. begins: the first slot of each
    expert, and the end of the last expert. sources: the row of x of each slot."""
    for expert, (begin, end) in enumerate(pairwise(begins)):
        if begin < end:
            *of_x, of_inner = names[expert]
            for_each(of_x, function, x[sources[begin:end]])
            function(of_inner, inner[begin:end])


class NativeCalls:
    """The Python functions that a program calls. An exception must not pass through C: it is kept in `errors`, and the
    rest of the step calls nothing. errors: of the current step. The calling thread flushes denormals, as all kernels
    do."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._kept: list[Any] = []

    def address(self, function: Callable[[int], None]) -> int:
        """The address of a C callback that calls `function(rows)`."""
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
