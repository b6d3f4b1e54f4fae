"""Sequences of launches that are recorded once and replayed: CUDA graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph.replay
