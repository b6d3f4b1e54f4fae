"""Executors of a program that do something in the middle of a step, by its hooks: what `recorded` shows on the eager
one, and transfers of keys and values.

Streamed     a wait before each layer and a signal after it: weights come when they are needed and go at once
Sent         the keys and values of a layer go elsewhere as soon as it is done, under the rest of the step
Calibrating  the inputs of every linear, as calibration wants them
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvasir.engine.core import EngineCore
from kvasir.ops.linear.packed import PackedMatrix
from kvasir.program.calls import Hooks
from kvasir.program.program import Program
from kvasir.program.trace import Trace
from kvasir.runner.program_executor import ProgramExecutor
from kvasir.runner.runner import Runner
from tests.runner.streaming import Streaming


class Hooked:
    """Puts a program with hooks in the place of the core's."""

    def __init__(self, core: EngineCore):
        runner = core.runner
        assert isinstance(runner, Runner)
        executor, capacity = runner.executor, runner.capacity
        assert isinstance(executor, ProgramExecutor)
        old = executor.program
        self.trace, self.cache = old.trace, old.cache
        self.program = executor.program = Program(
            old.trace, old.cache, max_tokens=capacity.max_tokens_per_step, max_rows=capacity.max_rows,
            max_positions=capacity.max_model_len + 1, threads=old.pool.threads, apart=old.pool.apart,
            max_drafted=capacity.max_drafted, hooks=self.hooks(),
        )  # fmt: skip
        self.program.bind(runner.rows.arrays)
        old.close()

    def hooks(self) -> Hooks:
        raise NotImplementedError


class Streamed(Hooked):
    def hooks(self) -> Hooks:
        buffers = [[writable(matrix) for matrix in layer] for layer in matrices(self.trace)]
        self.streaming = Streaming(buffers, 255)  # the bytes of NaN
        return Hooks(
            lambda layer: self.streaming.before_layer(layer), lambda layer, _: self.streaming.after_layer(layer)
        )


class Sent(Hooked):
    """elsewhere: of each layer, what was there when it had ended."""

    def hooks(self) -> Hooks:
        self.elsewhere: dict[int, list[np.ndarray]] = {}
        return Hooks(after_layer=self.send)

    def here(self, layer: int) -> list[np.ndarray]:
        return [array.view(np.uint8) for array in self.cache.arrays(layer)]

    def send(self, layer: int, _: np.ndarray) -> None:
        self.elsewhere[layer] = [array.copy() for array in self.here(layer)]

    def check(self) -> None:
        """The rest of a step has added nothing."""
        for layer, arrays in self.elsewhere.items():
            assert all(map(np.array_equal, arrays, self.here(layer)))


class Calibrating(Hooked):
    """The greatest absolute value of each column that a linear was given, by its name."""

    def hooks(self) -> Hooks:
        self.seen: dict[str, np.ndarray] = {}
        return Hooks(inputs=self.look)

    def look(self, name: str, x: np.ndarray) -> None:
        assert len(x)
        top = np.abs(x).max(0)
        self.seen[name] = np.maximum(self.seen[name], top) if name in self.seen else top


def matrices(trace: Trace) -> list[list[PackedMatrix]]:
    """Of each layer."""
    found: list[list[PackedMatrix]] = []
    for begin, end in pairwise((0, *trace.ends)):
        nodes = trace.graph.nodes[begin:end]
        linears = [node.inputs[1] for node in nodes if node.op == "linear"]
        stacks = [stack for node in nodes if node.op == "experts" for stack in node.inputs[3:6]]
        found.append([*linears, *(matrix for stack in stacks for matrix in stack)])
    return found


def writable(matrix: PackedMatrix) -> Tensor:
    """The bytes of a matrix, as one who streams weights has them."""
    matrix.memory.setflags(write=True)
    return torch.from_numpy(matrix.memory)
