"""Triton is an extra: the graph executor compiles its kernels with it."""

from __future__ import annotations

from importlib.util import find_spec

from kvasir.config import env

INSTALL_TRITON = "pip install 'kvasir-llm[gpu]'"


def no_triton(device: str) -> str:
    """Why Triton kernels cannot run on a device; "" if they can. On a CPU only Triton's interpreter runs them, for
    tests."""
    if find_spec("triton") is None:
        return f"Triton is not installed ({INSTALL_TRITON})"
    if device == "cpu" and env("TRITON_INTERPRET") != "1":
        return "its kernels need a GPU"
    return ""
