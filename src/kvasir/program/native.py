"""The C structures of csrc/program.h, and the native functions on them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np

from kvasir.inputs import MAX_ADAPTERS_OF_REQUEST
from kvasir.ops import native
from kvasir.ops.attention.native import Piece
from kvasir.plan import Adapted
from kvasir.sampling.native import SampleRow

MAX_GROUPS = 8
MAX_ADAPTERS = 1 << 12
MAX_APPLIED = MAX_ADAPTERS_OF_REQUEST
MAX_DELTA_DIM, MAX_TAPS = 256, 8

OPS = (
    "embedding", "rms_norm", "layer_norm", "prepare", "linear", "rope", "store_kv", "paged_attention", "activate",
    "gated", "add", "multiply", "add_vector", "scale", "softcap", "choose", "sample", "route", "experts", "call",
    "adapt_inner", "adapt_add", "gated_delta", "scale_rows", "short_conv",
    "causal_convolution", "selective_scan", "prepare_heads", "join", "take_columns", "clamp", "xielu",
    "scale_columns", "gaussian_cut", "match_magnitude", "predict_streams", "correct_streams", "add_to_streams",
    "select_tokens", "selected_attention", "token_shift", "wkv", "meet",
)  # fmt: skip
OP = {name: code for code, name in enumerate(OPS)}
FUNCTION = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "sigmoid": 6, "clamped_swiglu": 7, "relu2": 9}
SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "sparsemixer": 3}
BARRIER = 1
RUN_ERRORS = {
    1: "more token rows or pieces than the program's buffers hold",
    2: "work on tokens that the row does not have",
    3: "a block id out of range",
    4: "an adapter that is not loaded",
}


def route_room(experts: int) -> int:
    """The floats that a thread needs to route a row."""
    return 4 * experts + 64


def records(array: Any, kind: type[ctypes.Structure]) -> np.ndarray:
    """A NumPy record view of a ctypes array of structures, in the same memory."""
    return np.frombuffer(array, kind)


class Instr(ctypes.Structure):
    """One instruction: integer, float and pointer operands."""

    _fields_ = (("op", c_int32), ("flags", c_int32), ("n", c_int64 * 8), ("f", c_float * 2), ("p", c_void_p * 6))


class LinearPart(ctypes.Structure):
    """One product of a linear instruction. Strides are in floats."""

    _fields_ = (
        ("matrix", c_void_p),
        ("activated", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
    )


class LowRankStruct(ctypes.Structure):
    """What one adapter changes in one slot (csrc/low_rank.h), null if it does not change the slot."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("a", "b", "bias", "factors", "replacement", "rows", "ids", "vector", "second", "experts")
    )


class InEffect(ctypes.Structure):
    """An adapter that is in effect for a token row."""

    _fields_ = (("id", c_int32), ("scale", c_float))


class AdapterGroup(ctypes.Structure):
    """Rows for which one adapter is in effect at the same level."""

    _fields_ = (("changes", c_void_p), ("first", c_int64), ("count", c_int64), ("id", c_int32), ("reserved", c_int32))


class AdaptedRows(ctypes.Structure):
    """The adapted rows of a section of the program."""

    _fields_ = (
        ("groups", c_int64),
        ("count", c_int64),
        ("group", c_void_p),
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("tokens", c_void_p),
        ("levels", c_int64),
        ("ends", c_int64 * MAX_APPLIED),
    )


class AdaptersStruct(ctypes.Structure):
    """The adapters of a program (csrc/adapters.h): a table of LowRankStruct per adapter id, and buffers."""

    _fields_ = (
        ("tables", c_void_p),
        ("count", c_int64),
        ("rank", c_int64),
        ("in_effect", c_void_p),
        ("group_of", c_void_p),
        ("tokens", AdaptedRows),
        ("chosen", AdaptedRows),
        ("inner", c_void_p),
        ("sums", c_void_p),
    )


class RopeTable(ctypes.Structure):
    """Cosines and sines of a rope, one row per position."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class RoutingStruct(ctypes.Structure):
    """The settings of a route instruction."""

    _fields_ = (
        ("experts", c_int64),
        ("top_k", c_int64),
        ("groups", c_int64),
        ("top_groups", c_int64),
        ("best_of_group", c_int64),
        ("scores", c_int32),
        ("normalise", c_int32),
        ("scale", c_float),
        ("epsilon", c_float),
        ("bias", c_void_p),
        ("scales", c_void_p),
    )


class Experts(ctypes.Structure):
    """The operands of an experts instruction."""

    _fields_ = (
        ("experts", c_int64),
        ("top_k", c_int64),
        ("width", c_int64),
        ("inner", c_int64),
        ("at_once", c_int64),
        ("first", c_int64),
        ("held", c_int64),
        ("function", c_int32),
        ("weigh_inputs", c_int32),
        ("limit", c_float),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("gate_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("begins", c_void_p),
        ("slots", c_void_p),
        ("sources", c_void_p),
        ("activated", c_void_p),
        ("gate_out", c_void_p),
        ("up_out", c_void_p),
        ("down_out", c_void_p),
        ("meet", c_void_p),
        ("meeting", c_void_p),
        ("inputs", c_void_p),
        ("meet_inner", c_void_p),
    )


class DeltaArgs(ctypes.Structure):
    """The operands of a gated delta rule (csrc/delta.h)."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                *("qk_heads", "v_heads", "tiled", "decays", "dim", "v_dim"),
                *("taps", "function", "block_size", "group"),
            )
        ),
        ("strength", c_float),
        ("reserved", c_int32),
        ("blocks", c_void_p),
        ("block_stride", c_int64),
        ("states", c_void_p),
        *((name, c_void_p) for name in ("q", "k", "v", "b", "a")),
        ("gate_stride", c_int64),
        *((name, c_void_p) for name in ("kernel", "log_rate", "bias", "out", "pieces")),
        ("num_pieces", c_int64),
    )


class ShortConvArgs(ctypes.Structure):
    """The operands of a gated short convolution (csrc/short_conv.h)."""

    _fields_ = (
        *((name, c_int32) for name in ("width", "taps", "block_size", "group")),
        ("blocks", c_void_p),
        ("block_stride", c_int64),
        *((name, c_void_p) for name in ("b", "c", "x", "kernel", "bias", "out", "pieces")),
        ("num_pieces", c_int64),
    )


class AppliedStruct(ctypes.Structure):
    """An adapter of a row, for the tokens from position `start` on."""

    _fields_ = (("id", c_int64), ("start", c_int64), ("scale", c_float), ("reserved", c_int32))


class RowState(ctypes.Structure):
    """The state of a row of the runner: its ids, block tables, sampling parameters and adapters."""

    _fields_ = (
        ("ids", c_void_p),
        ("tables", c_void_p * MAX_GROUPS),
        ("max_ids", c_int64),
        ("table_blocks", c_int64),
        ("spec", SampleRow),
        ("adapters", AppliedStruct * MAX_APPLIED),
        ("num_adapters", c_int64),
        ("reached", c_int64),
    )

    def adapt(self, adapters: Sequence[Adapted]) -> None:
        """Sets the adapters that apply to the row, at most MAX_APPLIED, in this order."""
        self.num_adapters = len(adapters)
        for to, (id, scale, start) in zip(self.adapters, adapters, strict=False):
            to.id, to.start, to.scale = id, start, scale


class ProgramStruct(ctypes.Structure):
    """A whole program."""

    _fields_ = (
        ("instrs", c_void_p),
        ("count", c_int64),
        ("chosen_from", c_int64),
        ("max_tokens", c_int64),
        ("max_chosen", c_int64),
        ("max_rows", c_int64),
        ("max_sampled", c_int64),
        ("groups", c_int64),
        ("block_size", c_int64),
        ("num_blocks", c_int64 * MAX_GROUPS),
        ("windows", c_int64 * MAX_GROUPS),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p * MAX_GROUPS),
        ("pieces", c_void_p),
        ("chosen", c_void_p),
        ("sampler_rows", c_void_p),
        ("specs", c_void_p),
        ("states", c_void_p),
        ("results", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
        ("dry_room", c_void_p),
        ("dry_ids", c_int64),
        ("nanoseconds", c_void_p),
        ("kernel_nanoseconds", c_uint64),
        ("started", c_int64 * 4),
        ("adapters", c_void_p),
        ("adapted", c_int64),
        ("progress", c_int64),
    )


class ThreadPool:
    """A pool of threads that compute steps: the caller and `threads` - 1 others or, with `apart`, `threads` others
    while the caller is free. It is closed, after the run in progress, when it is garbage-collected at the latest."""

    address: int | None = None

    def __init__(self, threads: int, pin: bool = False, apart: bool = False):
        self.threads, self.apart = threads, apart
        # Kept here because the interpreter may clear this module before it drops the last pool.
        self._destroy = native.declare("kvasir_pool_destroy", None, c_void_p)
        self.address = native.declare("kvasir_pool_create", c_void_p, c_int32, c_int32, c_int32)(threads, pin, apart)

    def close(self) -> None:
        """Waits for a run in progress and ends the threads."""
        if self.address:
            self._destroy(self.address)
            self.address = None

    def __del__(self) -> None:
        self.close()


# Callbacks: of OP_CALL, function(context, rows); Experts.meet and meet_inner(null, slots); Experts.inputs(null, first).
CALL = ctypes.CFUNCTYPE(None, c_void_p, c_int64)


def start_call() -> Any:
    """kvasir_program_start(program, pool, pieces, count) -> RunError."""
    return native.declare("kvasir_program_start", c_int32, c_void_p, c_void_p, c_void_p, c_int64)


def wait_call() -> Any:
    """kvasir_program_wait(pool): waits for the end of the started run."""
    return native.declare("kvasir_program_wait", None, c_void_p)


def progress_call() -> Any:
    """kvasir_program_progress(program) -> instructions that are complete in the run in progress."""
    return native.declare("kvasir_program_progress", c_int64, c_void_p)


def logits_call() -> Any:
    """kvasir_program_logits(program, pool, rows, count) -> RunError."""
    return native.declare("kvasir_program_logits", c_int32, c_void_p, c_void_p, c_void_p, c_int64)


__all__ = [
    "AdaptersStruct",
    "Experts",
    "Instr",
    "LinearPart",
    "LowRankStruct",
    "Piece",
    "ProgramStruct",
    "RopeTable",
    "RowState",
    "ThreadPool",
]
