"""MLX: codes in 32-bit words along the rows, with scales and biases of groups: weight U32 [out, in bits / 32], scales
and biases [out, in / group]. A value is code * scale + bias. In the modes mxfp4, nvfp4 and mxfp8 the codes are floats
and the scales U8, without biases. Source: the package's documentation of `quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from kvasir.weights.published.codes import E2M1, powers, to_mxfp4_blocks, unpacked
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

    if mode == "mxfp4" and group == 32:
        blocks = lambda: to_mxfp4_blocks(codes(), stored.array("scales", groups))  # noqa: E731
        return Decoded(f"{stored.stem}.weight", (rows, cols), "MXFP4", parts, blocks)
    return Decoded(f"{stored.stem}.weight", (rows, cols), "BF16", parts, affine if mode == "affine" else floats)
