"""GPTQ and AWQ: integers in 32-bit words with float16 scales, stored as [inputs, outputs].

    GPTQ  qweight [in bits / 32, out], along the inputs; qzeros [groups, out bits / 32]; scales [groups, out];
          g_idx [in]: the group of each input
    AWQ   qweight [in, out bits / 32], along the outputs in the order of `_AWQ_ORDER`; qzeros and scales as above.
          Version gemv: qweight [out, in bits / 32], qzeros [out, groups bits / 32 or more], scales [out, groups or
          more], in order
    Marlin   B [in / 16, 2 out]: tiles of 16 by 16 in the order of `_marlin_order`, 4 bits with zero 8; s [groups, out]

A value is (code - zero) * scale. Codes, zeros and scales become INT4_ZP or INT8_ZP, or code - zero and scale GGML's
Q4_0 or Q8_0; where the inputs of a group are not adjacent (GPTQ with activation order), in the order of the groups.
Groups of other sizes than those of the formats are decoded, and their values rounded to float16. GPTQ's first version
stores zeros minus 1. Sources: AutoGPTQ and GPTQModel (`qlinear`); AutoAWQ (`packing_utils`, `WQLinear_GEMV`); Marlin
(Frantar et al. 2024; `Layer.pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kvasir.quant.inputs import Inputs
from kvasir.weights.published.codes import (
    OWN_GROUP,
    exact_halves,
    group_order,
    to_own_blocks,
    to_q4_0_blocks,
    to_q8_0_blocks,
    unpacked,
)
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

_GROUP = 32  # of GGML's blocks
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight columns


def read_gptq(source: WeightSource, bits: int | None, old: bool) -> Iterator[Decoded]:
    """All matrices of a GPTQ checkpoint. bits: None if they differ; the tensors' shapes tell. old: whether zeros are
    stored minus 1 (`checkpoint_format` "gptq")."""
    for stored in stems(source, "qweight"):
        yield _gptq(stored, bits or _bits(stored), old)


def _bits(stored: Stored) -> int:
    """Of a zero point: those of a row of them by their number."""
    outputs, words = _shape(stored, "qweight")[1], _shape(stored, "qzeros")[1] if "qzeros" in stored else 0
    if words * 32 % outputs or words * 32 // outputs not in (2, 3, 4, 8):
        stored.refuse(f"qzeros has {words} columns for {outputs} outputs", "expected 2, 3, 4 or 8 bits for each")
    return words * 32 // outputs


def _gptq(stored: Stored, bits: int, old: bool) -> Decoded:
    words, outputs = _shape(stored, "qweight")
    if words * 32 % bits:
        stored.refuse(f"qweight has {words} rows", f"expected whole values of {bits} bits")
    return _decoded(stored, words * 32 // bits, outputs, bits, partial(_gptq_codes, stored, bits), partial(
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


def read_awq_gemv(source: WeightSource, group: int) -> Iterator[Decoded]:
    """All matrices of an AWQ checkpoint of version "gemv", in 4 bits. group: inputs per scale, -1 for all."""
    for stored in stems(source, "qweight"):
        outputs, words = _shape(stored, "qweight")
        inputs, size = 8 * words, group if group > 0 else 8 * words
        for kind in ("scales", "qzeros"):
            if kind not in stored or len(stored.info(kind).shape) != 2 or stored.info(kind).shape[0] != outputs:
                stored.refuse(f"{kind} is missing or has another number of rows", f"expected {outputs} rows")
        groups = inputs // size
        if inputs % size or stored.info("scales").shape[1] < groups or stored.info("qzeros").shape[1] * 8 < groups:
            stored.refuse(f"scales has shape {list(stored.info('scales').shape)}", f"expected groups of {size}")
        yield _gemv(stored, (outputs, inputs), size)


def _gemv(stored: Stored, shape: tuple[int, int], group: int) -> Decoded:
    groups = shape[1] // group

    def codes() -> np.ndarray:
        return unpacked(stored.array("qweight"), 4)

    def zeros() -> np.ndarray:
        return unpacked(stored.array("qzeros"), 4)[:, :groups]

    def scales() -> np.ndarray:
        return stored.array("scales")[:, :groups]

    return _by_rows(stored, ("qweight", "qzeros", "scales"), shape, codes, scales, zeros)


def read_marlin(source: WeightSource) -> Iterator[Decoded]:
    """All matrices of a checkpoint in Marlin's order: 4 bits, symmetric."""
    for stored in stems(source, "B"):
        tiles, words = _shape(stored, "B")
        inputs, outputs = 16 * tiles, words // 2
        scales = tuple(stored.info("s").shape) if "s" in stored else ()
        if words % 128 or len(scales) != 2 or scales[1] != outputs or not scales[0] or inputs % scales[0]:
            stored.refuse(f"B has shape {[tiles, words]}, s {list(scales)}", "expected whole tiles and groups")
        yield _marlin(stored, (outputs, inputs), scales[0])


def _marlin(stored: Stored, shape: tuple[int, int], groups: int) -> Decoded:
    outputs, inputs = shape

    def codes() -> np.ndarray:
        stored_codes = unpacked(stored.array("B"), 4).reshape(-1, 1024)
        ordered = np.empty_like(stored_codes)
        ordered[:, _marlin_order()] = stored_codes
        tiles = ordered.reshape(inputs // 16, outputs // 16, 16, 16)
        return np.ascontiguousarray(tiles.swapaxes(1, 2).reshape(inputs, outputs).T)

    def scales() -> np.ndarray:
        order = np.arange(64).reshape(8, 8).T.reshape(-1)
        if groups == 1:
            steps = (0, 1, 8, 9, 16, 17, 24, 25)
            order = np.array([2 * first + step for first in range(4) for step in steps])
        found = stored.array("s").reshape(-1, len(order))
        ordered = np.empty_like(found)
        ordered[:, order] = found
        return ordered.reshape(groups, outputs).T

    return _by_rows(stored, ("B", "s"), shape, codes, scales, None)


def _marlin_order() -> np.ndarray:
    """The place in four tiles of 16 by 16 of each of 1024 codes, as the tensor cores' threads read them."""
    order = []
    for thread in range(32):
        pair = 2 * (thread % 4)
        places = [16 * row + thread // 4 + 8 * half for half in (0, 1) for row in (pair, pair + 1, pair + 8, pair + 9)]
        order += [place + 256 * tile for tile in range(4) for place in places]
    return np.array(order).reshape(-1, 8)[:, (0, 2, 4, 6, 1, 3, 5, 7)].reshape(-1)


def _by_rows(
    stored: Stored,
    kinds: tuple[str, ...],
    shape: tuple[int, int],
    codes: Callable[[], np.ndarray],
    scales: Callable[[], np.ndarray],
    zeros: Callable[[], np.ndarray] | None,
) -> Decoded:
    """A matrix of 4 bits. codes: uint8 [out, in]. scales and zeros: [out, groups]; without zeros, they are 8."""
    parts = tuple(f"{stored.stem}.{kind}" for kind in kinds)
    group = shape[1] // scales().shape[1]

    def halves(of: int) -> np.ndarray:
        return scales().astype(np.float16).repeat(group // of, 1)

    def blocks() -> np.ndarray:
        if zeros is None:
            return to_q4_0_blocks(codes(), halves(_GROUP))
        each = zeros().astype(np.float16).repeat(group // OWN_GROUP, 1)
        return to_own_blocks("INT4_ZP", codes(), d=halves(OWN_GROUP), zero=each)

    def values() -> np.ndarray:
        middle = np.full((1, 1), 8, np.uint8) if zeros is None else zeros().repeat(group, 1)
        numbers = codes().astype(np.float32) - middle
        return (numbers * scales().astype(np.float32).repeat(group, 1)).astype(np.float16)

    is_half = exact_halves(scales()) is not None
    if is_half and group % (_GROUP if zeros is None else OWN_GROUP) == 0:
        return Decoded(f"{stored.stem}.weight", shape, "Q4_0" if zeros is None else "INT4_ZP", parts, blocks)
    return Decoded(f"{stored.stem}.weight", shape, "F16", parts, values)


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

    def values() -> np.ndarray:
        return _values(stored, codes(), zeros(), index)

    order = group_order(index, scales[0])
    if order is None or group % _GROUP or exact_halves(stored.array("scales")) is None:
        return Decoded(name, shape, "F16", parts, values)
    sorted_codes, of_column = codes, index
    if is_ordered := not np.array_equal(order, np.arange(inputs)):
        of_column = index[order]

        def sorted_codes() -> np.ndarray:
            return np.ascontiguousarray(codes()[:, order])

    def packed(kind: str, blocks: Callable[[], np.ndarray]) -> Decoded:
        if not is_ordered:
            return Decoded(name, shape, kind, parts, blocks)
        return Decoded(name, shape, kind, parts, blocks, values, Inputs(order=order))

    middle = bool((zeros() == 1 << bits - 1).all())

    def halves(of: int = _GROUP) -> np.ndarray:
        return stored.array("scales").T.astype(np.float16).repeat(group // of, 1)

    def with_zeros() -> np.ndarray:
        each = zeros().astype(np.float16).repeat(group // OWN_GROUP, 1)
        return to_own_blocks(f"INT{4 if bits < 8 else 8}_ZP", sorted_codes(), d=halves(OWN_GROUP), zero=each)

    def q8_0() -> np.ndarray:
        return to_q8_0_blocks(sorted_codes().astype(np.int16) - zeros()[:, of_column], halves())

    if bits == 4 and middle:
        return packed("Q4_0", lambda: to_q4_0_blocks(np.ascontiguousarray(sorted_codes()), halves()))
    if group % OWN_GROUP == 0 and (bits < 8 or not middle):
        return packed(f"INT{4 if bits < 8 else 8}_ZP", with_zeros)
    if bits < 8 or middle:
        return packed("Q8_0", q8_0)
    return Decoded(name, shape, "F16", parts, values)


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
