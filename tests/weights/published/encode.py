"""Encoders of published formats: round to nearest, with the tensors' names and orders as their packages write them.
They serve tests and benchmarks: independent of the readers, but without the packages' searches for better scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from kvasir.quant.blocks_own import NF4
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.source import WeightSource

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that each nibble of a word holds
Tensors = dict[str, np.ndarray]


class Format(NamedTuple):
    """settings: of the config. field: where they are. encode: a matrix, float32 [out, in], to tensors by last names.
    embeds: whether the embedding is quantized, too."""

    settings: dict[str, Any]
    encode: Callable[[np.ndarray], Tensors]
    field: str = "quantization_config"
    embeds: bool = False


# --- codes ------------------------------------------------------------------------------------------


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [rows, n] -> int32 [rows, n bits / 32], the lowest bits first; bits 2, 4 or 8."""
    packed, width = codes, bits
    while width < 8:
        packed, width = packed[:, ::2] | packed[:, 1::2] << width, 2 * width
    return np.ascontiguousarray(packed).view(np.int32)


def symmetric(w: np.ndarray, group: int, bits: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """(int16 codes from -(2^(bits - 1)), scales [out, groups] of dtype)"""
    most = (1 << bits - 1) - 1
    grouped = w.reshape(len(w), -1, group)
    scales = (np.abs(grouped).max(-1) / most).astype(dtype)
    codes = np.clip(np.rint(grouped / scales.astype(np.float32)[..., None]), -most - 1, most)
    return codes.reshape(w.shape).astype(np.int16), scales


def with_zeros(w: np.ndarray, group: int, bits: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(uint8 codes, uint8 zero points [out, groups], scales [out, groups] of dtype)"""
    most = (1 << bits) - 1
    grouped = w.reshape(len(w), -1, group)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / most).astype(dtype)
    zeros = np.rint(-low / scales.astype(np.float32))
    codes = np.clip(np.rint(grouped / scales.astype(np.float32)[..., None]) + zeros[..., None], 0, most)
    return codes.reshape(w.shape).astype(np.uint8), zeros.astype(np.uint8), scales


def fp4(values: np.ndarray) -> np.ndarray:
    """The codes of the nearest FP4 numbers."""
    between = (E2M1[1:] + E2M1[:-1]) / 2
    return (np.searchsorted(between, np.abs(values)) | (values < 0) << 3).astype(np.uint8)


def pairs(codes: np.ndarray) -> np.ndarray:
    return codes[:, ::2] | codes[:, 1::2] << 4


# --- formats ----------------------------------------------------------------------------------------


def gptq(w: np.ndarray, group: int = 128) -> Tensors:
    codes, scales = symmetric(w, group, 4, np.float16)
    zeros = np.full(scales.shape, 7, np.uint8)  # stored minus 1
    index = (np.arange(w.shape[1]) // group).astype(np.int32)
    packed = words((codes + 8).astype(np.uint8), 4)
    return {"qweight": packed.T, "qzeros": words(zeros.T, 4), "scales": scales.T, "g_idx": index}


def gptq_act_order(w: np.ndarray, group: int = 128) -> Tensors:
    """With activation order: a group has columns that are anywhere in a row."""
    order = np.random.default_rng(w.shape[1]).permutation(w.shape[1])
    tensors, back = gptq_asymmetric(np.ascontiguousarray(w[:, order]), group), np.argsort(order)
    data = np.ascontiguousarray(tensors["qweight"].T).view(np.uint8)
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(w.shape)[:, back]
    return {**tensors, "qweight": words(np.ascontiguousarray(codes), 4).T, "g_idx": (back // group).astype(np.int32)}


def gptq_asymmetric(w: np.ndarray, group: int = 128, bits: int = 4) -> Tensors:
    """Of checkpoint_format gptq_v2."""
    codes, zeros, scales = with_zeros(w, group, bits, np.float16)
    return {"qweight": words(codes, bits).T, "qzeros": words(zeros.T, bits), "scales": scales.T}


def awq(w: np.ndarray, group: int = 128) -> Tensors:
    codes, zeros, scales = with_zeros(w, group, 4, np.float16)

    def packed(matrix: np.ndarray) -> np.ndarray:
        return words(matrix.reshape(len(matrix), -1, 8)[..., AWQ_ORDER].reshape(len(matrix), -1), 4)

    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T}


def awq_gemv(w: np.ndarray, group: int = 128) -> Tensors:
    codes, zeros, scales = with_zeros(w, group, 4, np.float16)
    padding = (0, 0), (0, -zeros.shape[1] % 8)
    return {"qweight": words(codes, 4), "qzeros": words(np.pad(zeros, padding), 4), "scales": np.pad(scales, padding)}


def marlin(w: np.ndarray, group: int = 128) -> Tensors:
    """One code after the other, by the fragments of the tensor cores' matrices."""
    codes, scales = symmetric(w, group, 4, np.float16)
    inputs, outputs = (codes + 8).astype(np.uint32).T, len(w)
    rows = []
    for first in range(0, len(inputs), 16):
        row = []
        for block in range(0, outputs, 64):  # four tiles
            for thread in range(32):
                for tile in range(4):
                    col = block + 16 * tile + thread // 4
                    k = first + 2 * (thread % 4)
                    places = [(k, 0), (k + 1, 0), (k + 8, 0), (k + 9, 0), (k, 8), (k + 1, 8), (k + 8, 8), (k + 9, 8)]
                    eight = [int(inputs[at, col + half]) for at, half in places]
                    row.append(sum(eight[source] << 4 * n for n, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7))))
        rows.append(row)
    ordered = scales.T.reshape(-1, 8, 8).swapaxes(1, 2).reshape(-1, outputs)
    assert scales.shape[1] > 1, "one group has another order"
    return {"B": np.array(rows, np.uint32).view(np.int32), "s": ordered}


def w4a16(w: np.ndarray, group: int = 128) -> Tensors:
    codes, scales = symmetric(w, group, 4, BF16)
    return {
        "weight_packed": words((codes + 8).astype(np.uint8), 4),
        "weight_scale": scales,
        "weight_shape": np.array(w.shape, np.int64),
    }


def w4a16_asymmetric(w: np.ndarray, group: int = 128) -> Tensors:
    codes, zeros, scales = with_zeros(w, group, 4, BF16)
    return {
        "weight_packed": words(codes, 4),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T, 4).T,
        "weight_shape": np.array(w.shape, np.int64),
    }


def w4a16_act_order(w: np.ndarray, group: int = 128) -> Tensors:
    """As `gptq_act_order`."""
    order = np.random.default_rng(w.shape[1]).permutation(w.shape[1])
    tensors, back = w4a16_asymmetric(np.ascontiguousarray(w[:, order]), group), np.argsort(order)
    data = tensors["weight_packed"].view(np.uint8)
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(w.shape)[:, back]
    packed = words(np.ascontiguousarray(codes), 4)
    return {**tensors, "weight_packed": packed, "weight_g_idx": (back // group).astype(np.int32)}


def w8a8(w: np.ndarray) -> Tensors:
    codes, scales = symmetric(w, w.shape[1], 8, BF16)
    return {"weight": codes.astype(np.int8), "weight_scale": scales}


def fp8_rows(w: np.ndarray) -> Tensors:
    scales = (np.abs(w).max(1, keepdims=True) / 448).astype(np.float32)
    return {"weight": (w / scales).astype(E4M3), "weight_scale": scales}


def fp8_blocks(w: np.ndarray) -> Tensors:
    rows, cols = w.shape
    blocks = np.pad(w, ((0, -rows % 128), (0, -cols % 128)))
    blocks = blocks.reshape(-(-rows // 128), 128, -(-cols // 128), 128)
    scales = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
    each = scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :cols]
    return {"weight": (w / each).astype(E4M3), "weight_scale_inv": scales}


def nvfp4(w: np.ndarray) -> Tensors:
    whole = np.float32(np.abs(w).max() / (6 * 448))
    grouped = w.reshape(len(w), -1, 16)
    scales = (np.abs(grouped).max(-1) / 6 / whole).astype(E4M3)
    codes = fp4(grouped / (scales.astype(np.float32) * whole)[..., None]).reshape(w.shape)
    return {"weight": pairs(codes), "weight_scale": scales, "weight_scale_2": np.array(whole)}


def mxfp4(w: np.ndarray) -> Tensors:
    grouped = w.reshape(len(w), -1, 32)
    exponents = np.floor(np.log2(np.abs(grouped).max(-1))) - 2
    codes = fp4(grouped / np.exp2(exponents)[..., None]).reshape(w.shape)
    return {"weight_packed": pairs(codes), "weight_scale": (exponents + 127).astype(np.uint8)}


def mxfp8(w: np.ndarray) -> Tensors:
    grouped = w.reshape(len(w), -1, 32)
    exponents = np.floor(np.log2(np.abs(grouped).max(-1))) - 8
    codes = np.clip(grouped / np.exp2(exponents)[..., None], -448, 448).astype(E4M3).reshape(w.shape)
    return {"weight": codes, "weight_scale": (exponents + 127).astype(np.uint8)}


def bnb_fp4(w: np.ndarray, block: int = 64) -> Tensors:
    """The map of bitsandbytes: its codes are in no order."""
    sizes = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
    table, flat = np.concatenate((sizes, -sizes)), w.reshape(-1, block)
    scales = np.abs(flat).max(1).astype(np.float32)
    codes = np.abs((flat / scales[:, None])[..., None] - table).argmin(-1).astype(np.uint8).reshape(-1, 2)
    state = {"quant_type": "fp4", "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
    return {
        "weight": codes[:, :1] << 4 | codes[:, 1:], "weight.absmax": scales, "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__fp4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }  # fmt: skip


def nf4(w: np.ndarray, nested: bool = False) -> Tensors:
    flat = w.reshape(-1, 64)
    scales = np.abs(flat).max(1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
    tensors: Tensors = {"weight.quant_map": NF4}
    if nested:
        offset = float(scales.mean())
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        blocks = np.pad(scales - np.float32(offset), (0, -len(scales) % 256)).reshape(-1, 256)
        most = np.abs(blocks).max(1).astype(np.float32)
        places = np.rint((blocks / most[:, None] + 1) * 127.5).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": places.reshape(-1)[: len(scales)], "weight.nested_absmax": most}
        tensors["weight.nested_quant_map"] = table
        scales = (table[places] * most[:, None]).reshape(-1)[: len(scales)] + np.float32(offset)
    else:
        tensors["weight.absmax"] = scales
    codes = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, flat / scales[:, None]).astype(np.uint8).reshape(-1, 2)
    tensors["weight"] = codes[:, :1] << 4 | codes[:, 1:]
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    return tensors


def nf4_nested(w: np.ndarray) -> Tensors:
    return nf4(w, nested=True)


def llm_int8(w: np.ndarray) -> Tensors:
    most = np.abs(w).max(1).astype(np.float32)
    return {"weight": np.rint(w * (127 / most[:, None])).astype(np.int8), "SCB": most}


def mlx(bits: int, group: int = 64) -> Callable[[np.ndarray], Tensors]:
    def encode(w: np.ndarray) -> Tensors:
        grouped = w.reshape(len(w), -1, group)
        low, high = grouped.min(-1), grouped.max(-1)
        scales, biases = ((high - low) / ((1 << bits) - 1)).astype(BF16), low.astype(BF16)
        codes = (grouped - biases.astype(np.float32)[..., None]) / scales.astype(np.float32)[..., None]
        codes = np.clip(np.rint(codes), 0, (1 << bits) - 1).astype(np.uint8).reshape(w.shape)
        return {"weight": words(codes, bits).view(np.uint32), "scales": scales, "biases": biases}

    return encode


def hqq(w: np.ndarray, group: int = 64) -> Tensors:
    grouped = w.reshape(-1, group)
    low, high = grouped.min(1, keepdims=True), grouped.max(1, keepdims=True)
    scale = ((high - low) / 15).astype(np.float16)
    zero = (-low / scale.astype(np.float32)).astype(np.float16)
    codes = np.clip(np.rint(grouped / scale.astype(np.float32) + zero.astype(np.float32)), 0, 15).astype(np.uint8)
    half = len(codes) // 2
    return {
        "W_q": codes[:half] << 4 | codes[half:],
        "scale": scale,
        "zero": zero,
        "shape": np.array(w.shape, np.int64),
        "packing": np.frombuffer(b"4bit_u8", np.uint8),
        **{name: np.array(n, np.int32) for name, n in (("nbits", 4), ("group_size", group), ("axis", 1))},
        "compute_dtype": np.frombuffer(b"torch.float16", np.uint8),
        "view_as_float": np.array(0, np.uint8),
        "encoded_state_dict": np.array(1, np.uint8),
    }


_CT = {"quant_method": "compressed-tensors"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FORMATS: dict[str, Format] = {
    "gptq": Format(_GPTQ | {"sym": True, "desc_act": False}, gptq),
    "gptq-asymmetric": Format(_GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq_asymmetric),
    "gptq-act-order": Format(_GPTQ | {"sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq_act_order),
    "awq": Format(_AWQ | {"version": "gemm"}, awq),
    "awq-gemv": Format(_AWQ | {"version": "gemv"}, awq_gemv),
    "w4a16": Format(_CT, w4a16),
    "w4a16-asymmetric": Format(_CT, w4a16_asymmetric),
    "w4a16-act-order": Format(_CT, w4a16_act_order),
    "w8a8": Format(_CT, w8a8),
    "fp8": Format(_CT, fp8_rows),
    "fp8-blocks": Format({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "nvfp4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "mxfp4": Format(_CT, mxfp4),
    "mxfp8": Format(_CT, mxfp8),
    "bnb-fp4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, bnb_fp4),
    "nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "nf4-nested": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4_nested),
    "llm-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "mlx-4": Format({"bits": 4, "group_size": 64}, mlx(4), "quantization", True),
    "mlx-8": Format({"bits": 8, "group_size": 64}, mlx(8), "quantization", True),
    "hqq": Format({"quant_method": "hqq"}, hqq),
}


def assert_same_packed(source: WeightSource, name: str, roundings: int = 1) -> None:
    """The blocks that the kernels get have the values of the package, up to its roundings to bfloat16, and NF4 up to
    2^-14 of the largest of a block."""
    info = source.info(name)
    if info.dtype not in GGMLType.__members__ or GGMLType[info.dtype].is_plain:
        return
    values = source.array(name).astype(np.float32)
    packed = dequantize(source.raw(name), GGMLType[info.dtype], tuple(info.shape))
    if info.inputs is not None and info.inputs.order is not None:
        packed = packed[:, np.argsort(info.inputs.order)]
    slack = 2.0**-14 * np.abs(values).max(1, keepdims=True) if info.dtype == "NF4" else 0
    most = roundings * 2.0**-8 * np.abs(values) + slack + 1e-6 * np.abs(values).max()
    assert (np.abs(packed - values) <= most).all(), name


def write(folder: Path, config: dict[str, Any], tensors: Tensors, name: str) -> Path:
    """A model in a published format: the matrices of its layers are encoded, if they are whole
    groups of 128; the rest is bfloat16. tensors: float32, by
    their names in the checkpoint."""
    chosen, stored = FORMATS[name], {}
    for tensor, values in tensors.items():
        stem = tensor.removesuffix(".weight")
        if values.ndim == 2 and values.shape[1] % 128 == 0 and (stem.endswith("_proj") or chosen.embeds):
            stored |= {f"{stem}.{kind}": np.ascontiguousarray(part) for kind, part in chosen.encode(values).items()}
        else:
            stored[tensor] = values.astype(BF16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, chosen.field: chosen.settings}))
    save_file(stored, folder / "model.safetensors")
    return folder
