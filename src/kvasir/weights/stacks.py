"""Experts' matrices that a checkpoint stores in one tensor, as separate tensors."""

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
_STACK = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class _Part(NamedTuple):
    """One of `count` equal runs of rows of matrix `expert` in the tensor `stack`."""

    stack: str
    expert: int
    index: int
    count: int


class ExpertsView:
    """A source whose tensors `experts.gate_up_proj` [E, 2 I, H], with the gate's rows before up's, and
    `experts.down_proj` [E, H, I] have the names and shapes of separate matrices: `experts.3.gate_proj.weight` [I, H].
    Other tensors are the source's own."""

    def __init__(self, source: WeightSource):
        """Raises ModelFileError for a stack of a bad shape."""
        self._source = source
        self._parts: dict[str, _Part] = {}
        self._names: list[str] = []
        for name in source.names():
            match = _STACK.fullmatch(name)
            self._names += self._split(name, match[1], _PARTS[match[2]]) if match else [name]
        self.close = source.close

    def _split(self, stack: str, prefix: str, parts: tuple[str, ...]) -> list[str]:
        shape = self._source.info(stack).shape
        if len(shape) != 3 or not 0 < shape[0] <= _MAX_EXPERTS or shape[1] % len(parts):
            what = f"a stack of at most {_MAX_EXPERTS} matrices" + " of gate and up" * (len(parts) > 1)
            raise ModelFileError(f"tensor {stack} has shape {list(shape)}", f"expected {what}")
        found = {
            f"{prefix}.{expert}.{part}.weight": _Part(stack, expert, index, len(parts))
            for expert in range(shape[0])
            for index, part in enumerate(parts)
        }
        self._parts |= found
        return list(found)

    def names(self) -> Iterable[str]:
        """The names of all tensors, in the file's order."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.info(name)
        info = self._source.info(part.stack)
        experts, rows, cols = info.shape
        return replace(
            info, name=name, shape=(rows // part.count, cols), nbytes=info.nbytes // experts // part.count
        )  # fmt: skip

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`, a view of the stack."""
        part = self._parts.get(name)
        return self._source.array(name) if part is None else self._of(self._source.array(part.stack), part)

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`, a view of the stack's bytes."""
        part = self._parts.get(name)
        if part is None:
            return self._source.raw(name)
        experts = self._source.info(part.stack).shape[0]
        return self._of(self._source.raw(part.stack).reshape(experts, -1), part)

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`; a stack is dropped with its last matrix."""
        part = self._parts.get(name)
        if part is None:
            self._source.drop(name)
        elif (part.expert, part.index) == (self._source.info(part.stack).shape[0] - 1, part.count - 1):
            self._source.drop(part.stack)

    @staticmethod
    def _of(stack: np.ndarray, part: _Part) -> np.ndarray:
        matrix = stack[part.expert]
        size = len(matrix) // part.count
        return matrix[part.index * size : (part.index + 1) * size]
