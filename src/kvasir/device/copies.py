"""Copies between GPU memory and host memory that overlap with the GPU's computation.

Each copy goes through a slot: a buffer in GPU memory and a pinned buffer in host memory.

read    main stream   source -> slot, before work queued later can write to the source
        side stream           slot -> pinned
        a thread                      pinned -> bytes
write   the caller    bytes -> pinned
        side stream           pinned -> slot
        main stream                   slot -> target, before work queued later can read it

So the main stream waits for copies within GPU memory, and for the bus only if it needs the incoming data, or if there
are more copies than slots.
"""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

SLOT_BYTES = 64 << 20  # of all slots, on either side, unless two slots need more
MOST_SLOTS = 32


class Copier:
    """Copies tensors. Use it from one thread, whose current stream is the main stream. max_bytes: of the largest
    tensor."""

    def __init__(self, max_bytes: int):
        self._slots = [_Slot(max_bytes) for _ in range(min(MOST_SLOTS, max(2, SLOT_BYTES // max_bytes)))]
        self._turn = 0
        self._side = torch.cuda.Stream()
        self._thread = ThreadPoolExecutor(1, "kvasir-copies")

    def read(self, source: Tensor) -> Future[memoryview]:
        """Starts to copy the contents of the tensor, in the order of its axes; the future returns the bytes."""
        slot = self._free_slot()
        pinned = slot.pinned[: source.nbytes]
        slot.view(source).copy_(source)
        ready = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(self._side):
            self._side.wait_event(ready)
            pinned.copy_(slot.memory[: source.nbytes], non_blocking=True)
            slot.done.record(self._side)
        slot.taken = self._thread.submit(_take, pinned, slot.done)
        return slot.taken

    def write(self, target: Tensor, data: bytes | bytearray | memoryview) -> None:
        """Fills the tensor with bytes from `read`; `data` may be freed when this returns."""
        slot = self._free_slot()
        slot.pinned[: target.nbytes].numpy()[:] = np.frombuffer(data, np.uint8)
        with torch.cuda.stream(self._side):
            slot.memory[: target.nbytes].copy_(slot.pinned[: target.nbytes], non_blocking=True)
            there = self._side.record_event()
        main = torch.cuda.current_stream()
        main.wait_event(there)
        target.copy_(slot.view(target))
        slot.done.record(main)

    def _free_slot(self) -> _Slot:
        """The slot whose last copy started first; waits until that copy has ended."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.done.synchronize()
        if slot.taken:
            concurrent.futures.wait([slot.taken])
            slot.taken = None
        return slot

    def close(self) -> None:
        self._thread.shutdown()


class _Slot:
    def __init__(self, num_bytes: int):
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self.pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.done = torch.cuda.Event(blocking=True)  # waiting threads sleep
        self.taken: Future[memoryview] | None = None

    def view(self, like: Tensor) -> Tensor:
        return self.memory[: like.nbytes].view(like.dtype).view(like.shape)


def _take(pinned: Tensor, done: torch.cuda.Event) -> memoryview:
    done.synchronize()
    return torch.empty_like(pinned, pin_memory=False).copy_(pinned).numpy().data.toreadonly()


def copier(device: torch.device, max_bytes: int) -> Copier | None:
    """A copier; None for the CPU, whose memory is the host's."""
    return Copier(max_bytes) if device.type == "cuda" else None
