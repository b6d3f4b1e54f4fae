"""Experts' matrices that a checkpoint stores below each other in one matrix, as separate tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import WeightSource

_STACK = re.compile(r"(.*\b(?:mlp|ffn)\.experts)\.mlp\.(w1|v1|w2)")


class FlatExpertsView:
    """A source in which `experts.mlp.w1`, `experts.mlp.v1` and `experts.mlp.w2`, all [E * I, D], have the names and
    shapes of separate tensors: `experts.3.w1.weight` and `experts.3.v1.weight` [I, D], and `experts.3.w2.weight` [D,
    I], which is transposed. Other tensors are the source's own."""

    def __init__(self, source: WeightSource, experts: int):
        """experts: E. Raises ModelFileError for a matrix that is not one of E experts."""
        self._source, self._experts = source, experts
        self._parts: dict[str, tuple[str, int]] = {}
        self._names: list[str] = []
        for name in source.names():
            match = _STACK.fullmatch(name)
            if match is None:
                self._names.append(name)
                continue
            shape = tuple(source.info(name).shape)
            if len(shape) != 2 or shape[0] % experts:
                raise ModelFileError(f"tensor {name} has shape {list(shape)}", f"expected rows of {experts} experts")
            parts = {f"{match[1]}.{e}.{match[2]}.weight": (name, e) for e in range(experts)}
            self._parts |= parts
            self._names += parts
        self.close = source.close

    def names(self) -> Iterable[str]:
        """The names of all tensors, in the file's order."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`."""
        if name not in self._parts:
            return self._source.info(name)
        info = self._source.info(self._parts[name][0])
        rows, columns = info.shape[0] // self._experts, info.shape[1]
        shape = (columns, rows) if _is_transposed(name) else (rows, columns)
        return replace(info, name=name, shape=shape, nbytes=info.nbytes // self._experts)

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`, a view."""
        if name not in self._parts:
            return self._source.array(name)
        stack, expert = self._parts[name]
        rows_EID = np.split(self._source.array(stack), self._experts)[expert]
        return rows_EID.T if _is_transposed(name) else rows_EID

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`; a copy of a transposed matrix."""
        if name not in self._parts:
            return self._source.raw(name)
        return np.ascontiguousarray(self.array(name)).view(np.uint8).reshape(-1)

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`; a stack is dropped with its last part."""
        stack, expert = self._parts.get(name, (name, self._experts - 1))
        if expert == self._experts - 1:
            self._source.drop(stack)


def _is_transposed(name: str) -> bool:
    return name.endswith(".w2.weight")
