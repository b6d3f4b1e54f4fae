"""Weights that are there for one layer at a time."""

from __future__ import annotations

import threading

from torch import Tensor


class Streaming:
    """The buffers of a layer hold its weights from a wait before it to the signal after it; else `nothing`."""

    def __init__(self, buffers: list[list[Tensor]], nothing: float):
        self.held = [[(buffer, buffer.clone()) for buffer in layer] for layer in buffers]
        self.nothing = nothing
        self.there = [threading.Event() for _ in self.held]
        self.waits = self.signals = 0
        for layer in range(len(self.held)):
            self.drop(layer)
        self.fetch(0)

    def fetch(self, layer: int) -> None:
        def copy() -> None:
            for buffer, source in self.held[layer]:
                buffer.copy_(source)
            self.there[layer].set()

        threading.Thread(target=copy).start()

    def drop(self, layer: int) -> None:
        for buffer, _ in self.held[layer]:
            buffer.fill_(self.nothing)
        self.there[layer].clear()

    def before_layer(self, layer: int) -> None:
        assert self.there[layer].wait(30), "the layer's weights never came"
        self.waits += 1
        if layer + 1 < len(self.held):
            self.fetch(layer + 1)

    def after_layer(self, layer: int) -> None:
        self.signals += 1
        self.drop(layer)
        if layer + 1 == len(self.held):
            self.fetch(0)
