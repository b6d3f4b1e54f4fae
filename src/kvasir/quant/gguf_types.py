"""The tensor types of GGUF files and our own: their table, and decoding to float32 with numpy alone.

Source: enum ggml_type and the block structs of the ggml project (ggml.h, ggml-common.h). A row of a tensor is a whole
number of blocks; a block is `block_size` weights in `type_size` bytes, little-endian. Decoded values equal those of the
reference code bit for bit.
"""

from enum import IntEnum

import numpy as np

from kvasir.errors import UnsupportedModel
from kvasir.quant import blocks_basic as basic
from kvasir.quant import blocks_fp4 as fp4
from kvasir.quant import blocks_iq as iq
from kvasir.quant import blocks_k as k
from kvasir.quant import blocks_own as own
from kvasir.quant.blocks import F32, Decoder

# Weights per chunk: small enough that a chunk and its temporaries stay in a core's own cache.
CHUNK = 1 << 15


class GGMLType(IntEnum):
    """A tensor type with its number in GGUF files. Missing numbers were withdrawn from the format. Types from 1000 on
    are our own: published formats of safetensors (kvasir.weights.published), which no GGUF file has."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    FP8 = 1000
    INT4 = 1001
    INT8 = 1002
    INT4_ZP = 1003
    INT8_ZP = 1004
    AFFINE4 = 1005
    AFFINE8 = 1006
    NF4 = 1007
    NVFP4_SCALED = 1008
    BITNET = 1009

    @property
    def block_size(self) -> int:
        """Weights per block; 1 for plain numbers."""
        return _BLOCKS[self][0]

    @property
    def type_size(self) -> int:
        """Bytes per block."""
        return self.layout.itemsize

    @property
    def layout(self) -> np.dtype:
        """The layout of a block in the file."""
        return _BLOCKS[self][1]

    @property
    def is_plain(self) -> bool:
        """Whether this is an ordinary number type, which needs no decoding."""
        return self.block_size == 1

    @property
    def is_own(self) -> bool:
        """Whether no GGUF file has this type."""
        return self >= 1000

    def row_bytes(self, row_length: int) -> int:
        """Bytes of a row of `row_length` weights, which must be a multiple of `block_size`."""
        return row_length // self.block_size * self.type_size


def _plain(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = blocks


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    """A bfloat16 is the upper half of a float32."""
    np.left_shift(blocks, 16, out=out.view("<u4")[:, 0], dtype=np.uint32)


# Weights per block, the block's layout in the file, and its decoder. Q8_1 is ggml's runtime format for
# activations: its size varies between versions of ggml, and no model file holds it.
_BLOCKS: dict[GGMLType, tuple[int, np.dtype, Decoder | None]] = {
    GGMLType.F32: (1, np.dtype("<f4"), _plain),
    GGMLType.F16: (1, np.dtype("<f2"), _plain),
    GGMLType.F64: (1, np.dtype("<f8"), _plain),
    GGMLType.BF16: (1, np.dtype("<u2"), _bf16),
    GGMLType.I8: (1, np.dtype("i1"), _plain),
    GGMLType.I16: (1, np.dtype("<i2"), _plain),
    GGMLType.I32: (1, np.dtype("<i4"), _plain),
    GGMLType.I64: (1, np.dtype("<i8"), _plain),
    GGMLType.Q1_0: (128, basic.Q1_0, basic.q1_0),
    GGMLType.Q4_0: (32, basic.Q4_0, basic.q4_0),
    GGMLType.Q4_1: (32, basic.Q4_1, basic.q4_1),
    GGMLType.Q5_0: (32, basic.Q5_0, basic.q5_0),
    GGMLType.Q5_1: (32, basic.Q5_1, basic.q5_1),
    GGMLType.Q8_0: (32, basic.Q8_0, basic.q8),
    GGMLType.Q8_1: (32, np.dtype("V40"), None),
    GGMLType.Q8_K: (256, basic.Q8_K, basic.q8),
    GGMLType.Q2_K: (256, k.Q2_K, k.q2_k),
    GGMLType.Q3_K: (256, k.Q3_K, k.q3_k),
    GGMLType.Q4_K: (256, k.Q4_K, k.q4_k),
    GGMLType.Q5_K: (256, k.Q5_K, k.q5_k),
    GGMLType.Q6_K: (256, k.Q6_K, k.q6_k),
    GGMLType.IQ1_S: (256, iq.IQ1_S, iq.iq1_s),
    GGMLType.IQ1_M: (256, iq.IQ1_M, iq.iq1_m),
    GGMLType.IQ2_XXS: (256, iq.IQ2_XXS, iq.iq2_xxs),
    GGMLType.IQ2_XS: (256, iq.IQ2_XS, iq.iq2_xs),
    GGMLType.IQ2_S: (256, iq.IQ2_S, iq.iq2_s),
    GGMLType.IQ3_XXS: (256, iq.IQ3_XXS, iq.iq3_xxs),
    GGMLType.IQ3_S: (256, iq.IQ3_S, iq.iq3_s),
    GGMLType.IQ4_NL: (32, fp4.IQ4_NL, fp4.iq4_nl),
    GGMLType.IQ4_XS: (256, fp4.IQ4_XS, fp4.iq4_xs),
    GGMLType.TQ1_0: (256, basic.TQ1_0, basic.tq1_0),
    GGMLType.TQ2_0: (256, basic.TQ2_0, basic.tq2_0),
    GGMLType.MXFP4: (32, fp4.MXFP4, fp4.mxfp4),
    GGMLType.NVFP4: (64, fp4.NVFP4, fp4.nvfp4),
    GGMLType.FP8: (128, own.FP8, own.fp8),
    GGMLType.INT4: (64, own.SCALED, own.int4),
    GGMLType.INT8: (64, own.SCALED, own.int8),
    GGMLType.INT4_ZP: (64, own.ZERO_POINT, own.int4_zp),
    GGMLType.INT8_ZP: (64, own.ZERO_POINT, own.int8_zp),
    GGMLType.AFFINE4: (64, own.AFFINE, own.affine4),
    GGMLType.AFFINE8: (64, own.AFFINE, own.affine8),
    GGMLType.NF4: (64, own.SCALED, own.nf4),
    GGMLType.NVFP4_SCALED: (64, own.NVFP4_SCALED, own.nvfp4),
    GGMLType.BITNET: (256, own.BITNET, own.bitnet),
}


def dequantize(data: np.ndarray, ggml_type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Decodes a whole tensor: uint8 of any shape, C-contiguous -> float32 `shape`.

    Raises `UnsupportedModel` for Q8_1 and `ValueError` if the bytes do not fill `shape`.
    """
    out = np.empty(shape, F32)
    dequantize_into(out, data, ggml_type)
    return out


def dequantize_into(out: np.ndarray, data: np.ndarray, ggml_type: GGMLType) -> None:
    """Decodes `data` (uint8, C-contiguous) into `out` (float32, C-contiguous) in chunks of `CHUNK` weights."""
    block_size, layout, decode = _BLOCKS[ggml_type]
    if decode is None:
        raise UnsupportedModel(
            f"tensors of type {ggml_type.name} cannot be read",
            "it is a format for activations, not for weights",
        )
    if out.size % block_size or out.size // block_size * layout.itemsize != data.size:
        raise ValueError(f"{data.size} bytes of {ggml_type.name} do not fill {out.size} weights")
    blocks = data.reshape(-1).view(layout)
    rows = out.reshape(-1, block_size)
    step = CHUNK // block_size
    # Infinite or NaN scales in the file follow IEEE 754, without warnings.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], rows[start : start + step])
