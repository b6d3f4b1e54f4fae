"""What tiers share: a worker thread with a bounded queue, loads by ticket, and the counters of both."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.tiers.connector import Failed
from kvasir.kv.tiers.record import Unusable
from kvasir.statistics import TierStats

log = logging.getLogger("kvasir.kv")

Job = TypeVar("Job")

RATE_DECAY = 0.9  # per load: averages about the last ten
RATE_SECONDS = 60.0  # lifetime of a measured rate; afterwards it is unknown, so that a slow tier is tried again


class TransferMeter:
    """Counts of loads and saves by outcome, and the read rate. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self.loads: Counter[str] = Counter()
        self.saves: Counter[str] = Counter()
        self.bytes_loaded = self.bytes_saved = self.evicted = 0
        self._rate_bytes = self._rate_seconds = 0.0
        self._known_until = 0.0

    def load(self, outcome: str) -> None:
        """Counts a load that failed."""
        with self._lock:
            self.loads[outcome] += 1

    def save(self, outcome: str, num_bytes: int = 0) -> None:
        """Counts a save, written or not."""
        with self._lock:
            self.saves[outcome] += 1
            self.bytes_saved += num_bytes

    def evict(self) -> None:
        """Counts an evicted part."""
        with self._lock:
            self.evicted += 1

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Counts a successful load and its time."""
        with self._lock:
            self.loads["loaded"] += 1
            self.bytes_loaded += num_bytes
        self.read(num_bytes, seconds)

    def read(self, num_bytes: int, seconds: float, believed: float = RATE_SECONDS) -> None:
        """Updates the read rate: reading `num_bytes` took `seconds`. believed: lifetime of the rate in seconds."""
        with self._lock:
            self._rate_bytes = self._rate_bytes * RATE_DECAY + num_bytes
            self._rate_seconds = self._rate_seconds * RATE_DECAY + seconds
            self._known_until = time.monotonic() + believed

    def read_rate(self) -> float:
        """Bytes per second, 0 if unknown."""
        with self._lock:
            old = time.monotonic() > self._known_until
            return 0.0 if old or not self._rate_seconds else self._rate_bytes / self._rate_seconds

    def read_seconds(self, num_bytes: int) -> float:
        """Estimated seconds to read `num_bytes`, 0 if unknown."""
        rate = self.read_rate()
        return num_bytes / rate if rate else 0.0

    def stats(self, open_loads: int, open_bytes: int, **state: int) -> TierStats:
        """All counters as TierStats. open_loads, open_bytes: of tickets in use. state: the remaining fields."""
        rate = self.read_rate()
        with self._lock:
            return TierStats(
                loads=dict(self.loads),
                saves=dict(self.saves),
                bytes_loaded=self.bytes_loaded,
                bytes_saved=self.bytes_saved,
                evicted=self.evicted,
                read_rate=rate,
                open_loads=open_loads,
                open_bytes=open_bytes,
                **state,
            )


class TransferWorker(Generic[Job]):
    """One thread that runs jobs in order. The queue is bounded by the total cost of its jobs; `put` never waits.

    `run(None)` is called at the start and whenever `interval` seconds pass without a job.
    """

    def __init__(self, name: str, run: Callable[[Job | None], None], max_cost: int, interval: float | None = None):
        self._run = run
        self._max_cost = max_cost
        self._interval = interval
        self._queue: deque[tuple[Job, int]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.cost = 0  # of queued and running jobs
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job, cost: int) -> bool:
        """Queues a job. False if the queue is full or closed; an empty queue accepts a job of any cost."""
        with self._changed:
            if self._closing or (self.cost and self.cost + cost > self._max_cost):
                return False
            self._queue.append((job, cost))
            self.cost += cost
            self._changed.notify()
            return True

    def _loop(self) -> None:
        self._guarded(None)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing, self._interval)
                if self._closing and not self._queue:
                    return
                job, cost = self._queue.popleft() if self._queue else (None, 0)
            self._guarded(job)
            del job  # do not keep it alive while waiting for the next one
            with self._changed:
                self.cost -= cost

    def _guarded(self, job: Job | None) -> None:
        try:
            self._run(job)
        except Exception:
            log.exception("a transfer failed; the thread continues")

    def close(self, timeout: float) -> list[Job]:
        """Runs queued jobs until the timeout (seconds). Returns the jobs dropped after that."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            dropped = [job for job, _ in self._queue]
            self._queue.clear()
        self._thread.join(1.0)
        return dropped


class HeldLoads:
    """Loads by ticket of parts that are in memory: each is done when it starts. Thread-safe."""

    def __init__(self, meter: TransferMeter):
        self._meter = meter
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._open: dict[int, memoryview | Failed] = {}

    def start(self, block: StoredBlock, held: StoredBlock | None, take: Callable[[], memoryview]) -> int:
        """Returns a ticket. held: the block whose part has the wanted name, None without one; `take` gives its bytes,
        and is called if it is the same block. Else the load fails as foreign or missing."""
        if held == block:
            result: memoryview | Failed = take()
        else:
            result = Failed("foreign" if held else "missing")
            self._meter.load(result.reason)
        with self._lock:
            ticket = next(self._tickets)
            self._open[ticket] = result
            return ticket

    def poll(self, ticket: int) -> memoryview | Failed:
        """The result of `start`; ends the ticket."""
        with self._lock:
            result = self._open.pop(ticket)
        if not isinstance(result, Failed):
            self._meter.loaded(result.nbytes, 0.0)
        return result

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        with self._lock:
            self._open.pop(ticket, None)

    def stats(self, num_parts: int, num_bytes: int) -> TierStats:
        """See KVConnector.stats. num_parts, num_bytes: that are held."""
        with self._lock:
            open_loads = len(self._open)
            open_bytes = sum(r.nbytes for r in self._open.values() if not isinstance(r, Failed))
        return self._meter.stats(open_loads, open_bytes, num_parts=num_parts, num_bytes=num_bytes)


class _Load:
    __slots__ = ("block", "cancelled", "group", "num_bytes", "result")

    def __init__(self, block: StoredBlock, group: int, num_bytes: int):
        self.block = block
        self.group = group
        self.num_bytes = num_bytes
        self.cancelled = False
        self.result: memoryview | Failed | None = None


class Loads:
    """Runs loads by ticket, one at a time. At most `max_bytes` are being loaded or waiting to be fetched.

    `read(block, group)` returns the bytes of a part or raises Unusable.
    """

    def __init__(self, name: str, read: Callable[[StoredBlock, int], memoryview], max_bytes: int, meter: TransferMeter):
        self._read = read
        self._max_bytes = max_bytes
        self._meter = meter
        self._tickets = itertools.count(1)
        self._open: dict[int, _Load] = {}
        self._done = threading.Condition()
        self.num_bytes = 0  # of open tickets
        # The bound is `num_bytes`, not the queue's cost: a cancelled load stays queued until its turn, at no cost.
        self._worker: TransferWorker[_Load] = TransferWorker(name, self._run, max_cost=1 << 62)

    def __len__(self) -> int:
        return len(self._open)

    def start(self, block: StoredBlock, group: int, num_bytes: int) -> int:
        """Queues a load of `num_bytes`. Returns its ticket; the load fails at once if the bound is reached."""
        load = _Load(block, group, num_bytes)
        with self._done:
            ticket = next(self._tickets)
            self._open[ticket] = load
            full = self.num_bytes > 0 and self.num_bytes + num_bytes > self._max_bytes
            self.num_bytes += num_bytes
        if full or not self._worker.put(load, 1):
            self._finish(load, self._failed("busy" if full else "closed"))
        return ticket

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """See KVConnector.poll."""
        with self._done:
            load = self._open[ticket]
            if timeout > 0:
                self._done.wait_for(lambda: load.result is not None, timeout)
            if load.result is not None:
                self._forget(ticket)
            return load.result

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        with self._done:
            if ticket in self._open:
                self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        load = self._open.pop(ticket)
        load.cancelled = True
        self.num_bytes -= load.num_bytes

    def _failed(self, reason: str) -> Failed:
        self._meter.load(reason)
        return Failed(reason)

    def _run(self, load: _Load | None) -> None:
        if load is None or load.cancelled:
            return
        try:
            begin = time.perf_counter()
            result = self._read(load.block, load.group)
            self._meter.loaded(result.nbytes, time.perf_counter() - begin)
        except Unusable as e:
            result = self._failed(e.reason)
        except Exception:
            log.exception("a load failed")
            result = self._failed("error")
        self._finish(load, result)

    def _finish(self, load: _Load, result: memoryview | Failed) -> None:
        with self._done:
            load.result = result
            self._done.notify_all()

    def close(self) -> None:
        """Ends the thread. Loads that have not begun fail."""
        for load in self._worker.close(0.0):
            self._finish(load, self._failed("closed"))
