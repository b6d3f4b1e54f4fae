"""Triton is an extra: the graph executor compiles its kernels with it."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from kvasir.environment import env

INSTALL_TRITON = "pip install 'kvasir-llm[gpu]'"


def no_triton(device: str) -> str:
    """Why Triton kernels cannot run on a device; "" if they can. On a CPU only Triton's interpreter runs them, for
    tests."""
    if find_spec("triton") is None:
        return f"Triton is not installed ({INSTALL_TRITON})"
    if device == "cpu" and env("TRITON_INTERPRET") != "1":
        return "its kernels need a GPU"
    return ""


def rounds_float32(target: str) -> str:
    """Why Triton's products of float32 inputs with quantized weights are too coarse on a GPU; "" if they are not.
    target: "sm_90"."""
    installed = version("triton")
    if not target.startswith("sm_1") or tuple(map(int, installed.split(".")[:2])) >= (3, 7):
        return ""
    return f"on {target} Triton {installed} rounds them to TF32, Triton 3.7 and later do not"
