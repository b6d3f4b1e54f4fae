"""Experts' matrices and biases that a checkpoint stores in one tensor, as separate tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import WeightSource

_MAX_EXPERTS = 4096
_STACK = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)(_bias)?")
_GRANITE = re.compile(r"(.*\bblock_sparse_moe)\.(input|output)_linear\.weight")
_MOE = re.compile(r"(.*\bmoe)\.(gate_proj|up_proj|down_proj)\.weight")
_KINDS = {"input": "gate_up_proj", "output": "down_proj"}
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), **{part: (part,) for part in ("gate_proj", "up_proj", "down_proj")}}


class _Part(NamedTuple):
    """Part `index` of `count` of the rows of matrix or vector `expert` in the tensor `stack`."""

    stack: str
    expert: int
    index: int
    count: int


class ExpertsView:
    """A source in which stacks of experts have the names and shapes of separate tensors, such as
    `experts.3.gate_proj.weight` [I, H] and `experts.3.gate_proj.bias` [I]. Other tensors are the source's own.

    Stacks: `experts.gate_up_proj` [E, 2 I, H], with the gate's rows before up's, and `experts.down_proj` [E, H, I];
    with `transposed`, [E, H, 2 I] and [E, I, H] with the columns of gate and up in turns, or gate's before up's.
    Biases, in the same order of rows: `experts.gate_up_proj_bias` [E, 2 I] and `experts.down_proj_bias` [E, H].
    Granite's stacks are named `block_sparse_moe.input_linear.weight` and `block_sparse_moe.output_linear.weight`;
    Step-3.5 has one for each matrix, such as `moe.gate_proj.weight` [E, I, H].
    """

    def __init__(self, source: WeightSource, transposed: bool = False, in_turns: bool = True):
        """in_turns: whether the columns of transposed stacks are. Raises ModelFileError for a stack of a bad shape."""
        self._source, self._transposed, self._in_turns = source, transposed, transposed and in_turns
        self._parts: dict[str, _Part] = {}
        self._names: list[str] = []
        for name in source.names():
            if match := _STACK.fullmatch(name):
                self._names += self._split(name, *match.groups())
            elif match := _GRANITE.fullmatch(name):
                self._names += self._split(name, f"{match[1]}.experts", _KINDS[match[2]], None)
            elif match := _MOE.fullmatch(name):
                self._names += self._split(name, f"{match[1]}.experts", match[2], None)
            else:
                self._names.append(name)
        self.close = source.close

    def _split(self, stack: str, prefix: str, kind: str, bias: str | None) -> list[str]:
        shape, parts = self._shape(stack), _PARTS[kind]
        if len(shape) != (2 if bias else 3) or not 0 < shape[0] <= _MAX_EXPERTS or shape[1] % len(parts):
            what = f"a stack of at most {_MAX_EXPERTS} {'vectors' if bias else 'matrices'}"
            raise ModelFileError(
                f"tensor {stack} has shape {list(self._source.info(stack).shape)}",
                f"expected {what}{' of gate and up' * (len(parts) > 1)}",
            )
        found = {
            f"{prefix}.{expert}.{part}.{'bias' if bias else 'weight'}": _Part(stack, expert, index, len(parts))
            for expert in range(shape[0])
            for index, part in enumerate(parts)
        }
        self._parts |= found
        return list(found)

    def _shape(self, stack: str) -> tuple[int, ...]:
        """The shape with one row per output."""
        shape = tuple(self._source.info(stack).shape)
        return (shape[0], shape[2], shape[1]) if self._transposed and len(shape) == 3 else shape

    def names(self) -> Iterable[str]:
        """The names of all tensors, in the file's order."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.info(name)
        info = self._source.info(part.stack)
        experts, rows, *cols = self._shape(part.stack)
        return replace(
            info, name=name, shape=(rows // part.count, *cols), nbytes=info.nbytes // experts // part.count
        )  # fmt: skip

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`, a view of the stack."""
        part = self._parts.get(name)
        if part is None:
            return self._source.array(name)
        stack = self._source.array(part.stack)
        return self._of(stack.swapaxes(1, 2) if self._transposed and stack.ndim == 3 else stack, part)

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`, a view of the stack's bytes; a copy of a transposed stack's part."""
        part = self._parts.get(name)
        if part is None:
            return self._source.raw(name)
        if self._transposed:
            return np.ascontiguousarray(self.array(name)).view(np.uint8).reshape(-1)
        experts = self._source.info(part.stack).shape[0]
        return self._of(self._source.raw(part.stack).reshape(experts, -1), part)

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`; a stack is dropped with its last part."""
        part = self._parts.get(name)
        if part is None:
            self._source.drop(name)
        elif (part.expert, part.index) == (self._source.info(part.stack).shape[0] - 1, part.count - 1):
            self._source.drop(part.stack)

    def _of(self, stack: np.ndarray, part: _Part) -> np.ndarray:
        rows = stack[part.expert]
        if self._in_turns:
            return rows[part.index :: part.count]
        size = len(rows) // part.count
        return rows[part.index * size : (part.index + 1) * size]
