"""Writes GGUF files with random weights, tensor by tensor and in chunks, so that memory stays small.

Quantized weights are drawn as blocks, not rounded from floats: every level is equally likely, and the scales are such
that the weights have mean 0 and the tensor's standard deviation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.quant.gguf_types import GGMLType

CHUNK = 1 << 22  # weights
Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Tensor:
    """shape: rows before columns, as in a checkpoint. spread: the standard deviation of random weights. draw: gives the
    float32 values of a tensor that is not simply random."""

    name: str
    shape: tuple[int, ...]
    spread: float = 0.0
    draw: Draw | None = None

    @property
    def quantizable(self) -> bool:
        """Whether llama.cpp's quantizer would round it: matrices, but no tables of positions and routers."""
        kept = ("ffn_gate_inp", "per_layer_model_proj", "position_embd", "token_types", "_norm")
        return self.draw is None and len(self.shape) > 1 and not any(part in self.name for part in kept)


def matrix(name: str, *shape: int, gain: float = 1.0) -> Tensor:
    """A weight whose products with rows of variance 1 have the standard deviation `gain`."""
    return Tensor(f"{name}.weight", shape, gain * shape[-1] ** -0.5)


def norm(name: str, width: int, bias: bool = False, scale: float = 1.0) -> list[Tensor]:
    """A norm's weight near `scale`, and its bias."""
    weight = Tensor(f"{name}.weight", (width,), draw=lambda random, n: scale * (1 + 0.1 * random.standard_normal(n)))
    return [weight, *([vector(f"{name}.bias", width)] if bias else [])]


def vector(name: str, *shape: int, spread: float = 0.1) -> Tensor:
    return Tensor(name, shape, draw=lambda random, n: spread * random.standard_normal(n))


# --- which type each tensor has ----------------------------------------------------------------------


def kinds(tensors: Sequence[Tensor], kind: str, layers: int) -> list[GGMLType]:
    """The type of each tensor in a file of this kind: Q4_K_M and Q8_0 as llama.cpp's quantizer mixes them, MXFP4 as it
    is published for gpt-oss (experts in MXFP4, other matrices in Q8_0), or F32, F16, BF16."""
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    values = sum(_like_values(tensor.name) for tensor in tensors)
    found, seen = [], 0
    for tensor in tensors:
        if not tensor.quantizable:
            found.append(GGMLType.F32)
            continue
        if kind == "Q4_K_M":
            found.append(_fitting(tensor, _mixed(tensor.name, tied, seen, values, layers)))
        elif kind == "MXFP4":
            found.append(GGMLType.MXFP4 if "_exps" in tensor.name else GGMLType.Q8_0)
        else:
            found.append(GGMLType[kind])
        seen += _like_values(tensor.name)
    return found


def _like_values(name: str) -> bool:
    return any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"))


def _mixed(name: str, tied: bool, seen: int, values: int, layers: int) -> GGMLType:
    """Q4_K_M: six bits for the output matrix, and in some layers for the values and the MLPs' last matrix."""
    if name == "output.weight" or (tied and "token_embd.weight" in name):
        return GGMLType.Q6_K
    if _like_values(name):
        return GGMLType.Q6_K if _more_bits(seen, values) else GGMLType.Q4_K
    if "ffn_down" in name:
        return GGMLType.Q6_K if _more_bits(int(name.split(".")[1]), layers) else GGMLType.Q4_K
    return GGMLType.Q4_K


def _more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _fitting(tensor: Tensor, kind: GGMLType) -> GGMLType:
    """The type with blocks of 32 for rows that do not consist of whole blocks of 256."""
    if tensor.shape[-1] % kind.block_size == 0:
        return kind
    return {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q6_K: GGMLType.Q8_0}[kind]


# --- random blocks ------------------------------------------------------------------------------------


def blocks(kind: GGMLType, count: int, spread: float, random: np.random.Generator) -> np.ndarray:
    """`count` random blocks with the layout of the type, whose weights have mean 0 and this standard deviation."""
    found = np.frombuffer(random.bytes(count * kind.type_size), kind.layout).copy()
    _SCALED[kind](found, spread, random)
    return found


def _f32(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    found[:] = spread * random.standard_normal(len(found), np.float32)


def _bf16(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    numbers = spread * random.standard_normal(len(found), np.float32)
    found[:] = numbers.astype(np.float32).view(np.uint32) >> 16


def _q8_0(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    found["qs"] = np.maximum(found["qs"], -127)
    found["d"] = spread / _deviation(255)


def _q5_0(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    """The levels -16 to 15, whose mean of -0.5 vanishes over scales of both signs."""
    found["d"] = spread / _deviation(32) * _signs(found["d"].shape, random)


def _q4_k(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    """Levels 0 to 15, less 7.5 of the scale: scales and minima have the same six bits."""
    found["scales"], squares = _six_bits(len(found), random)
    found["d"] = spread / (squares**0.5 * _deviation(16))
    found["dmin"] = 7.5 * found["d"].astype(np.float32)


def _q6_k(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    scales = random.integers(32, 64, found["scales"].shape)
    found["scales"] = scales * _signs(scales.shape, random)
    found["d"] = spread / ((scales**2).mean() ** 0.5 * _deviation(64))


def _mxfp4(found: np.ndarray, spread: float, random: np.random.Generator) -> None:
    """The nearest power of two: ± 0, 0.5, 1, 1.5, 2, 3, 4, 6 have the mean square 8.5625."""
    found["e"] = 127 + round(float(np.log2(spread / 8.5625**0.5)))


def _six_bits(count: int, random: np.random.Generator) -> tuple[np.ndarray, float]:
    """Packed scales of 32 to 63 with equal minima, uint8 [count, 12], and the mean of their squares."""
    scales = random.integers(32, 64, (count, 8), np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    first = low | (high >> 4) << 6
    last = (high & 15) | (high & 15) << 4
    return np.concatenate([first, first, last], axis=1), float((scales.astype(np.float64) ** 2).mean())


def _deviation(levels: int) -> float:
    """The standard deviation of equally likely consecutive integers."""
    return ((levels**2 - 1) / 12) ** 0.5


def _signs(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 2, shape, np.int8) * 2 - 1


_SCALED: dict[GGMLType, Callable[[np.ndarray, float, np.random.Generator], None]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f32,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.MXFP4: _mxfp4,
}


# --- the file -----------------------------------------------------------------------------------------


Contents = Callable[[Tensor, GGMLType], Iterable[np.ndarray]]


def write(path: Path, architecture: str, add: Callable[[Any], None], tensors: Sequence[Tensor], kind: str,
          layers: int, contents: Contents | None = None) -> None:  # fmt: skip
    """Writes a model. add: writes its metadata to a GGUFWriter. contents: the blocks of a tensor in parts; random ones,
    which depend on the tensor's name only, without it."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    types = kinds(tensors, kind, layers)
    for tensor, ggml_type in zip(tensors, types, strict=True):
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), _bytes(tensor, ggml_type),
            gguf.GGMLQuantizationType(int(ggml_type)),
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    for tensor, ggml_type in zip(tensors, types, strict=True):
        writer.write_padding(file, file.tell())
        for chunk in (contents or chunks)(tensor, ggml_type):
            chunk.tofile(file)
        writer.write_padding(file, _bytes(tensor, ggml_type))
    writer.close()


def chunks(tensor: Tensor, kind: GGMLType) -> Iterable[np.ndarray]:
    """The tensor's blocks, a few million weights at a time."""
    random = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    count = prod(tensor.shape)
    if tensor.draw is not None:
        yield np.asarray(tensor.draw(random, count), np.float32)
        return
    step = CHUNK // kind.block_size
    for start in range(0, count // kind.block_size, step):
        yield blocks(kind, min(step, count // kind.block_size - start), tensor.spread, random)


def _bytes(tensor: Tensor, kind: GGMLType) -> int:
    return prod(tensor.shape) // kind.block_size * kind.type_size
