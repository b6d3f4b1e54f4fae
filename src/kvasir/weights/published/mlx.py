"""MLX: codes in 32-bit words along the rows, with scales and biases of groups: weight U32 [out, in bits / 32], scales
and biases [out, in / group]. A value is code * scale + bias. In the modes mxfp4, nvfp4 and mxfp8 the codes are floats
and the scales U8, without biases. Source: the package's documentation of `quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from kvasir.weights.published.codes import (
    E2M1,
    OWN_GROUP,
    exact_halves,
    powers,
    to_mxfp4_blocks,
    to_own_blocks,
    to_q4_1_blocks,
    unpacked,
)
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
Settings = tuple[int, int, str]  # bits, group size, mode


def read(source: WeightSource, settings: Callable[[str], Settings]) -> Iterator[Decoded]:
    """All quantized matrices of a checkpoint. settings: of the matrix with a name."""
    for stored in stems(source, "scales"):
        yield _decoded(stored, *settings(stored.stem))


def _decoded(stored: Stored, bits: int, group: int, mode: str) -> Decoded:
    info = stored.info("weight") if "weight" in stored else None
    if info is None or len(info.shape) != 2 or info.dtype != "U32" or info.shape[1] * 32 % (bits * group):
        stored.refuse("there is no matrix of U32 in whole groups", f"expected {bits} bits in groups of {group}")
    rows, cols = info.shape[0], info.shape[1] * 32 // bits
    parts = tuple(f"{stored.stem}.{kind}" for kind in ("weight", "scales", "biases") if kind in stored)
    groups = rows, cols // group

    def codes() -> np.ndarray:
        return unpacked(stored.array("weight"), bits)

    def affine() -> np.ndarray:
        scales, biases = (stored.array(kind, groups).astype(np.float32) for kind in ("scales", "biases"))
        values = codes().astype(np.float32) * scales.repeat(group, 1) + biases.repeat(group, 1)
        return values.astype(ml_dtypes.bfloat16)

    def floats() -> np.ndarray:
        data = codes()
        values = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if mode == "mxfp8" else E2M1[data]
        stored_scales = stored.array("scales", groups)
        small = mode == "nvfp4"
        scales = stored_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if small else powers(stored_scales)
        return (values * scales.repeat(group, 1)).astype(ml_dtypes.bfloat16)

    def mxfp4_blocks() -> np.ndarray:
        return to_mxfp4_blocks(codes(), stored.array("scales", groups))

    def nvfp4_blocks() -> np.ndarray:
        scales = stored.array("scales", groups).view(np.uint8).reshape(rows, -1, 4)
        return to_own_blocks("NVFP4_SCALED", codes(), d=np.ones(1, np.float32), scales=scales)

    def affine_blocks() -> np.ndarray:
        scales, biases = (stored.array(kind, groups).view(np.uint16) for kind in ("scales", "biases"))
        each = group // OWN_GROUP
        return to_own_blocks(packed, codes(), d=scales.repeat(each, 1), m=biases.repeat(each, 1))

    def q4_1_blocks() -> np.ndarray:
        scales, biases = (stored.array(kind, groups).astype(np.float16) for kind in ("scales", "biases"))
        return to_q4_1_blocks(codes(), scales.repeat(group // 32, 1), biases.repeat(group // 32, 1))

    packed, blocks = "", mxfp4_blocks
    if mode == "affine" and "biases" in stored:
        packed = _affine_format(stored, bits, group)
        blocks = q4_1_blocks if packed == "Q4_1" else affine_blocks
    elif mode == "mxfp4" and group == 32:
        packed = "MXFP4"
    elif mode == "nvfp4" and group == 16 and cols % OWN_GROUP == 0:
        packed, blocks = "NVFP4_SCALED", nvfp4_blocks
    values, name = affine if mode == "affine" else floats, f"{stored.stem}.weight"
    if packed:
        return Decoded(name, (rows, cols), packed, parts, blocks, values)
    return Decoded(name, (rows, cols), "BF16", parts, values)


def _affine_format(stored: Stored, bits: int, group: int) -> str:
    """The packed format with these codes, scales and biases; "" if there is none."""
    kinds = stored.info("scales").dtype, stored.info("biases").dtype
    if kinds == ("BF16", "BF16") and group % OWN_GROUP == 0:
        return "AFFINE4" if bits <= 4 else "AFFINE8"
    is_half = all(exact_halves(stored.array(kind)) is not None for kind in ("scales", "biases"))
    return "Q4_1" if bits <= 4 and group % 32 == 0 and is_half else ""
