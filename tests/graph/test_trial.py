"""The trial that measures what recorded launches take."""

from __future__ import annotations

import gc
import weakref

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.runner import graph_trial, make_graph
from kvasir.runner.graph_memory import num_bytes
from kvasir.runner.graph_trial import recorded_bytes
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.graph.models import folder_of

pytestmark = pytest.mark.slow
SIZES = {"tokens": 64, "rows": 4, "block_size": 16, "kv_dtype": "float32"}
PER_REPLAY = 1 << 20


class Gpu:
    """Counts as a GPU would: tensors of living executors, and a megabyte for each living replay."""

    def __init__(self, monkeypatch):
        self.replays, self.executors = weakref.WeakSet(), weakref.WeakSet()
        self.expected = 0
        make = graph_trial.make_executor

        def made(*args, **options):
            executor = make(*args, **options)
            self.executors.add(executor)
            self.expected = len(executor.replays) * PER_REPLAY
            return executor

        monkeypatch.setattr(graph_trial, "make_executor", made)
        monkeypatch.setattr(make_graph, "_recorder", lambda device: self.record)
        monkeypatch.setattr(graph_trial.devices, "allocated", lambda kind: self.tensors)
        monkeypatch.setattr(
            graph_trial.devices, "available", lambda kind: (1 << 40) - self.tensors - PER_REPLAY * len(self.replays)
        )

    @property
    def tensors(self) -> int:
        return sum(num_bytes(e.forward.cache) + num_bytes(e.forward.step) for e in self.executors)

    def record(self, run):
        def replay() -> None:
            run()

        self.replays.add(replay)
        return replay


def test_it_counts_every_replay_and_leaves_nothing(tmp_path, monkeypatch):
    loaded = load_model(find_model(folder_of(tmp_path, "llama")), device="cpu", options=LoadOptions("graph"))
    gpu = Gpu(monkeypatch)
    assert recorded_bytes(loaded, kind="cpu", **SIZES) == gpu.expected > 20 * PER_REPLAY
    gc.collect()
    assert not gpu.replays and not gpu.executors
