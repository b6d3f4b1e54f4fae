"""The C structures of selective state spaces (csrc/ssm.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np

from kvasir.ops.graph import CannotTrace
from kvasir.ops.ssm import ScanSizes
from kvasir.program.cache import NativeCache

MAX_SCAN_DIM, MAX_SCAN_TAPS = 256, 8


class InputRows(ctypes.Structure):
    """Where the blocks of a layer keep a token's inputs."""

    _fields_ = (
        ("blocks", c_void_p),
        ("block_stride", c_int64),
        ("state_size", c_int64),
        ("inputs", c_int64),
        *((name, c_int32) for name in ("taps", "block_size", "group", "reserved")),
    )


class ConvolutionArgs(ctypes.Structure):
    """The operands of a causal convolution."""

    _fields_ = (
        ("rows", InputRows),
        ("channels", c_int64),
        ("function", c_int32),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("x", "kernel", "bias", "out", "pieces")),
        ("num_pieces", c_int64),
    )


class ScanArgs(ctypes.Structure):
    """The operands of a selective scan."""

    _fields_ = (
        ("conv", ConvolutionArgs),
        *((name, c_int32) for name in ("heads", "groups", "dim", "width", "per_channel", "reserved")),
        ("low", c_float),
        ("high", c_float),
        *((name, c_void_p) for name in ("states", "dt", "b", "c")),
        ("b_stride", c_int64),
        ("c_stride", c_int64),
        *((name, c_void_p) for name in ("rates", "bias", "skip", "out")),
    )


def input_rows(cache: NativeCache, layer: int, sizes: ScanSizes, taps: int) -> InputRows:
    """Raises CannotTrace for sizes that the kernels do not support."""
    if max(sizes.dim, sizes.width) > MAX_SCAN_DIM or taps > MAX_SCAN_TAPS:
        raise CannotTrace(f"no kernel for a scan of {sizes.width} channels, {sizes.dim} states and {taps} taps")
    array, state = cache.arrays(layer)[0][0], sizes.inner * sizes.dim
    assert array.shape[1] == state + (taps - 1 + cache.block_size) * sizes.inputs
    group = cache.group_of(layer)
    return InputRows(array.ctypes.data, array.shape[1], state, sizes.inputs, taps, cache.block_size, group, 0)


def scan_args(conv: ConvolutionArgs, sizes: ScanSizes) -> ScanArgs:
    """With the sizes, and for Mamba 2 with B and C, which are channels of the convolution."""
    args = ScanArgs(
        conv, sizes.heads, sizes.groups, sizes.dim, sizes.width, sizes.per_channel, 0, sizes.low, sizes.high
    )
    args.b_stride = args.c_stride = sizes.shared
    if not sizes.per_channel:
        item = np.dtype(np.float32).itemsize
        args.b = conv.out + sizes.inner * item
        args.c = args.b + sizes.shared * item
        args.b_stride = args.c_stride = sizes.channels
    return args
