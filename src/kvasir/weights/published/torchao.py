"""torchao's safetensors: the parts of a quantized tensor `a.weight` are `a._weight_qdata`, `a._weight_scale` and maybe
`a._weight_zero_point`; the file's metadata has a JSON object for `a.weight` with the type and its block size.

    Int8Tensor, IntxUnpackedToInt8Tensor    qdata I8; value = (qdata - zero_point) * scale
    Float8Tensor                            qdata F8_E4M3; value = qdata * scale
    Int4Tensor                              qdata I8 [rows, cols / 2], the low nibble first, signed; scale and
                                            zero_point [groups, rows]; value = qdata * scale + zero_point

Source: the package's `prototype/safetensors` and `quantize_/workflows`; FBGEMM's `int4_row_quantize_zp`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.weights.published.codes import OWN_GROUP, nibbles, to_own_blocks
from kvasir.weights.published.view import Decoded, Stored
from kvasir.weights.source import WeightSource

TYPES = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_FP8_GROUP = 128
_DTYPES = {"bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16), "float32": ("F32", np.float32)}


def read(source: WeightSource) -> Iterator[Decoded]:
    """All quantized tensors that the metadata of the checkpoint names. Raises UnsupportedModel for another type."""
    metadata: Mapping[str, str] = getattr(source, "metadata", {})
    if "tensor_names" not in metadata:
        raise UnsupportedModel(
            "the safetensors files have no metadata of torchao", "supported: torchao's safetensors, not its pickles"
        )
    names = frozenset(source.names())
    for name in _object(metadata, "tensor_names", list):
        if not isinstance(name, str):
            raise ModelFileError("the metadata of torchao names a tensor that is no text", "is the file damaged?")
        found = _object(metadata, name, dict)
        kind, data = found.get("_type"), found.get("_data")
        if kind in ("Tensor", "torch.Tensor"):
            continue
        if kind not in TYPES:
            raise UnsupportedModel(
                f"tensor {quoted(name)} is torchao's {quoted(kind)}", f"supported: {', '.join(TYPES)}"
            )
        stem, _, last = name.rpartition(".")
        stored = Stored(source, f"{stem}._{last}", names)
        parts = {part: f"{stem}._{last}_{part}" for part in found.get("_tensor_data_names") or ()}
        yield _Tensor(stored, name, parts, data if isinstance(data, dict) else {}).decoded(str(kind))


def _object(metadata: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        found = json.loads(metadata.get(name, ""))
    except ValueError as error:
        raise ModelFileError(f"the metadata of tensor {quoted(name)} is not JSON: {error}") from error
    if not isinstance(found, kind):
        raise ModelFileError(f"the metadata of tensor {quoted(name)} is {quoted(found)}", f"expected a {kind.__name__}")
    return found


class _Tensor:
    """A quantized matrix. parts: the names of its tensors."""

    def __init__(self, stored: Stored, name: str, parts: Mapping[str, str], data: Mapping[str, Any]):
        self.stored, self.name, self.parts, self.data = stored, name, dict(parts), data
        missing = [part for part in ("qdata", "scale") if self.parts.get(part) not in stored.present]
        if missing or not all(part in stored.present for part in self.parts.values()):
            stored.refuse(f"there is no tensor {', '.join(missing) or 'that its metadata names'}", "is it complete?")
        if unknown := sorted(set(self.parts) - {"qdata", "scale", "zero_point"}):
            raise UnsupportedModel(
                f"tensor {quoted(name)} has torchao's {quoted(unknown[0])}", "supported: weights without scaled rows"
            )
        self.info = stored.source.info(self.parts["qdata"])
        if len(self.info.shape) != 2 or not all(self.info.shape):
            stored.refuse(f"qdata has shape {list(self.info.shape)}", "expected a matrix")

    def decoded(self, kind: str) -> Decoded:
        """The tensor, from its parts."""
        if kind == "Int4Tensor":
            return self._int4()
        if self.info.dtype != ("F8_E4M3" if kind == "Float8Tensor" else "I8"):
            self.stored.refuse(f"qdata of {kind} is {self.info.dtype}", "expected F8_E4M3 or I8")
        rows, cols = self.info.shape
        dtype, number = self._dtype()
        block = self._block(rows, cols)
        grid = -(-rows // block[0]), -(-cols // block[1])

        def spread(part: str) -> np.ndarray:
            found = self._array(part)
            if found.size != grid[0] * grid[1]:
                self.stored.refuse(f"{part} has shape {list(found.shape)}", f"expected {list(grid)}")
            return found.reshape(grid).repeat(block[0], 0)[:rows]

        def values() -> np.ndarray:
            codes = self._array("qdata").astype(number)
            if "zero_point" in self.parts:
                codes = codes - spread("zero_point").astype(number).repeat(block[1], 1)[:, :cols]
            return (codes * spread("scale").repeat(block[1], 1)[:, :cols]).astype(number)

        def blocks(packed: str, size: int) -> Callable[[], np.ndarray]:
            def compute() -> np.ndarray:
                codes = self._array("qdata").view(np.uint8)
                if packed == "FP8" and (codes & 127 == 127).any():
                    self.stored.refuse("qdata has values that are not numbers", "is the file damaged?")
                codes = codes ^ 128 if packed == "INT8" else codes
                return to_own_blocks(packed, codes, d=spread("scale").astype(np.float32).repeat(block[1] // size, 1))

            return compute

        packed, size = ("FP8", _FP8_GROUP) if kind == "Float8Tensor" else ("INT8", OWN_GROUP)
        if cols % block[1] == 0 and block[1] % size == 0 and not self._has_zeros():
            return Decoded(self.name, (rows, cols), packed, tuple(self.parts.values()), blocks(packed, size), values)
        return Decoded(self.name, (rows, cols), dtype, tuple(self.parts.values()), values)

    def _int4(self) -> Decoded:
        rows, cols = self.info.shape[0], 2 * self.info.shape[1]
        dtype, number = self._dtype()
        block = self._block(rows, cols)
        shape = cols // block[1], rows
        if block[0] != 1 or cols % block[1] or self.info.dtype not in ("I8", "U8") or "zero_point" not in self.parts:
            self.stored.refuse(f"qdata is {self.info.dtype} in blocks of {list(block)}", "expected groups of a row")

        def values() -> np.ndarray:
            codes = nibbles(self._array("qdata").view(np.uint8))
            signed = (codes ^ 8).astype(np.float32) - 8
            scale, zero = (self._array(part) for part in ("scale", "zero_point"))
            if scale.shape != shape or zero.shape != shape:
                self.stored.refuse(f"scale has shape {list(scale.shape)}", f"expected {list(shape)}")
            each = [numbers.T.astype(np.float32).repeat(block[1], 1) for numbers in (scale, zero)]
            return (signed * each[0] + each[1]).astype(number)

        return Decoded(self.name, (rows, cols), dtype, tuple(self.parts.values()), values)

    def _array(self, part: str) -> np.ndarray:
        return self.stored.source.array(self.parts[part])

    def _has_zeros(self) -> bool:
        """Whether a zero point differs from 0."""
        return "zero_point" in self.parts and bool(self._array("zero_point").astype(np.float32).any())

    def _dtype(self) -> tuple[str, Any]:
        """Of the values: that of the metadata, else that of the scales."""
        found = self.data.get("dtype")
        name = found.get("_data") if isinstance(found, Mapping) else found
        name = name or self._array("scale").dtype.name
        if name not in _DTYPES:
            self.stored.refuse(f"its dtype is {quoted(name)}", f"expected one of {', '.join(_DTYPES)}")
        return _DTYPES[str(name)]

    def _block(self, rows: int, cols: int) -> tuple[int, int]:
        found = self.data.get("block_size")
        if found is None:
            count = self._array("scale").size
            found = [rows, cols] if count == 1 else [1, cols * rows // max(count, 1)]
        if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
            self.stored.refuse(f"its block_size is {quoted(found)}", "expected two sizes")
        return min(found[0], rows), min(found[1], cols)
