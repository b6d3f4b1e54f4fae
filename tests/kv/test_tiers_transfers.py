"""The threads of a tier: bounded, in order, never waited for."""

import threading
import time

import pytest

from kvasir.kv.tiers import transfers
from kvasir.kv.tiers.connector import Failed
from kvasir.kv.tiers.record import Unusable
from kvasir.kv.tiers.transfers import Loads, TransferMeter, TransferWorker
from tests.kv._tiers import blocks_of, until


def test_a_rate_is_bytes_over_seconds_and_grows_old(monkeypatch):
    meter = TransferMeter()
    assert meter.read_rate() == 0.0
    for _ in range(50):
        meter.loaded(1000, 0.01)
    assert meter.read_rate() == pytest.approx(1e5)
    for _ in range(50):
        meter.loaded(1000, 0.1)
    assert meter.read_rate() == pytest.approx(1e4, rel=0.05)
    assert meter.read_seconds(10**5) == pytest.approx(10, rel=0.05)
    now = time.monotonic()
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now + transfers.RATE_SECONDS + 1)
    assert meter.read_rate() == 0.0 == meter.read_seconds(10**5)


class Gate:
    """A `run` that waits until it is opened."""

    def __init__(self):
        self.begun, self.open = threading.Event(), threading.Event()
        self.done: list[int] = []

    def run(self, job: int | None) -> None:
        if job is None:
            return
        self.begun.set()
        assert self.open.wait(30)
        if job < 0:
            raise RuntimeError("a job that fails")
        self.done.append(job)


def test_a_worker_runs_in_order_within_its_bound():
    gate = Gate()
    worker = TransferWorker("w", gate.run, max_cost=10)
    assert worker.put(1, 5) and worker.put(2, 5)
    assert not worker.put(3, 1)
    gate.open.set()
    until(lambda: worker.cost == 0)
    assert worker.put(-1, 11) and worker.close(30.0) == []  # dearer than the bound, alone; and it fails
    assert gate.done == [1, 2]
    assert not worker.put(4, 1)


def test_a_job_that_fails_does_not_end_the_thread(caplog):
    gate = Gate()
    gate.open.set()
    worker = TransferWorker("w", gate.run, max_cost=100)
    worker.put(-1, 1)
    worker.put(2, 1)
    assert worker.close(30.0) == []
    assert gate.done == [2] and "a job that fails" in caplog.text


def test_closing_drops_what_does_not_get_done():
    gate = Gate()
    worker = TransferWorker("w", gate.run, max_cost=100)
    for job in (1, 2, 3):
        worker.put(job, 1)
    assert gate.begun.wait(30)
    threading.Timer(0.3, gate.open.set).start()
    assert worker.close(0.05) == [2, 3]
    assert gate.done == [1]


def test_a_worker_wakes_at_its_interval():
    ticks = []
    worker: TransferWorker[int] = TransferWorker("w", ticks.append, 1, interval=0.01)
    until(lambda: len(ticks) >= 3)
    worker.close(30.0)
    assert set(ticks) == {None}


class Shelf:
    """A `read` of Loads that waits until it is opened, and fails for some blocks."""

    def __init__(self, max_bytes: int = 100):
        self.begun, self.open = threading.Event(), threading.Event()
        self.read_keys: list[bytes] = []
        self.bad: dict[bytes, Exception] = {}
        self.meter = TransferMeter()
        self.loads = Loads("l", self.read, max_bytes, self.meter)

    def read(self, block, group):
        self.begun.set()
        assert self.open.wait(30)
        self.read_keys.append(block.key)
        if block.key in self.bad:
            raise self.bad[block.key]
        return memoryview(block.key)


@pytest.fixture
def shelf():
    shelf = Shelf()
    yield shelf
    shelf.open.set()
    shelf.loads.close()


def test_a_load_is_polled_to_its_end_without_waiting(shelf):
    block = blocks_of(1)[0]
    ticket = shelf.loads.start(block, 0, 10)
    assert shelf.loads.poll(ticket) is None and len(shelf.loads) == 1
    shelf.open.set()
    assert shelf.loads.poll(ticket, 30.0) == block.key
    assert len(shelf.loads) == 0 and shelf.loads.num_bytes == 0
    with pytest.raises(KeyError):
        shelf.loads.poll(ticket)


def test_a_cancelled_load_is_not_read_and_leaves_nothing(shelf):
    first, second, third = blocks_of(3)
    tickets = [shelf.loads.start(b, 0, 10) for b in (first, second, third)]
    assert shelf.begun.wait(30)
    for ticket in tickets[:2]:
        shelf.loads.cancel(ticket)
    shelf.open.set()
    assert shelf.loads.poll(tickets[2], 30.0) == third.key
    assert second.key not in shelf.read_keys
    assert len(shelf.loads) == 0 and shelf.loads.num_bytes == 0
    shelf.loads.cancel(tickets[0])  # twice does no harm


def test_loads_beyond_the_bound_fail_at_once(shelf):
    blocks = blocks_of(3)
    tickets = [shelf.loads.start(b, 0, 60) for b in blocks]
    assert shelf.loads.poll(tickets[0]) is None
    assert shelf.loads.poll(tickets[1]) == shelf.loads.poll(tickets[2]) == Failed("busy")
    assert shelf.meter.loads == {"busy": 2}
    shelf.open.set()
    assert shelf.loads.poll(tickets[0], 30.0) == blocks[0].key
    assert shelf.loads.poll(shelf.loads.start(blocks[1], 0, 1000), 30.0) == blocks[1].key  # alone, however large


def test_failures_are_results(shelf, caplog):
    stale, broken = blocks_of(2)
    shelf.bad = {stale.key: Unusable("stale"), broken.key: RuntimeError("a fault of ours")}
    shelf.open.set()
    assert shelf.loads.poll(shelf.loads.start(stale, 0, 1), 30.0) == Failed("stale")
    assert shelf.loads.poll(shelf.loads.start(broken, 0, 1), 30.0) == Failed("error")
    assert shelf.meter.loads == {"stale": 1, "error": 1} and "a fault of ours" in caplog.text


def test_closing_fails_open_loads():
    shelf = Shelf()
    blocks = blocks_of(3)
    tickets = [shelf.loads.start(b, 0, 1) for b in blocks]
    assert shelf.begun.wait(30)
    threading.Timer(0.1, shelf.open.set).start()
    shelf.loads.close()
    assert shelf.loads.poll(tickets[0], 30.0) == blocks[0].key
    assert shelf.loads.poll(tickets[1]) == shelf.loads.poll(tickets[2]) == Failed("closed")
    assert shelf.loads.poll(shelf.loads.start(blocks[0], 0, 1)) == Failed("closed")
