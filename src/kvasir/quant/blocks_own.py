"""Blocks of this engine's own: matrices of safetensors in published formats, with their codes as bytes.

    SCALED        value = (code - zero) * d, zero 8 or 128; NF4: an entry of its table times d
    ZERO_POINT    value = code * d - zero * d
    AFFINE        value = code * d + m, d and m bfloat16
    NVFP4_SCALED  value = FP4 * (E4M3 * d), an E4M3 scale per 16
    FP8           value = E4M3 * d
    BITNET        value = (code - 1) * d, codes in the order of TQ2_0, as which they are packed

The kernels read these blocks (csrc/pack_int.cpp, csrc/pack_float.cpp), and compute the same values.
"""

import ml_dtypes
import numpy as np

from kvasir.quant.blocks import F32, column, fields

SCALED = np.dtype([("d", "<f4"), ("qs", "u1", 64)])
ZERO_POINT = np.dtype([("d", "<f2"), ("zero", "<f2"), ("qs", "u1", 64)])
AFFINE = np.dtype([("d", "<u2"), ("m", "<u2"), ("qs", "u1", 64)])
NVFP4_SCALED = np.dtype([("d", "<f4"), ("scales", "u1", 4), ("qs", "u1", 64)])
FP8 = np.dtype([("d", "<f4"), ("qs", "u1", 128)])
BITNET = np.dtype([("d", "<f4"), ("qs", "u1", 64)])

# The values of NormalFloat4, as bitsandbytes has them (QLoRA, Dettmers et al. 2023, appendix E).
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    F32,
)
NF4_UNIT = np.float32(2**-13)  # the kernels' table has multiples of it
_NF4_LEVELS = np.rint(NF4 / NF4_UNIT).astype(F32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)


def int4(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks["qs"] & 15
    out -= 8
    out *= column(blocks["d"])


def int8(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks["qs"]
    out -= 128
    out *= column(blocks["d"])


def nf4(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = _NF4_LEVELS[blocks["qs"] & 15]
    out *= column(blocks["d"])


def int4_zp(blocks: np.ndarray, out: np.ndarray) -> None:
    _zero_point(blocks, blocks["qs"] & 15, out)


def int8_zp(blocks: np.ndarray, out: np.ndarray) -> None:
    _zero_point(blocks, blocks["qs"], out)


def affine4(blocks: np.ndarray, out: np.ndarray) -> None:
    _affine(blocks, blocks["qs"] & 15, out)


def affine8(blocks: np.ndarray, out: np.ndarray) -> None:
    _affine(blocks, blocks["qs"], out)


def nvfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """A negative scale changes the signs; NaN is read as 0, as in GGML's NVFP4."""
    sizes = blocks["scales"] & 127
    scales = np.where(sizes == 127, 0, sizes.view(ml_dtypes.float8_e4m3fn).astype(F32)).astype(F32)
    codes = blocks["qs"].reshape(-1, 4, 16) ^ (blocks["scales"] >> 4 & 8)[..., None]
    groups = out.reshape(-1, 4, 16)
    groups[:] = np.where(scales[..., None] == 0, 0, _E2M1[codes & 15])
    groups *= (scales * column(blocks["d"]))[..., None]


def fp8(blocks: np.ndarray, out: np.ndarray) -> None:
    """NaN is read as 480, the number that follows the largest."""
    codes = blocks["qs"]
    out[:] = codes.view(ml_dtypes.float8_e4m3fn).astype(F32)
    out[codes == 0x7F], out[codes == 0xFF] = 480, -480
    out *= column(blocks["d"])


def bitnet(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1, 2, 4, 32)[:] = fields(blocks["qs"], 32, 2)
    out -= 1
    out *= column(blocks["d"])


def _zero_point(blocks: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    out[:] = codes
    out *= column(blocks["d"])
    out -= column(blocks["zero"]) * column(blocks["d"])


def _affine(blocks: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    out[:] = codes
    out *= column(blocks["d"].view(ml_dtypes.bfloat16))
    out += column(blocks["m"].view(ml_dtypes.bfloat16))
