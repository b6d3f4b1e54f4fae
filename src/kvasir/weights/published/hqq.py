"""HQQ, as transformers saves it: `W_q` with the codes, `scale` and `zero` of groups, and settings as tensors of one
number or of a text's bytes.

    W_q     U8 (I32 for 3 bits): the codes of the matrix [groups, group size] (of its transpose for axis 0), cut into
            parts of as many rows that share a byte or word, the first in the upper bits
    scale, zero    [groups, 1] ([1, groups] for axis 0)

A value is (code - zero) * scale, rounded twice to the dtype of the scales. Source: the package's `quantize.py` and
`bitpack.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvasir.weights.published.codes import OWN_GROUP, exact_halves, to_own_blocks
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

_SETTINGS = (
    *("nbits", "group_size", "axis", "shape", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
_BITS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
_MOST = 1 << 31  # values of a matrix
_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def read(source: WeightSource) -> Iterator[Decoded]:
    """All quantized matrices of a checkpoint."""
    for stored in stems(source, "W_q"):
        yield _decoded(stored)


def _decoded(stored: Stored) -> Decoded:
    for kind in ("scale", "zero", "shape", "packing"):
        if kind not in stored:
            stored.refuse(f"there is no tensor {kind}", "supported: HQQ without quantized scales, as safetensors")
    packing = bytes(stored.array("packing").astype(np.uint8).reshape(-1)[:32]).decode(errors="replace")
    if packing not in _BITS:
        stored.refuse(f"its packing is {packing!r}", f"supported: {', '.join(_BITS)}")
    shape = tuple(stored.array("shape", (2,)).astype(np.int64).tolist())
    axis, bits = _number(stored, "axis", 1), _BITS[packing]
    if min(shape) < 1 or math.prod(shape) > _MOST or axis not in (0, 1):
        stored.refuse(f"its shape is {list(shape)}, its axis {axis}", "expected a matrix, and axis 0 or 1")
    if _number(stored, "nbits", bits) != bits:
        stored.refuse(f"{packing} does not hold {_number(stored, 'nbits', bits)} bits", "is the file damaged?")
    size = _number(stored, "group_size", shape[1] if axis == 1 else shape[0])
    if size < 1 or math.prod(shape) % size:
        stored.refuse(f"groups of {size} do not fill {list(shape)}", "is the file damaged?")
    groups = math.prod(shape) // size
    of_groups = (groups, 1) if axis == 1 else (1, groups)
    dtype = _NAMES.get(stored.array("scale", of_groups).dtype.name)
    if dtype is None or stored.array("zero", of_groups).dtype.name not in _NAMES:
        stored.refuse("its scales or zeros are not floats", "supported: HQQ without quantized scales")

    def codes() -> np.ndarray:
        return _codes(stored, bits, (groups, size) if axis == 1 else (size, groups))

    def values() -> np.ndarray:
        scale, zero = stored.array("scale"), stored.array("zero")
        return ((codes().astype(scale.dtype) - zero.astype(scale.dtype)) * scale).reshape(shape)

    def blocks() -> np.ndarray:
        each = size // OWN_GROUP
        scale, zero = (
            stored.array(kind).astype(np.float16).reshape(shape[0], -1).repeat(each, 1) for kind in ("scale", "zero")
        )
        return to_own_blocks(packed, codes().reshape(shape), d=scale, zero=zero)

    parts = tuple(f"{stored.stem}.{kind}" for kind in ("W_q", "scale", "zero", *_SETTINGS) if kind in stored)
    name, packed = f"{stored.stem}.weight", "INT4_ZP" if bits <= 4 else "INT8_ZP"
    whole = axis == 1 and size % OWN_GROUP == 0 and shape[1] % size == 0
    if whole and all(exact_halves(stored.array(kind)) is not None for kind in ("scale", "zero")):
        return Decoded(name, shape, packed, parts, blocks, values)
    return Decoded(name, shape, dtype, parts, values)


def _codes(stored: Stored, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """uint8 `shape`"""
    width = 30 if bits == 3 else 8
    each = width // bits
    rows = -(-shape[0] // each)
    data = stored.array("W_q")
    if data.dtype.kind == "f" or data.dtype.itemsize == 2:  # bytes under the name of a float
        data = stored.source.raw(f"{stored.stem}.W_q").view(np.int32 if bits == 3 else np.uint8)
    if data.size != rows * shape[1] or data.dtype.itemsize != (4 if bits == 3 else 1):
        stored.refuse(f"W_q is {data.dtype} {list(data.shape)}", f"expected {[rows, shape[1]]} words of {each} codes")
    data = data.reshape(rows, shape[1])
    parts = [data >> (width - bits * (part + 1)) & (1 << bits) - 1 for part in range(each)]
    return np.concatenate(parts)[: shape[0]].astype(np.uint8)


def _number(stored: Stored, kind: str, default: int) -> int:
    found = stored.array(kind).reshape(-1) if kind in stored else np.array([default])
    if found.size != 1 or found.dtype.kind not in "iu":
        stored.refuse(f"{kind} is {found.dtype} {list(found.shape)}", "expected one integer")
    return int(found[0])
