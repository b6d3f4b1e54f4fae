"""A window over the layers of a model: a few places in memory, through which the layers of a step move in turn.

A thread reads the next layers while one is computed. Each layer has a place of its own for good, so that the addresses
of its matrices never change: streamed layer k lies in place k % places. After the last layer of a step the first ones
of the next are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvasir.errors import DeviceFault
from kvasir.weights.packed_file import Damaged


class LayerWindow:
    """read(layer, memory): reads a layer; raises Damaged. layers: those that are streamed, in the order in which a step
    uses them. places: memory for one layer each.

    Steps call `before` and `after` for each of these layers, in order; others are ignored. A step that ended early is
    followed by one from the first layer. bytes_read: since the start. waited: seconds that steps waited for a layer.
    """

    def __init__(
        self,
        read: Callable[[int, np.ndarray], None],
        layers: Sequence[int],
        places: Sequence[np.ndarray],
        sizes: Sequence[int],
    ):
        assert layers and 0 < len(places) <= len(layers) == len(sizes)
        self._read, self._layers, self._places, self._sizes = read, list(layers), list(places), list(sizes)
        self._position = {layer: k for k, layer in enumerate(layers)}
        # Layers are counted on and on: layer n is layers[n % len(layers)].
        self._ready = self._released = self._wanted = 0  # the first that is not read, not free again, not asked for yet
        self._epoch = 0  # counts restarts: what was being read at one is not used
        self._error: Damaged | None = None
        self._closing = False
        self.bytes_read = 0
        self.waited = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvasir-weights", daemon=True)
        self._thread.start()

    def before(self, layer: int) -> None:
        """Waits until the layer is in its place. Raises DeviceFault if it cannot be read."""
        if (at := self._position.get(layer)) is None:
            return
        begun = time.perf_counter()
        with self._changed:
            if self._wanted % len(self._layers) != at or self._released != self._wanted:
                self._restart(at)  # the last step ended early
            self._changed.wait_for(lambda: self._ready > self._wanted or self._error or self._closing)
            if self._ready <= self._wanted:
                error = self._error
                self._restart(at)
                raise DeviceFault(f"{error or 'the weights are closed'}")
            self._wanted += 1
        self.waited += time.perf_counter() - begun

    def after(self, layer: int) -> None:
        """Frees the layer's place for others."""
        if layer in self._position:
            with self._changed:
                self._released = self._wanted
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the read in progress."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _restart(self, at: int) -> None:
        count = len(self._layers)
        self._wanted = self._released = self._ready = (self._ready // count + 2) * count + at
        self._epoch, self._error = self._epoch + 1, None
        self._changed.notify_all()

    def _is_free(self, n: int) -> bool:
        """Whether the layer that was in the place of layer n before it is not needed any more."""
        count, places = len(self._layers), len(self._places)
        k = n % count
        before = n - places if k >= places else n - k - 1 - (count - 1 - k) % places
        return before < self._released

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (not self._error and self._is_free(self._ready)))
                if self._closing:
                    return
                n, epoch = self._ready, self._epoch
            k, error = n % len(self._layers), None
            place = self._places[k % len(self._places)]
            try:
                self._read(self._layers[k], place)
            except Damaged as found:
                error = found
                place[:] = 0
            with self._changed:
                if epoch == self._epoch:
                    self._error, self._ready = error, n + (error is None)
                self.bytes_read += self._sizes[k]
                self._changed.notify_all()
