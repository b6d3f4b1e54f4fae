"""The progress of an engine's start."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told how many bytes of the weights are loaded; then, for the graph executor on a GPU, how many kernels are
    compiled."""

    def __call__(self, done: int, total: int, kernels: bool = False) -> None: ...


def described(done: int, total: int, kernels: bool = False) -> str:
    """Progress as text for users."""
    if kernels:
        return f"compiling {done} of {total} kernels"
    return f"loading {done / 2**20:.0f} of {total / 2**20:.0f} MiB"
