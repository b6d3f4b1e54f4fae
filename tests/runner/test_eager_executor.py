"""EagerExecutor by hand-written plans on a tiny random model."""

from __future__ import annotations

import pytest

from tests.engine.cores import core_of, random_model
from tests.runner.made import request, small_core

torch = pytest.importorskip("torch")


@pytest.fixture
def core(tmp_path):
    core = small_core(random_model("llama", tmp_path), "eager")
    yield core
    core.runner.close()


def test_execute_returns_before_the_forward_ends(core):
    import threading

    gate = threading.Event()
    forward = core.runner.executor.model.forward

    def slow(tokens_T, batch):
        assert gate.wait(10)
        return forward(tokens_T, batch)

    core.runner.executor.model.forward = slow
    core.add(request("a", [1, 2, 3]))
    plan = core.scheduler.plan()
    pending = core.runner.execute(plan)
    assert not pending.handle.future.done()
    gate.set()
    assert len(core.scheduler.commit(plan, core.runner.sample(pending))) == 1


def test_a_window_gives_its_blocks_back(tmp_path):
    core = core_of(random_model("mistral", tmp_path), threads=1, block_size=16, max_chunk=16)
    core.add(request("long", range(1, 100), max_tokens=120))
    most = 0
    while core.has_work():
        core.step()
        most = max(most, core.scheduler.kv.used)
    assert most <= 5, "a window of 40 and a chunk of 16 never need more than 5 blocks of 16"
