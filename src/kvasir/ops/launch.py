"""Launching Triton kernels: every launch of the package goes through `launch`, so that launches and bytes can be
counted, and kernels can be compiled for machines that are not there.

    launch(kernel, grid, x, y, WIDTH=64)         runs the kernel; with `recording`, notes it first
    call(function, x, y)                         the same for what a library puts on the stream, like a collective
    with recording(dry=True) as launches: ...    only notes it, so the tensors may lie on torch's `meta` device

Floating-point fusion is always off: a kernel that wants a fused multiply-add writes `fma`.

Kernels with a parameter PDL are launched with programmatic dependent launch (PDL) where the GPU has it: their programs
take their places while the kernel before them ends, and wait for its results there (`ops.kernels.begin`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import knobs

# The interpreter computes bfloat16 wrongly, so kernels convert operands to float32 first if this is set.
INTERPRETED = bool(knobs.runtime.interpret)

OPTIONS = ("num_warps", "num_stages", "maxnreg", "matrix_instr_nonkdim", "launch_pdl")


def on_hip() -> bool:
    """Whether kernels run on an AMD GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


def for_large_tiles() -> dict[str, Any]:
    """Options for kernels with large tiles. On AMD, one kind of matrix instruction for tiles of all sizes. On NVIDIA,
    all registers that a thread can have: the assembler may spill some to run more programs at a time."""
    return {"matrix_instr_nonkdim": 16} if on_hip() else {"maxnreg": 255}


@cache
def has_pdl() -> bool:
    """Whether the GPU has programmatic dependent launch: from sm_90 on."""
    return _capability() >= (9, 0)


@cache
def has_tensor_memory() -> bool:
    """Whether the GPU's products accumulate in a memory of their own: from sm_100 on."""
    return _capability() >= (10, 0)


def _capability() -> tuple[int, int]:
    """Of NVIDIA's GPU: (9, 0) for sm_90; (0, 0) without one."""
    torch = sys.modules.get("torch")
    if INTERPRETED or torch is None or on_hip() or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability()


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel. args: positional ones, tensors or numbers. constants: values of the kernel's constexpr
    parameters. options: of the compiler. bytes: read and written, if the caller has counted them. grid: () for a call
    of a function instead, see `call`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    bytes: int = 0

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(slots=True)
class Recording:
    """The launches within a `recording`. dry: whether kernels are only noted."""

    dry: bool
    launches: list[Launch]


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(dry: bool = False) -> Iterator[list[Launch]]:
    """Collects the launches made within the block. dry: kernels do not run."""
    found: list[Launch] = []
    token = _recording.set(Recording(dry, found))
    try:
        yield found
    finally:
        _recording.reset(token)


def launch(kernel: Any, grid: Sequence[int], *args: Any, bytes: int = 0, **named: Any) -> None:
    """Launches a kernel. named: its constexpr parameters, and options of the compiler (OPTIONS). bytes: read and
    written by this launch."""
    if "PDL" in kernel.arg_names:
        named |= {"PDL": True, "launch_pdl": True} if has_pdl() else {"PDL": False}
    if found := _recording.get():
        options = {name: value for name, value in named.items() if name in OPTIONS}
        constants = {name: value for name, value in named.items() if name not in OPTIONS}
        found.launches.append(Launch(kernel, tuple(grid), args, constants, options, bytes))
        if found.dry:
            return
    kernel[tuple(grid)](*args, **named, enable_fp_fusion=False)


def call(function: Callable[..., None], *args: Any, bytes: int = 0) -> None:
    """Calls a function that puts work on the device's stream as a launch does. bytes: read and written by it."""
    if found := _recording.get():
        found.launches.append(Launch(function, (), args, {}, {}, bytes))
        if found.dry:
            return
    function(*args)


def recorded(run: Callable[[], None]) -> Callable[[], None]:
    """A replay of the launches of `run`, as a CUDA graph's: nothing but kernels runs again, with the same arguments."""
    with recording(dry=True) as launches:
        run()

    def replay() -> None:
        for found in launches:
            if not found.grid:
                call(found.kernel, *found.args, bytes=found.bytes)
                continue
            launch(found.kernel, found.grid, *found.args, bytes=found.bytes, **found.constants, **found.options)

    return replay
