"""bitsandbytes: NF4 and FP4 with scales of blocks of the flat matrix, and int8 with scales of rows.

    4 bits  weight U8 [n / 2, 1], the high nibble first; weight.quant_map F32 [16]; weight.absmax of each block, U8 with
            weight.nested_absmax and weight.nested_quant_map if the scales are quantized, too;
            weight.quant_state.bitsandbytes__nf4: a JSON object in U8
    8 bits  weight I8 [rows, cols]; SCB F32 [rows]: the greatest magnitudes. Rows become int8 but for their outliers
            (LLM.int8, arXiv:2208.07339)

Source: the package's `functional.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from kvasir.errors import ModelFileError
from kvasir.quant.blocks_own import NF4, NF4_UNIT
from kvasir.quant.inputs import Inputs
from kvasir.weights.published.codes import OWN_GROUP, to_own_blocks
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

DROPPED = r".*\.weight_format"
_STATE = "weight.quant_state.bitsandbytes__"
_DTYPES = {"bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16), "float32": ("F32", np.float32)}
_MOST = 1 << 31  # values of a matrix


def read(source: WeightSource, threshold: float = 6.0) -> Iterator[Decoded]:
    """All quantized matrices of a checkpoint. threshold: the least magnitude of an outlier of LLM.int8; 0: there are
    none."""
    for stored in stems(source, "SCB"):
        yield _int8(stored, Inputs("outliers", threshold))
    for kind in ("nf4", "fp4"):
        for name in source.names():
            if name.endswith(_STATE + kind):
                yield _four_bits(source, name.removesuffix("." + _STATE + kind), name)


def _int8(stored: Stored, inputs: Inputs) -> Decoded:
    info = stored.info("weight") if "weight" in stored else None
    if info is None or len(info.shape) != 2 or info.dtype != "I8":
        stored.refuse("there is no matrix of I8", "is the download complete?")
    rows, cols = info.shape

    def compute() -> np.ndarray:
        scales = stored.array("SCB", (rows,)).astype(np.float32)[:, None]
        return (stored.array("weight").astype(np.float32) * scales * np.float32(1 / 127)).astype(ml_dtypes.bfloat16)

    def blocks() -> np.ndarray:
        scales = stored.array("SCB", (rows,)).astype(np.float32)[:, None] * np.float32(1 / 127)
        return to_own_blocks("INT8", stored.array("weight").view(np.uint8) ^ 128, d=scales)

    name, parts = f"{stored.stem}.weight", (f"{stored.stem}.weight", f"{stored.stem}.SCB")
    if cols % OWN_GROUP == 0:
        return Decoded(name, (rows, cols), "INT8", parts, blocks, compute, inputs)
    return Decoded(name, (rows, cols), "BF16", parts, compute)


def _four_bits(source: WeightSource, stem: str, state: str) -> Decoded:
    settings = _settings(source, state)
    stored = Stored(source, stem, frozenset(source.names()))
    rows, cols = settings["shape"]
    dtype, kind = _DTYPES[settings["dtype"]]
    kinds = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
    parts = (*(f"{stem}.{kind}" for kind in kinds if kind in stored), state)

    count, block = rows * cols, settings["blocksize"]

    def all_codes() -> np.ndarray:
        data = source.raw(f"{stem}.weight")  # bytes; a file may name another type (`bnb_4bit_quant_storage`)
        if len(data) != -(-count // 2):
            stored.refuse(f"weight has {len(data)} bytes", f"expected {-(-count // 2)} for {[rows, cols]}")
        return np.stack((data >> 4, data & 15), axis=-1).reshape(-1)[:count]

    def blocks() -> np.ndarray:
        scales = _scales(stored, settings, -(-count // block)) * NF4_UNIT
        each = scales.repeat(block // OWN_GROUP)[: count // OWN_GROUP].reshape(rows, -1)
        return to_own_blocks("NF4", all_codes().reshape(rows, cols), d=each)

    def compute() -> np.ndarray:
        codes, scales = all_codes(), _scales(stored, settings, -(-count // block))
        values = stored.array("weight.quant_map", (16,)).astype(np.float32)[codes]
        return (values * scales.repeat(block)[:count]).astype(kind).reshape(rows, cols)

    name = f"{stem}.weight"
    if _is_nf4(stored) and cols % OWN_GROUP == 0 and block % OWN_GROUP == 0:
        return Decoded(name, (rows, cols), "NF4", parts, blocks, compute)
    return Decoded(name, (rows, cols), dtype, parts, compute)


def _is_nf4(stored: Stored) -> bool:
    return "weight.quant_map" in stored and np.array_equal(stored.array("weight.quant_map", (16,)), NF4)


def _scales(stored: Stored, settings: dict[str, Any], count: int) -> np.ndarray:
    scales = stored.array("weight.absmax", (count,))
    if "weight.nested_absmax" not in stored:
        return scales.astype(np.float32)
    block = settings["nested_blocksize"]
    nested = stored.array("weight.nested_absmax", (-(-count // block),)).astype(np.float32)
    values = stored.array("weight.nested_quant_map", (256,)).astype(np.float32)[scales]
    return values * nested.repeat(block)[:count] + np.float32(settings["nested_offset"])


def _settings(source: WeightSource, state: str) -> dict[str, Any]:
    """The JSON object of a matrix, checked. Raises ModelFileError."""
    try:
        found = json.loads(bytes(source.array(state).astype(np.uint8)))
    except ValueError as error:
        raise ModelFileError(f"tensor {state} is not a JSON object: {error}") from error
    numbers = [name for name in ("blocksize", "nested_blocksize") if name == "blocksize" or name in found]
    shape = found.get("shape") if isinstance(found, dict) else None
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(n) is int and n > 0 for n in shape)
        or math.prod(shape) > _MOST
        or found.get("dtype") not in _DTYPES
        or not all(type(found.get(name)) is int and 1 <= found[name] <= 4096 for name in numbers)
        or not isinstance(found.get("nested_offset", 0.0), int | float)
    ):
        raise ModelFileError(f"tensor {state} holds unexpected settings", "is the file damaged?")
    return {"nested_blocksize": 256, "nested_offset": 0.0, **found}
