"""Launches that are recorded once and replayed as CUDA graphs, and their results on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Replay = Callable[[], None]


class Recorder:
    """Records launches for replays. All graphs share one memory pool: they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, run: Callable[[], None]) -> Replay:
        """A replay of the launches of `run`, which is called twice: first to compile and load its kernels."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, such as for adapters.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


def fetch(tensors: Sequence[Tensor]) -> Callable[[], list[np.ndarray]]:
    """Starts to copy tensors to the host, in the order of the current stream. The returned function waits for the
    copies and gives them; what is written to the tensors later does not change them."""
    if tensors[0].device.type == "cpu":
        copies = [tensor.numpy().copy() for tensor in tensors]
        return lambda: copies
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for target, source in zip(pinned, tensors, strict=True):
        target.copy_(source, non_blocking=True)
    event = torch.cuda.current_stream().record_event()

    def wait() -> list[np.ndarray]:
        event.synchronize()
        return [part.numpy() for part in pinned]

    return wait
