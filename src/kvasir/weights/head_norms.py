"""The weights of norms that a checkpoint stores one by one for each head, as one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import WeightSource

_NORM = re.compile(r"(.*\.[qk]_layernorm)\.norms\.(\d+)\.weight")


class HeadNormsView:
    """A source in which `q_layernorm.norms.0.weight`, `q_layernorm.norms.1.weight`, ..., each [D], are one tensor
    `q_layernorm.weight` [heads, D], and likewise those of `k_layernorm`. Other tensors are the source's own."""

    def __init__(self, source: WeightSource):
        """Raises ModelFileError if a head is missing, or the heads' sizes or types differ."""
        self._source = source
        heads: dict[str, dict[int, str]] = {}
        self._names: list[str] = []
        for name in source.names():
            if match := _NORM.fullmatch(name):
                heads.setdefault(f"{match[1]}.weight", {})[int(match[2])] = name
            else:
                self._names.append(name)
        self._parts = {stack: self._in_order(stack, found) for stack, found in heads.items()}
        self._names += self._parts
        self.close = source.close

    def _in_order(self, stack: str, found: dict[int, str]) -> list[str]:
        names = [found[i] for i in sorted(found)]
        infos = [self._source.info(name) for name in names]
        kinds = {(info.dtype, tuple(info.shape)) for info in infos}
        if sorted(found) != list(range(len(found))) or len(kinds) != 1 or len(infos[0].shape) != 1:
            raise ModelFileError(
                f"the parts of {stack} are not the norms of heads", "expected one vector of equal size for each head"
            )
        return names

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`."""
        if name not in self._parts:
            return self._source.info(name)
        parts = self._parts[name]
        info = self._source.info(parts[0])
        return replace(info, name=name, shape=(len(parts), *info.shape), nbytes=info.nbytes * len(parts))

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`; a copy of the heads' norms."""
        if name not in self._parts:
            return self._source.array(name)
        return np.stack([self._source.array(part) for part in self._parts[name]])

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`; a copy of the heads' norms."""
        if name not in self._parts:
            return self._source.raw(name)
        return np.stack([self._source.raw(part).reshape(-1) for part in self._parts[name]])

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`."""
        for part in self._parts.get(name, [name]):
            self._source.drop(part)
