"""GPTQ and AWQ: integers in 32-bit words with float16 scales, stored as [inputs, outputs].

    GPTQ  qweight [in bits / 32, out], along the inputs; qzeros [groups, out bits / 32]; scales [groups, out];
          g_idx [in]: the group of each input
    AWQ   qweight [in, out bits / 32], along the outputs in the order of `_AWQ_ORDER`; qzeros and scales as above

A value is (code - zero) * scale. Where the inputs of a group are adjacent, codes, zeros and scales become INT4_ZP or
INT8_ZP, or code - zero and scale GGML's Q4_0 or Q8_0, else the values are rounded to float16. GPTQ's first version stores zeros minus 1. Sources: AutoGPTQ and
GPTQModel (`qlinear`); AutoAWQ (`packing_utils`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kvasir.weights.published.codes import (
    OWN_GROUP,
    exact_halves,
    to_own_blocks,
    to_q4_0_blocks,
    to_q8_0_blocks,
    unpacked,
)
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

_GROUP = 32  # of GGML's blocks
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight columns


def read_gptq(source: WeightSource, bits: int, old: bool) -> Iterator[Decoded]:
    """All matrices of a GPTQ checkpoint. old: whether zeros are stored minus 1 (`checkpoint_format` "gptq")."""
    for stored in stems(source, "qweight"):
        words, outputs = _shape(stored, "qweight")
        if words * 32 % bits:
            stored.refuse(f"qweight has {words} rows", f"expected whole values of {bits} bits")
        yield _decoded(stored, words * 32 // bits, outputs, bits, partial(_gptq_codes, stored, bits), partial(
            _gptq_zeros, stored, bits, old
        ))  # fmt: skip


def _gptq_codes(stored: Stored, bits: int) -> np.ndarray:
    return unpacked(stored.array("qweight").T, bits)


def _gptq_zeros(stored: Stored, bits: int, old: bool) -> np.ndarray:
    groups, outputs = stored.info("scales").shape
    zeros = unpacked(stored.array("qzeros", (groups, -(-outputs * bits // 32))), bits)[:, :outputs].astype(np.int16)
    return (zeros + 1 & (1 << bits) - 1 if old else zeros).T


def read_awq(source: WeightSource) -> Iterator[Decoded]:
    """All matrices of an AWQ checkpoint of version "gemm", in 4 bits."""
    for stored in stems(source, "qweight"):
        inputs, words = _shape(stored, "qweight")
        shape = inputs, words
        yield _decoded(stored, inputs, 8 * words, 4, partial(_awq_codes, stored, "qweight", shape), partial(
            _awq_codes, stored, "qzeros", (stored.info("scales").shape[0] if "scales" in stored else 0, words)
        ))  # fmt: skip


def _awq_codes(stored: Stored, kind: str, shape: tuple[int, int]) -> np.ndarray:
    return _in_order(stored.array(kind, shape)).T


def _in_order(words: np.ndarray) -> np.ndarray:
    return unpacked(words, 4).reshape(len(words), -1, 8)[..., _AWQ_ORDER].reshape(len(words), -1)


def _shape(stored: Stored, kind: str) -> tuple[int, int]:
    info = stored.info(kind)
    if len(info.shape) != 2 or not all(info.shape) or info.dtype not in ("I32", "U32"):
        stored.refuse(f"{kind} is {info.dtype} {list(info.shape)}", "expected a matrix of I32")
    return info.shape[0], info.shape[1]


def _decoded(
    stored: Stored,
    inputs: int,
    outputs: int,
    bits: int,
    codes: Callable[[], np.ndarray],
    zeros: Callable[[], np.ndarray],
) -> Decoded:
    """codes: uint8 [out, in]. zeros: [out, groups]."""
    for kind in ("scales", "qzeros"):
        if kind not in stored:
            stored.refuse(f"there is no tensor {kind}", "is the download complete?")
    scales = stored.info("scales").shape
    if len(scales) != 2 or scales[1] != outputs or not 0 < scales[0] <= inputs:
        stored.refuse(f"scales has shape {list(scales)}", f"expected [groups, {outputs}]")
    parts = tuple(f"{stored.stem}.{kind}" for kind in ("qweight", "qzeros", "scales", "g_idx") if kind in stored)
    name, shape, index = f"{stored.stem}.weight", (outputs, inputs), _groups(stored, inputs, scales[0])
    group = inputs // scales[0]
    whole = group % _GROUP == 0 and np.array_equal(index, np.arange(inputs) // group)
    if not whole or exact_halves(stored.array("scales")) is None:
        return Decoded(name, shape, "F16", parts, lambda: _values(stored, codes(), zeros(), index))
    middle = bool((zeros() == 1 << bits - 1).all())

    def halves(of: int = _GROUP) -> np.ndarray:
        return stored.array("scales").T.astype(np.float16).repeat(group // of, 1)

    def with_zeros() -> np.ndarray:
        each = zeros().astype(np.float16).repeat(group // OWN_GROUP, 1)
        return to_own_blocks(f"INT{4 if bits < 8 else 8}_ZP", codes(), d=halves(OWN_GROUP), zero=each)

    def q8_0() -> np.ndarray:
        return to_q8_0_blocks(codes().astype(np.int16) - zeros()[:, index], halves())

    if bits == 4 and middle:
        return Decoded(name, shape, "Q4_0", parts, lambda: to_q4_0_blocks(np.ascontiguousarray(codes()), halves()))
    if group % OWN_GROUP == 0 and (bits < 8 or not middle):
        return Decoded(name, shape, f"INT{4 if bits < 8 else 8}_ZP", parts, with_zeros)
    if bits < 8 or middle:
        return Decoded(name, shape, "Q8_0", parts, q8_0)
    return Decoded(name, shape, "F16", parts, lambda: _values(stored, codes(), zeros(), index))


def _groups(stored: Stored, inputs: int, groups: int) -> np.ndarray:
    """The group of each input."""
    if "g_idx" not in stored:
        return np.arange(inputs) // -(-inputs // groups)
    index = stored.array("g_idx", (inputs,)).astype(np.int64)
    if ((index < 0) | (index >= groups)).any():
        stored.refuse("g_idx names groups that have no scales", f"there are {groups}")
    return index


def _values(stored: Stored, codes: np.ndarray, zeros: np.ndarray, index: np.ndarray) -> np.ndarray:
    scales = stored.array("scales").T.astype(np.float32)
    return ((codes.astype(np.float32) - zeros[:, index]) * scales[:, index]).astype(np.float16)
