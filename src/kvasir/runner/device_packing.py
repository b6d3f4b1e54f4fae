"""Prepares weights for the graph executor, straight from the mapped checkpoint, tensor by tensor, on the device.

stored               on the device
F32, F16, BF16       the model's dtype
Q8_0, Q4_0 ...       the file's values, in planes that kernels load in wide pieces
other quantized      the model's dtype, and with a note
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvasir.errors import UnsupportedModel, quoted
from kvasir.graph.matrices import split_rows
from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import QKV, Linear
from kvasir.layers.tensors import TensorPlace, tensor_of
from kvasir.ops.graph import CannotTrace
from kvasir.ops.linear.triton_matrix import (
    CHUNK,
    GGUF,
    LAYOUTS,
    DeviceMatrix,
    choose_segments,
    matrix_from_floats,
    matrix_from_gguf,
    most_segments,
    stacked,
    unit,
)
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.load import ROUNDED_ROWS
from kvasir.weights.source import WeightSource

_FLOATS = ("F32", "F16", "BF16", "F64")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True)
class DevicePacker:
    """Puts the matrices of a model on a device. dtype: of the model.

    formats: bytes by format. notes: messages for the user. See `runner.packing.Packer`.
    """

    dtype: str
    device: str
    formats: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _open: dict[int, dict[str, DeviceMatrix]] = field(default_factory=dict)  # parts of a QKV, by its id()

    @property
    def place(self) -> TensorPlace:
        """Where everything but the matrices goes."""
        return TensorPlace(torch.float32, self.device)

    def __call__(self, leaf: Any, name: str, source: WeightSource, stored: str, take: Any) -> bool:
        if not _is_matrix(leaf, name):
            return False
        if not all(leaf.shard(name).shape):
            return True  # all of it is on other ranks
        matrix = self._matrix(leaf, name, source, stored, take)
        leaf.hold(name, matrix)
        source.drop(stored)
        self.formats[matrix.format] = self.formats.get(matrix.format, 0) + matrix.nbytes
        if isinstance(leaf, QKV) and len(leaf.outputs) > 1:  # a layer that shares keys and values has only queries
            self._stack(leaf, name.rpartition(".")[0], matrix)
        return True

    def quantize_note(self) -> tuple[str, ...]:
        return ()

    def nbytes(self, leaf: Any, name: str, kind: str) -> int | None:
        """Bytes that a tensor of type `kind` takes on the device, None if it is not a matrix."""
        if not _is_matrix(leaf, name):
            return None
        rows, cols = leaf.shard(name).shape
        if kind not in GGUF:
            return rows * cols * _ITEM_BYTES[_dtype_of(leaf, self.dtype)]
        # codes, the scale of each group of 32, and what a block of 256 may have in addition
        chunks = -(-cols // CHUNK)
        return rows * (chunks * (CHUNK * LAYOUTS[kind].bits // 8 + 8) + (4 * -(-cols // 256) if kind == "Q4_K" else 0))

    def segments(self, leaf: Any, kind: str) -> int:
        """Into how many parts ranks may cut a reducing linear's sum, for a tensor of type `kind`: whole segments of
        whole blocks of the file."""
        rows, cols = leaf.expects()["weight"]
        segments = segments_of(leaf, rows, cols, kind)
        block = GGMLType[kind].block_size if kind in GGUF else 1
        while cols // segments % block:
            segments //= 2
        return segments

    def _matrix(self, leaf: Any, name: str, source: WeightSource, stored: str, take: Any) -> DeviceMatrix:
        kind, (rows, cols), shard = source.info(stored).dtype, leaf.expects()[name], leaf.shard(name)
        dtype = _dtype_of(leaf, self.dtype)
        segments = segments_of(leaf, rows, cols, kind) // shard.parts
        if kind in _FLOATS:
            array = source.array(stored)
            array = np.ascontiguousarray(shard.of(take.of(array) if take else array))
            return matrix_from_floats(array, dtype, segments, self._put)
        if kind not in GGMLType.__members__:
            raise UnsupportedModel(f"tensor {quoted(stored)} is stored as {kind}, which no GPU kernel reads")
        if (inputs := source.info(stored).inputs) and inputs.order is not None:
            self._note("matrices with activation order are decoded on a GPU")
            array = source.array(stored).astype(np.float32)
            return matrix_from_floats(shard.of(take.of(array) if take else array), dtype, segments, self._put)
        raw = source.raw(stored)
        raw = np.ascontiguousarray((take.of_rows(raw) if take else raw)[slice(*shard.rows)])
        if kind == ROUNDED_ROWS:
            raise CannotTrace(f"no Triton kernel rounds the rows of {kind} matrices")
        ggml = GGMLType[kind]
        if kind in GGUF:
            first, last = (ggml.row_bytes(column) for column in shard.columns)
            return matrix_from_gguf(
                kind, np.ascontiguousarray(raw[:, first:last]), len(raw), shard.shape[1], segments, dtype, self._put
            )  # fmt: skip
        self._note(f"{kind} has no kernels of its own on a GPU: its weights are rounded to {dtype}")
        values = dequantize(raw, ggml, (len(raw), cols))[:, slice(*shard.columns)]
        return matrix_from_floats(values, dtype, segments, self._put)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        """A copy of the array on the device."""
        tensor = tensor_of(array if array.flags.writeable else array.copy())
        return tensor.clone() if self.device == "cpu" else tensor.to(self.device)

    def _stack(self, leaf: QKV, part: str, matrix: DeviceMatrix) -> None:
        """Moves q, k and v to adjoining memory when the last of them is there."""
        parts = self._open.setdefault(id(leaf), {})
        parts[part] = matrix
        if len(parts) < len(leaf.outputs):
            return
        del self._open[id(leaf)]
        if len({m.format for m in parts.values()}) == 1:
            whole = stacked([parts[name] for name in leaf.outputs])
            sizes = [parts[name].rows for name in leaf.outputs]
            for name, rows in zip(leaf.outputs, split_rows(whole, sizes), strict=True):
                leaf.hold(f"{name}.weight", rows)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def segments_of(leaf: Any, rows: int, cols: int, kind: str) -> int:
    """The segments of the sums of a leaf's whole matrix [rows, cols], of which ranks may have parts. kind: of its
    weights."""
    if isinstance(leaf, QKV):
        return choose_segments(sum(leaf.outputs.values()), cols, unit(kind), reduces=True)
    if not getattr(leaf, "reduces", False):
        return 1
    # The products of experts have a program for each segment.
    return most_segments(cols, unit(kind)) if leaf.own_inputs else choose_segments(rows, cols, unit(kind), reduces=True)


def _is_matrix(leaf: Any, name: str) -> bool:
    return isinstance(leaf, Linear | Embedding) and name.rpartition(".")[2] == "weight"


def _dtype_of(leaf: Any, dtype: str) -> str:
    return "float32" if getattr(leaf, "keeps_float32", False) else dtype
