"""Matrices of a GGUF file with a scale in a tensor of its own: NVFP4, whose tensor `X.scale` [1], or [experts] for a
stack, multiplies `X.weight`. `X.input_scale` belongs to activations, which are not rounded by it.

Source: llama.cpp's `conversion/base.py`, which writes both from ModelOpt's `weight_scale_2` and `input_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.quant.blocks import fields
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import GGUFSource


class ScaledGGUF:
    """A `GGUFSource` in which such a matrix and its scale are one tensor of type NVFP4_SCALED. Other tensors, also
    NVFP4 without a scale, are the file's own."""

    def __init__(self, source: GGUFSource):
        names = set(source.names())
        stems = [
            name.removesuffix(".weight")
            for name in source.names()
            if name.endswith(".weight") and source.info(name).dtype == "NVFP4"
        ]
        self._source = source
        self._scales = {f"{stem}.weight": f"{stem}.scale" for stem in stems if f"{stem}.scale" in names}
        self._hidden = {f"{stem}.{kind}" for stem in stems for kind in ("scale", "input_scale")}
        self._last: tuple[str, np.ndarray] | None = None  # of a stack, every matrix is asked for on its own
        self.close = source.close

    def names(self) -> Iterable[str]:
        """The names of all tensors, without those of scales."""
        return [name for name in self._source.names() if name not in self._hidden]

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`; the bytes are those of the file."""
        info = self._source.info(name)
        return replace(info, dtype="NVFP4_SCALED") if name in self._scales else info

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`. Raises ModelFileError for scales that do not fit."""
        if name not in self._scales:
            return self._source.raw(name)
        if self._last is None or self._last[0] != name:
            self._last = name, self._blocks(name)
        return self._last[1]

    def array(self, name: str, index: int | None = None) -> np.ndarray:
        """As `GGUFSource.array`."""
        if name not in self._scales:
            return self._source.array(name, index)
        shape, raw = self._source.info(name).shape, self.raw(name)
        if index is not None:
            shape, raw = shape[1:], raw[index * shape[1] : (index + 1) * shape[1]]
        return dequantize(np.ascontiguousarray(raw), GGMLType.NVFP4_SCALED, shape)

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`."""
        if self._last is not None and self._last[0] == name:
            self._last = None
        self._source.drop(name)

    def _blocks(self, name: str) -> np.ndarray:
        """Rows of type NVFP4_SCALED, uint8 [rows, bytes]."""
        data = self._source.raw(name)
        stored = np.ascontiguousarray(data).view(GGMLType.NVFP4.layout)
        made = np.empty(stored.shape, GGMLType.NVFP4_SCALED.layout)
        made["scales"] = stored["d"]
        made["qs"] = fields(stored["qs"].reshape(-1, 32), 8, 4).reshape(made["qs"].shape)
        made["d"] = self._of_rows(name, len(data))[:, None]
        return made.view(np.uint8)

    def _of_rows(self, name: str, rows: int) -> np.ndarray:
        """The scale of each row, float32."""
        scales, shape = self._source.array(self._scales[name]), self._source.info(name).shape
        count = shape[0] if len(shape) == 3 else 1
        if scales.dtype != np.float32 or scales.size != count or not np.isfinite(scales).all():
            raise ModelFileError(
                f"tensor {self._scales[name]} is {scales.dtype} {list(scales.shape)}",
                f"expected {count} finite numbers of float32 for {name} {list(shape)}",
            )
        return scales.reshape(-1).repeat(rows // count)
