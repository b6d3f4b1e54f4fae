"""Checkpoints in which a parametrization of torch replaces weights: the original, and adapters that are not used."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import WeightSource

_ORIGINAL = ".parametrizations.weight.original"
_ADAPTER = re.compile(r".*\.parametrizations\.weight\.\d+\.lora_[AB]")


class WithoutAdapters:
    """A source in which `x.parametrizations.weight.original` is `x.weight`, and adapters are left out. Other tensors
    are the source's own."""

    def __init__(self, source: WeightSource):
        self._source = source
        self._stored = {
            f"{name.removesuffix(_ORIGINAL)}.weight" if name.endswith(_ORIGINAL) else name: name
            for name in source.names()
            if not _ADAPTER.fullmatch(name)
        }
        self.close = source.close

    def names(self) -> Iterable[str]:
        """The names of all tensors, in the file's order."""
        return self._stored.keys()

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`."""
        return replace(self._source.info(self._stored[name]), name=name)

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`."""
        return self._source.array(self._stored[name])

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`."""
        return self._source.raw(self._stored[name])

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`."""
        self._source.drop(self._stored[name])
