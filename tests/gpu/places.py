"""Where the GPU tests of the graph executor run, and Triton's kernels on tensors of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

DRY = os.environ.get("KVASIR_GPU_DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DRY and not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(not DRY and _INTERPRETED, reason="TRITON_INTERPRET is 1: run `make gpu-check`"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN:RuntimeWarning"),
]


def capability() -> int:
    """90 for sm_90; 0 without an NVIDIA GPU."""
    if DRY or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor


class Moved:
    """Copies of tensors on a device: those that share memory still do."""

    def __init__(self, device: str):
        self.device = device
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        """The copy of a tensor of the host; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        memory = value.untyped_storage()
        if memory.data_ptr() not in self.copies:
            raw = torch.tensor([], dtype=torch.uint8).set_(memory)
            self.copies[memory.data_ptr()] = raw, raw.to(self.device, copy=True)
        there = self.copies[memory.data_ptr()][1]
        flat = torch.tensor([], dtype=value.dtype, device=self.device).set_(there.untyped_storage())
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())

    def back(self) -> None:
        """Copies all memory back."""
        for here, there in self.copies.values():
            here.copy_(there)


@contextmanager
def kernels_on_gpu() -> Iterator[None]:
    """Kernels run on the GPU with copies of the host's tensors, which then get the results."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def moved_run(self: Any, *args: Any, **named: Any) -> Any:
        move = Moved("cuda")
        result = run(self, *(move(value) for value in args), **{name: move(value) for name, value in named.items()})
        move.back()
        return result

    with patch.object(JITFunction, "run", moved_run):
        yield
