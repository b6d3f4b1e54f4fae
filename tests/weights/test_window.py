"""The window over layers: each layer is in its place when it is used, whatever ends early or fails."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

from kvasir.errors import DeviceFault
from kvasir.weights.packed_file import Damaged
from kvasir.weights.window import LayerWindow


class Source:
    """Layer n consists of bytes n. slow: seconds of a read. fails: layers that cannot be read."""

    def __init__(self, layers, places, slow=0.0, fails=()):
        self.layers, self.places = layers, [np.zeros(16, np.uint8) for _ in range(places)]
        self.slow, self.fails, self.reads = slow, set(fails), []
        self.window = LayerWindow(self.read, layers, self.places, [16] * len(layers))

    def read(self, layer, memory):
        time.sleep(self.slow)
        self.reads.append(layer)
        if layer in self.fails:
            raise Damaged(f"layer {layer}")
        for i in range(16):  # not all at once
            memory[i] = layer

    def use(self, layer):
        """Computes a layer: its bytes must be there, and stay."""
        self.window.before(layer)
        if layer in self.layers:
            place = self.places[self.layers.index(layer) % len(self.places)]
            for _ in range(3):
                assert (place == layer).all()
                time.sleep(0)
        self.window.after(layer)


@pytest.fixture
def made():
    sources = []

    def make(*args, **kwargs):
        sources.append(Source(*args, **kwargs))
        return sources[-1]

    yield make
    for source in sources:
        source.window.close()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("places", [1, 2, 3])
def test_every_layer_is_there_in_every_step(made, count, places):
    layers = list(range(1, 2 * count, 2))
    source = made(layers, min(places, count))
    for _ in range(20):
        for layer in range(2 * count):  # the even ones are in memory
            source.use(layer)
    assert source.reads[: 20 * count] == layers * 20


def test_reads_run_ahead_of_use_but_no_further_than_there_are_places(made):
    source = made([0, 1, 2, 3, 4], 3)
    deadline = time.monotonic() + 10
    while len(source.reads) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert source.reads == [0, 1, 2]
    source.use(0)
    while len(source.reads) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert source.reads == [0, 1, 2, 3]


@pytest.mark.parametrize("end", range(6))
def test_a_step_that_ends_early_is_followed_by_a_whole_one(made, end):
    source = made([0, 1, 2, 3, 4], 2)
    for _ in range(3):
        for layer in range(end):
            source.use(layer)
        if end < 5:
            source.window.before(end)  # and never `after`
        for layer in range(5):
            source.use(layer)


def test_a_layer_that_cannot_be_read_is_an_error_and_later_steps_try_again(made):
    source = made([0, 1, 2], 2, fails={1})  # from the first read on, which begins at once
    for _ in range(2):
        with pytest.raises(DeviceFault, match="layer 1"):
            for layer in range(3):
                source.window.before(layer)
                source.window.after(layer)
    source.fails = set()
    with contextlib.suppress(DeviceFault):  # it may have been read already for the step that follows
        source.use(0)
        source.use(1)
    for layer in range(3):
        source.use(layer)


def test_closing_ends_a_wait(made):
    source = made([0, 1], 1, slow=0.05)
    source.window.before(0)  # and it is never free again
    failed = []

    def wait():
        try:
            source.window.before(1)
        except DeviceFault as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    source.window.close()
    thread.join(10)
    assert failed and not thread.is_alive()


def test_it_counts_what_it_reads_and_how_long_steps_wait(made):
    source = made([0, 1], 1, slow=0.01)
    for _ in range(3):
        source.use(0)
        source.use(1)
    assert source.window.bytes_read >= 6 * 16
    assert source.window.waited > 0
