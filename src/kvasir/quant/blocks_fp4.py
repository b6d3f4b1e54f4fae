"""GGML blocks of 4-bit indices into a fixed table of levels: the 4-bit floats and the non-linear IQ4 formats.

Source: block_mxfp4, block_nvfp4, block_iq4_* in ggml-common.h of the ggml project; OCP Microscaling Formats v1.0 for
E2M1 and E8M0; NVIDIA's NVFP4 for E4M3 scales per 16 weights.
"""

import numpy as np

from kvasir.quant.blocks import F32, column, fields, look_up

MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])
NVFP4 = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])
IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

# E2M1 doubled, so that every level is an integer; the scale tables below are halved to compensate. ggml reads the
# code of minus zero as plus zero.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], F32)

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)


def mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    look_up(_E2M1, fields(blocks["qs"], 16, 4), out.reshape(-1, 1, 2, 16))
    out *= _HALF_E8M0[blocks["e"]][:, None]


def nvfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    look_up(_E2M1, fields(blocks["qs"], 8, 4), out.reshape(-1, 4, 2, 8))
    sub_blocks = out.reshape(-1, 4, 16)
    sub_blocks *= _HALF_UE4M3[blocks["d"]][..., None]


def iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    look_up(_IQ4, fields(blocks["qs"], 16, 4), out.reshape(-1, 1, 2, 16))
    out *= column(blocks["d"])


def iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """Eight sub-blocks of 32 with 6-bit scales: 4 bits in scales_l, the upper 2 in scales_h."""
    look_up(_IQ4, fields(blocks["qs"], 16, 4), out.reshape(-1, 8, 2, 16))
    low = fields(blocks["scales_l"], 1, 4).reshape(-1, 8)
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(F32) - 32
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= column(column(blocks["d"]) * scales)


def _half_e8m0() -> np.ndarray:
    """Half of every E8M0 scale 2^(e - 127), float32 [256]; the smallest two are subnormal."""
    return np.ldexp(np.float32(1), np.arange(256) - 128)


def _half_ue4m3() -> np.ndarray:
    """Half of every unsigned E4M3 scale (bias 7), float32 [256]; 0x7F, its NaN, is 0 as in ggml."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(F32)
    value = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8 + mantissa, np.maximum(exponent, 1) - 11))
    value[0x7F] = 0
    return value.astype(F32)


_HALF_E8M0 = _half_e8m0()
_HALF_UE4M3 = _half_ue4m3()
