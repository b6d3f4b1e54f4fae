"""The environment: the only place that reads its variables, and what engine processes are given of it."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(name: str | Path) -> Path:
    """A path with `~` for a user's home folder. Where that is not known, `~` stays: there is no such file then."""
    return Path(os.path.expanduser(name))


def env(name: str, default: str = "") -> str:
    """A variable of the environment. All reads in the package go through here, with a constant name."""
    return os.environ.get(name, default)


# Set before torch is imported: its idle threads sleep instead of spinning during the next step, and MKL's sums do not
# depend on the instruction set's fast paths or on the position of a row (exactness.md).
_COMPUTING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "MKL_CBWR": "AUTO,STRICT"}


# Variables that the libraries under torch read themselves, and by which they choose kernels.
_LIBRARY_SETTINGS = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "TORCH_LINEAR_FLATTEN_3D"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_ENABLED", "DISABLE_ADDMM_CUDA_LT"),
)


def library_settings() -> dict[str, str]:
    """The variables that change which kernels the libraries under torch choose, by name; "" if not set."""
    return {name: os.environ.get(name, "") for name in _LIBRARY_SETTINGS}


def engine_environment() -> dict[str, str]:
    """The environment for an engine process: that of this process, with settings for exact computing, and with this
    package on the import path."""
    home = str(Path(__file__).resolve().parents[1])
    paths = [home, *(p for p in env("PYTHONPATH").split(os.pathsep) if p and p != home)]
    return {**_COMPUTING, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def threads_environment(threads: int) -> dict[str, str]:
    """The environment for a process whose numpy computes with this many threads."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {**engine_environment(), **dict.fromkeys(names, str(threads))}


def prepare_torch() -> None:
    """Configures the libraries under torch for an engine; call it before torch is imported."""
    for name, value in _COMPUTING.items():
        os.environ.setdefault(name, value)


def prepare_ray() -> None:
    """Configures Ray, which reports its use to its makers by default; call it before Ray is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def config_dir() -> Path:
    """The folder of the user's own settings, which may not exist."""
    return Path(env("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "kvasir"


def models_dir() -> Path:
    """The folder of the model store, which may not exist yet."""
    own, data = env("KVASIR_MODELS"), env("XDG_DATA_HOME")
    return user_path(own) if own else Path(data or Path.home() / ".local" / "share") / "kvasir" / "models"


def kernels_dir() -> Path:
    """The folder of compiled GPU kernels, which may not exist yet. Raises RuntimeError without a home."""
    own, cache = env("KVASIR_KERNELS"), env("XDG_CACHE_HOME")
    return user_path(own) if own else Path(cache or Path.home() / ".cache") / "kvasir" / "kernels"


def contents_dir() -> Path:
    """The folder of content hashes of weight files, which may not exist yet. Raises RuntimeError without a home."""
    return Path(env("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "contents"


def packed_dir() -> Path:
    """The folder of packed weights of models larger than memory, which may not exist yet. Raises RuntimeError without a
    home."""
    own, cache = env("KVASIR_PACKED"), env("XDG_CACHE_HOME")
    return user_path(own) if own else Path(cache or Path.home() / ".cache") / "kvasir" / "packed"


def socket_base() -> Path:
    """The folder in which folders for sockets are made."""
    return Path(env("XDG_RUNTIME_DIR") or env("TMPDIR") or "/tmp")
