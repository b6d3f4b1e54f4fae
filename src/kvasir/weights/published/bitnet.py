"""BitNet: ternary matrices with one scale, whose input rows are rounded to int8 (arXiv:2402.17764).

    weight U8 [rows / 4, cols]   codes 0, 1, 2 of two bits: row r + i rows / 4 is in bits 2 i and 2 i + 1 of byte row r
    weight, a float type         with weight_scale: -1, 0 and 1; online: any, which are rounded here
    weight_scale [1]             its inverse for BitLinear, the scale itself for AutoBitLinear

They become blocks of type BITNET (kvasir.quant.blocks_own), whose input rows are rounded as in BitLinear: by one scale
for a whole row. Source: transformers' `integrations/bitnet.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

FAMILIES = ("bitnet", "llama", "mistral", "qwen2", "qwen3")  # whose matrices are all dense
_SIZE = GGMLType.BITNET.block_size
_FLOATS = ("F32", "F16", "BF16")
_TERNARY = ("TQ1_0", "TQ2_0")
_LINEAR = "_proj"  # of these families, all linear layers but the head


def read(source: WeightSource, inverse: bool) -> Iterator[Decoded]:
    """The matrices that have a scale. inverse: whether it is the inverse."""
    for stored in stems(source, "weight_scale"):
        rows, cols = _matrix(stored)
        if not stored.stem.endswith(_LINEAR):
            stored.refuse("it is ternary", f"supported: layers whose names end in {_LINEAR}")
        packed = stored.info("weight").dtype == "U8"
        if not packed and stored.info("weight").dtype not in _FLOATS:
            stored.refuse(f"weight is stored as {stored.info('weight').dtype}", "expected U8 or a float type")
        parts = f"{stored.stem}.weight", f"{stored.stem}.weight_scale"
        shape = (4 * rows if packed else rows), cols
        yield _decoded(stored, shape, parts, lambda stored=stored, packed=packed: _scaled(stored, packed, inverse))


def read_online(source: WeightSource, kept: Iterable[str]) -> Iterator[Decoded]:
    """Matrices of floats, to round. kept: the modules that stay as they are, by the ends of their names."""
    ends = tuple(f".{name}".removesuffix(".weight") for name in kept)
    for stored in stems(source, "weight"):
        if not stored.stem.endswith(_LINEAR) or f".{stored.stem}".endswith(ends):
            continue
        if stored.info("weight").dtype not in _FLOATS:
            stored.refuse(f"weight is stored as {stored.info('weight').dtype}", "expected a float type")
        yield _decoded(stored, _matrix(stored), (f"{stored.stem}.weight",), lambda stored=stored: _rounded(stored))


def read_gguf(source: WeightSource) -> Iterator[Decoded]:
    """The matrices of a GGUF file of a BitNet, under Hugging Face's names, that are ternary or have a scale beside
    them. Those of other types are what the file says, without rounded rows."""
    for stored in stems(source, "weight"):
        kind, has_scale = stored.info("weight").dtype, "weight_scale" in stored
        parts = tuple(f"{stored.stem}.{part}" for part in ("weight", "weight_scale") if part in stored)
        if kind in _TERNARY:
            yield _decoded(stored, _matrix(stored), parts, lambda stored=stored: _from_gguf(stored))
        elif has_scale:
            shape = _matrix(stored)
            yield Decoded(f"{stored.stem}.weight", shape, "F32", parts, lambda stored=stored: _multiplied(stored))


def _decoded(stored: Stored, shape: tuple[int, int], parts: tuple[str, ...], compute: Callable) -> Decoded:
    if shape[1] % _SIZE:
        stored.refuse(f"ternary rows of {shape[1]} values", f"supported: multiples of {_SIZE}")
    return Decoded(f"{stored.stem}.weight", shape, "BITNET", parts, compute)


def _matrix(stored: Stored) -> tuple[int, int]:
    shape = stored.info("weight").shape
    if len(shape) != 2 or not all(shape):
        stored.refuse(f"weight has shape {list(shape)}", "expected a matrix")
    return shape[0], shape[1]


def _scale(stored: Stored) -> np.float32:
    scale = stored.array("weight_scale").astype(np.float32).reshape(-1)
    if scale.size != 1 or not np.isfinite(scale[0]) or not scale[0]:
        stored.refuse("weight_scale is not one finite number other than 0", "is the file damaged?")
    return scale[0]


def _scaled(stored: Stored, packed: bool, inverse: bool) -> np.ndarray:
    scale = np.float32(1) / _scale(stored) if inverse else _scale(stored)
    weight = stored.array("weight")
    if packed:
        codes = np.concatenate([weight >> shift & 3 for shift in (0, 2, 4, 6)])
        if (codes == 3).any():
            stored.refuse("weight has codes that are not ternary", "is the file damaged?")
    else:
        values = weight.astype(np.float32)
        codes = (values + 1).astype(np.uint8)
        if not np.array_equal(codes.astype(np.float32), values + 1) or (codes > 2).any():
            stored.refuse("weight has values other than -1, 0 and 1", "is quantization_mode of the config online?")
    return to_blocks(codes, scale)


def _rounded(stored: Stored) -> np.ndarray:
    """As BitNet does while training: each weight to the nearest of -1, 0 and 1 times the mean magnitude."""
    stored_values = stored.array("weight")
    values = stored_values.astype(np.float32)
    scale = np.float32(1) / np.maximum(np.abs(values).mean(dtype=np.float64).astype(np.float32), np.float32(1e-5))
    codes = (np.clip(np.rint(values * scale), -1, 1) + 1).astype(np.uint8)
    return to_blocks(codes, (np.float32(1) / scale).astype(stored_values.dtype).astype(np.float32))


def _from_gguf(stored: Stored) -> np.ndarray:
    """A block's scale times the matrix's, if it has one. Code 3 of TQ2_0 stays what it is, 2."""
    kind = GGMLType[stored.info("weight").dtype]
    raw = np.ascontiguousarray(stored.source.raw(f"{stored.stem}.weight"))
    blocks = raw.reshape(-1).view(kind.layout)
    scales = blocks["d"].astype(np.float32).reshape(len(raw), -1)
    levels = blocks.copy()
    levels["d"] = 1
    codes = (dequantize(levels.view(np.uint8), kind, _matrix(stored)) + 1).astype(np.uint8)
    return to_blocks(codes, scales * _scale(stored) if "weight_scale" in stored else scales)


def _multiplied(stored: Stored) -> np.ndarray:
    return stored.array("weight").astype(np.float32) * _scale(stored)


def to_blocks(codes: np.ndarray, scales: np.ndarray | np.float32) -> np.ndarray:
    """Rows of type BITNET, uint8 [rows, bytes]. codes: uint8 [rows, cols]. scales: of all or [rows, blocks]."""
    blocks = np.empty((len(codes), codes.shape[1] // _SIZE), GGMLType.BITNET.layout)
    fields = codes.reshape(*blocks.shape, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    blocks["qs"] = np.bitwise_or.reduce(fields, axis=-2).reshape(*blocks.shape, 64)
    blocks["d"] = scales
    return blocks.view(np.uint8)
