"""The C structures of RWKV-7 (csrc/wkv.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from math import prod
from typing import Any, cast

import numpy as np

from kvasir.caches import State
from kvasir.layers.pages import paged
from kvasir.ops.graph import CannotTrace
from kvasir.program.cache import NativeCache
from kvasir.program.scans import InputRows

MAX_WKV_DIM, MAX_MIXES = 256, 6


class ShiftArgs(ctypes.Structure):
    """The operands of a token shift."""

    _fields_ = (
        ("rows", InputRows),
        ("width", c_int64),
        ("count", c_int32),
        ("reserved", c_int32),
        ("x", c_void_p),
        ("mix", c_void_p),
        ("out", c_void_p * MAX_MIXES),
        ("pieces", c_void_p),
        ("num_pieces", c_int64),
    )


class WkvArgs(ctypes.Structure):
    """The operands of the rule of RWKV-7."""

    _fields_ = (
        ("rows", InputRows),
        ("heads", c_int32),
        ("dim", c_int32),
        ("eps", c_float),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("states", *"rwkva", "k_k", "k_a", "r_k", "weight", "bias", "out", "pieces")),
        ("num_pieces", c_int64),
    )


def _input_rows(cache: NativeCache, layer: int) -> InputRows:
    array, kind = cache.arrays(layer)[0][0], cast(State, cache.spec[layer])
    assert kind.before == 1
    size = prod(kind.state)
    assert array.shape[1] == size + (1 + cache.block_size) * kind.inputs
    return InputRows(
        array.ctypes.data, array.shape[1], size, kind.inputs, 2, cache.block_size, cache.group_of(layer), 0
    )


def shift_args(
    cache: NativeCache, inputs: Sequence[Any], rows: Sequence[int], vector: Callable[[Any], int]
) -> ShiftArgs:
    """rows: addresses of the results and of x. vector: the address of an array's values. Raises CannotTrace for more
    mixes than the kernel has room for."""
    x, mix_MD, cached, _ = inputs
    *outs, x_rows = rows
    if len(outs) > MAX_MIXES:
        raise CannotTrace(f"no kernel for a token shift with {len(outs)} mixes")
    kept = _input_rows(cache, cached.layer)
    return ShiftArgs(kept, x.width, len(outs), 0, x_rows, vector(mix_MD), (c_void_p * MAX_MIXES)(*outs))


def wkv_args(
    cache: NativeCache, inputs: Sequence[Any], rows: Sequence[int], vector: Callable[[Any], int], max_rows: int
) -> tuple[WkvArgs, np.ndarray]:
    """As `shift_args`, and the states of the runner's rows. rows: addresses of the result, r, w, k, v and a."""
    *_, weights, cached, _, _, sizes = inputs
    if sizes.dim > MAX_WKV_DIM:
        raise CannotTrace(f"no kernel for an RWKV-7 with heads of {sizes.dim}")
    states = paged((max_rows, sizes.channels * sizes.dim), np.dtype(np.float32))
    vectors = (weights.k_k, weights.k_a, weights.r_k, weights.weight, weights.bias)
    out, *read = rows
    args = WkvArgs(
        _input_rows(cache, cached.layer), sizes.heads, sizes.dim, sizes.eps or 0.0, 0, states.ctypes.data, *read,
        *(None if values is None else vector(values) for values in vectors), out,
    )  # fmt: skip
    return args, states
