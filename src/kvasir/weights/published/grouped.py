"""GPTQ and AWQ: integers in 32-bit words with float16 scales, stored as [inputs, outputs].

    GPTQ  qweight [in bits / 32, out], along the inputs; qzeros [groups, out bits / 32]; scales [groups, out];
          g_idx [in]: the group of each input
    AWQ   qweight [in, out bits / 32], along the outputs in the order of `_AWQ_ORDER`; qzeros and scales as above

A value is (code - zero) * scale, rounded to float16. GPTQ's first version stores zeros minus 1. Sources: AutoGPTQ and
GPTQModel (`qlinear`); AutoAWQ (`packing_utils`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvasir.weights.published.codes import unpacked
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight columns


def read_gptq(source: WeightSource, bits: int, old: bool) -> Iterator[Decoded]:
    """All matrices of a GPTQ checkpoint. old: whether zeros are stored minus 1 (`checkpoint_format` "gptq")."""
    for stored in stems(source, "qweight"):
        words, outputs = _shape(stored, "qweight")
        inputs = words * 32 // bits
        if words * 32 % bits:
            stored.refuse(f"qweight has {words} rows", f"expected whole values of {bits} bits")
        yield _decoded(stored, inputs, outputs, lambda s=stored, n=inputs, o=outputs: _gptq(s, bits, old, n, o))


def _gptq(stored: Stored, bits: int, old: bool, inputs: int, outputs: int) -> np.ndarray:
    codes = unpacked(stored.array("qweight").T, bits)[:, :inputs]  # [out, in]
    scales = stored.array("scales").astype(np.float32)
    groups, width = len(scales), -(-outputs * bits // 32)
    zeros = unpacked(stored.array("qzeros", (groups, width)), bits)[:, :outputs].astype(np.int32)
    if old:
        zeros = zeros + 1 & (1 << bits) - 1
    index = np.arange(inputs) // -(-inputs // groups)
    if "g_idx" in stored:
        index = stored.array("g_idx", (inputs,)).astype(np.int64)
        if ((index < 0) | (index >= groups)).any():
            stored.refuse("g_idx names groups that have no scales", f"there are {groups}")
    values = codes.astype(np.float32) - zeros.T[:, index]
    return (values * scales.T[:, index]).astype(np.float16)


def read_awq(source: WeightSource) -> Iterator[Decoded]:
    """All matrices of an AWQ checkpoint of version "gemm", in 4 bits."""
    for stored in stems(source, "qweight"):
        inputs, words = _shape(stored, "qweight")
        yield _decoded(stored, inputs, 8 * words, lambda s=stored, n=inputs, w=words: _awq(s, n, w))


def _awq(stored: Stored, inputs: int, words: int) -> np.ndarray:
    scales = stored.array("scales").astype(np.float32)
    groups = len(scales)
    if inputs % groups:
        stored.refuse(f"{inputs} inputs cannot be divided into {groups} groups", "is group_size of another matrix?")
    codes, zeros = (_in_order(words) for words in (stored.array("qweight"), stored.array("qzeros", (groups, words))))
    each = inputs // groups
    values = (codes.astype(np.float32) - zeros.repeat(each, 0)) * scales.repeat(each, 0)
    return np.ascontiguousarray(values.astype(np.float16).T)


def _in_order(words: np.ndarray) -> np.ndarray:
    return unpacked(words, 4).reshape(len(words), -1, 8)[..., _AWQ_ORDER].reshape(len(words), -1)


def _shape(stored: Stored, kind: str) -> tuple[int, int]:
    info = stored.info(kind)
    if len(info.shape) != 2 or not all(info.shape) or info.dtype not in ("I32", "U32"):
        stored.refuse(f"{kind} is {info.dtype} {list(info.shape)}", "expected a matrix of I32")
    return info.shape[0], info.shape[1]


def _decoded(stored: Stored, inputs: int, outputs: int, compute: Callable[[], np.ndarray]) -> Decoded:
    for kind in ("scales", "qzeros"):
        if kind not in stored:
            stored.refuse(f"there is no tensor {kind}", "is the download complete?")
    scales = stored.info("scales").shape
    if len(scales) != 2 or scales[1] != outputs or not scales[0]:
        stored.refuse(f"scales has shape {list(scales)}", f"expected [groups, {outputs}]")
    parts = tuple(f"{stored.stem}.{kind}" for kind in ("qweight", "qzeros", "scales", "g_idx") if kind in stored)
    return Decoded(f"{stored.stem}.weight", (outputs, inputs), "F16", parts, compute)
