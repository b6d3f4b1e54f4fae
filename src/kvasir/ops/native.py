"""The only entry point to libkvasir_cpu, the native CPU kernels (csrc/kvasir_cpu.h documents each call's contract).

The library is optional: it is missing if no compiler was available at install time. Then `available()` is False,
`reason()` gives the cause, and everything runs on the eager executor. Calls release the GIL and take raw addresses.
"""

import ctypes
import sys
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from kvasir.environment import env
from kvasir.errors import ConfigError
from kvasir.fields import LAYOUT

ABI_VERSION = 31
ISAS = ("portable", "avx2", "avx512")  # in the order of kvasir_set_isa
NUMBERS = ("int8", "bfloat16", "float32")  # in the order of kvasir_multiply_rate
MAX_COLS = 1 << 24  # below this, a row's length is exact in float32

_SUFFIX = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
# Where the library is. KVASIR_LIBRARY: another build of it, for kernel development.
NAMED = env("KVASIR_LIBRARY")
PATH = Path(NAMED or Path(__file__).parents[1] / "_lib" / f"libkvasir_cpu.{_SUFFIX}")
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "kvasir_abi_version": (_INT32, []),
    "kvasir_sampler_layout": (_INT32, []),
    "kvasir_cpu_features": (ctypes.c_char_p, []),
    "kvasir_isa_name": (ctypes.c_char_p, []),
    "kvasir_set_isa": (_INT32, [_INT32]),
    "kvasir_rms_norm_f32": (None, [_POINTER, _POINTER, _POINTER, _INT64, _INT64, ctypes.c_float]),
}


def load(path: Path) -> ctypes.CDLL:
    """Loads a library and declares its calls. Raises ConfigError if it is missing, broken or of another ABI version."""
    hint = "reinstall Kvasir so that its library and its Python code have the same version"
    if not path.exists():
        if NAMED:
            raise ConfigError(f"KVASIR_LIBRARY names {path}, which does not exist", "build it, or unset the variable")
        raise ConfigError("the native CPU kernels are not built", "install a C++ compiler and reinstall Kvasir")
    if NAMED:
        hint = f"KVASIR_LIBRARY names {path}: build it from this source, or unset the variable"
    try:
        library = ctypes.CDLL(str(path))
        version = library.kvasir_abi_version()
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the native CPU kernels cannot be loaded: {error}", hint) from error
    if version != ABI_VERSION:
        raise ConfigError(f"the native CPU kernels have ABI {version}, expected {ABI_VERSION}", hint)
    if library.kvasir_sampler_layout() != LAYOUT:
        raise ConfigError("the native CPU kernels were built for other sampling fields", hint)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _outcome(path: Path) -> ctypes.CDLL | ConfigError:
    try:
        return load(path)
    except ConfigError as error:
        return error


def available() -> bool:
    """Whether the native kernels can be called in this process."""
    return isinstance(_outcome(PATH), ctypes.CDLL)


def reason() -> str:
    """Why the native kernels are unavailable and what to do about it; "" if they are available."""
    outcome = _outcome(PATH)
    return str(outcome) if isinstance(outcome, ConfigError) else ""


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """A library function with its types declared, for the module that calls it. Raises ConfigError as `lib` does, and
    if the library is too old to have it."""
    function = getattr(lib(), name, None)
    if function is None:
        raise ConfigError(f"the native CPU kernels have no {name}", "build them again from this source")
    function.restype, function.argtypes = result, list(arguments)
    return function


def lib() -> ctypes.CDLL:
    """The library with its calls declared. Raises ConfigError with the reason if it is unavailable."""
    outcome = _outcome(PATH)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def sources_digest() -> str:
    """SHA-256, in hexadecimal, of the sources that the library was built from."""
    return declare("kvasir_sources_digest", ctypes.c_char_p)().decode()


def cpu_features() -> tuple[str, ...]:
    """The instruction set extensions of this processor that the kernels check for, e.g. ("avx2", "fma", ...)."""
    return tuple(lib().kvasir_cpu_features().decode().split())


def isa() -> str:
    """The active instruction set, one of ISAS."""
    return lib().kvasir_isa_name().decode()


def force_isa(name: str | None) -> str:
    """Selects an instruction set of ISAS for this process (None: the best available). Returns the active one.

    Results keep their bits; only the speed changes. Must not be called while a kernel runs. Raises ConfigError, and
    changes nothing, if the name is unknown or the processor cannot run it.
    """
    if name is not None and name not in ISAS:
        raise ConfigError(f"unknown instruction set {name!r}", f"choose one of {', '.join(ISAS)}")
    if lib().kvasir_set_isa(-1 if name is None else ISAS.index(name)) < 0:
        found = " ".join(cpu_features()) or "none"
        raise ConfigError(f"this processor cannot run {name} kernels (it has: {found})", "choose a lower one")
    return isa()


def multiply_rate(numbers: str, threads: int) -> float:
    """Multiply-adds per second that the instruction with which the active instruction set multiplies such numbers (of
    NUMBERS) does at most, on `threads` threads at once, by their processor time. 0 if it is not known: the portable
    kernels are what a compiler makes of them. Raises ConfigError if the threads cannot be created."""
    call = declare("kvasir_multiply_rate", ctypes.c_double, _INT32, _INT32)
    return _rate(call(NUMBERS.index(numbers), threads), threads)


def read_rate(data: Any, threads: int) -> float:
    """Bytes per second that `threads` threads read at once from a dense float64 array of one dimension, each always the
    same part; from caches, if it fits them. Raises ConfigError if the threads cannot be created."""
    call = declare("kvasir_read_rate", ctypes.c_double, _POINTER, _INT64, _INT32)
    return _rate(call(address(data, "data", data.shape, "float64"), data.nbytes, threads), threads)


def _rate(found: float, threads: int) -> float:
    if found < 0:
        raise ConfigError(f"{threads} threads cannot be created", "give fewer --threads")
    return found


def rms_norm(out_ptr: int, x_ptr: int, w_ptr: int | None, rows: int, cols: int, eps: float) -> None:
    """RMSNorm of float32 rows by address: out and x are [rows, cols], w is [cols] or None, all dense; out may be x.

    The caller is responsible for the addresses. Runs on one thread; splitting rows over several threads changes no
    bits.
    """
    lib().kvasir_rms_norm_f32(out_ptr, x_ptr, w_ptr, rows, cols, eps)


def rms_norm_arrays(out: Any, x: Any, weight: Any, eps: float) -> None:
    """`rms_norm` on numpy arrays or CPU tensors: out and x [..., cols], weight [cols] or None, float32, dense.

    Raises ValueError for arguments that the kernel could not read or write safely.
    """
    shape = tuple(x.shape)
    if not shape or not 0 < shape[-1] < MAX_COLS:
        raise ValueError(f"x must have 1 to {MAX_COLS - 1} columns, its shape is {shape}")
    out_ptr = address(out, "out", shape, writable=True)
    x_ptr = address(x, "x", shape)
    w_ptr = None if weight is None else address(weight, "weight", shape[-1:])
    rms_norm(out_ptr, x_ptr, w_ptr, prod(shape[:-1]), shape[-1], eps)


def address(array: Any, name: str, shape: tuple[int, ...], dtype: str = "float32", writable: bool = False) -> int:
    """The data address of a numpy array or CPU tensor. Raises ValueError for another dtype, shape, layout or device, or
    if `writable` is set and the array is read-only."""
    is_tensor = hasattr(array, "data_ptr")
    found = (str(array.dtype).removeprefix("torch."), tuple(array.shape))
    if found != (dtype, shape):
        raise ValueError(f"{name} must be {dtype} of shape {shape}, it is {found[0]} of shape {found[1]}")
    if not (array.is_contiguous() if is_tensor else array.flags.c_contiguous):
        raise ValueError(f"{name} must be dense and row-major")
    if is_tensor and array.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, it is on {array.device}")
    if writable and not is_tensor and not array.flags.writeable:
        raise ValueError(f"{name} must be writable, it is read-only")
    return array.data_ptr() if is_tensor else array.ctypes.data
