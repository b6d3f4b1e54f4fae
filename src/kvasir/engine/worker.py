"""The engine process: `python -m kvasir.engine.worker SOCKET`, started and supervised by ProcessEngine.

Its options come as one line of JSON on standard input, which stays open: when it is closed, the parent is gone and this
process exits. Commands and events pass over one zmq PAIR socket (`wire`). Standard output reports the requests in hand,
one line of JSON each: a string for a request that is being put into the queue, null when it is there, a list for
requests that join the next step.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

from kvasir.engine import wire
from kvasir.engine.adapter_loader import make_adapters
from kvasir.engine.core import EngineCore
from kvasir.engine.sockets import remove_socket
from kvasir.environment import prepare_torch
from kvasir.errors import KvasirError
from kvasir.plan import StepPlan
from kvasir.types import AdapterInfo

log = logging.getLogger("kvasir.engine")

READING = 0.005  # seconds to wait for a command while an adapter is read
QUIET_SECONDS = 0.5  # without work, after which the core may prepare for what no request has needed yet


class EngineWorker:
    """Serves one core over one socket until it is asked to stop."""

    def __init__(self, socket: zmq.Socket, core: EngineCore):
        self.socket = socket
        self.core = core
        core.plan_listener = self._announce_joins
        self._reader = ThreadPoolExecutor(1, "kvasir-adapter-reader")
        self._readings: dict[int, Future[AdapterInfo]] = {}  # by number of the question
        self._is_warm = False
        self._busy_until = time.monotonic()

    def send(self, event: wire.Event) -> None:
        """Sends an event to the parent process."""
        self.socket.send(wire.encode(event))

    def _announce_joins(self, plan: StepPlan) -> None:
        if plan.joined:
            rows = {j.row for j in plan.joined}
            _announce([s.request.id for s in self.core.scheduler.running if s.row in rows])

    def run(self) -> None:
        """Serves until it is asked to stop. Raises what the core raises; the core is closed in any case."""
        try:
            while self._take_commands():
                added = self.core.advance()
                if added:
                    self.send(wire.Deltas.of(added))
                if changes := self.core.cache_changes():
                    self.send(wire.CacheReport(changes))
                self._busy_until = time.monotonic()
        finally:
            self._reader.shutdown(cancel_futures=True)
            self.core.close()

    def _take_commands(self) -> bool:
        """Runs all queued commands; if there is nothing to compute, waits for a command or a deadline. False if the
        worker must stop."""
        while True:
            self._send_adapters()
            idle = not self.core.has_work()
            if idle:
                self.core.rest()  # a leak ends this process; the next process starts clean
                if not self._rest():
                    return True
            elif not self.socket.poll(0):
                return True
            command = wire.decode_command(self.socket.recv())
            if isinstance(command, wire.Stop):
                return False
            self._handle(command)

    def _rest(self) -> bool:
        """Waits for a command; False if a deadline comes first."""
        if not self._is_warm:
            if self._poll(self._busy_until + QUIET_SECONDS - time.monotonic()):
                return True
            self._is_warm = True
            self.core.warm()
        return self._poll(self.core.expires())

    def _poll(self, seconds: float | None) -> bool:
        """Whether a command arrives within `seconds`; None waits without limit."""
        if self._readings:
            seconds = READING if seconds is None else min(seconds, READING)
        return bool(self.socket.poll(None if seconds is None else max(0, math.ceil(seconds * 1000))))

    def _handle(self, command: wire.Command) -> None:
        match command:
            case wire.Add(request):
                _announce(request.id)
                try:
                    self.core.add(request)
                except KvasirError as error:
                    self.send(wire.to_fault(request.id, error))
                _announce(None)
            case wire.Abort(id, index):
                self.core.abort(id, index)
                self.send(wire.Aborted(id))
            case wire.Pause(id, whether):
                self.core.pause(id, whether)
            case wire.FollowCache(contents):
                self.send(wire.CacheReport(self.core.follow_cache(contents)))
            case wire.EngineQuery(number, what):
                self.send(self._answer(number, what))
            case wire.ReadAdapter(number, path):
                self._readings[number] = self._reader.submit(self.core.runner.read_adapter, path)
            case wire.PinAdapter(info):
                self.core.pin_adapter(info)
            case wire.DropAdapter(content):
                self.core.drop_adapter(content)

    def _reset_prefix_cache(self) -> int:
        freed = self.core.reset_prefix_cache()
        if changes := self.core.cache_changes():  # there may be no step for a long time
            self.send(wire.CacheReport(changes))
        return freed

    def _send_adapters(self) -> None:
        """Answers the questions about adapters that have been read."""
        for number in [number for number, reading in self._readings.items() if reading.done()]:
            reading = self._readings.pop(number)
            try:
                self.send(wire.Reply(number, adapter=reading.result()))
            except KvasirError as error:
                self.send(wire.Reply(number, fault=wire.to_fault("", error)))

    def _answer(self, number: int, what: str) -> wire.Reply:
        try:
            if what == "pulse":
                return wire.Reply(number, longest_step=self.core.longest_step)
            if what == "look":
                return wire.Reply(number, snapshot=self.core.look())
            if what == "reset_prefix_cache":
                return wire.Reply(number, freed=self._reset_prefix_cache())
            if what == "check":
                self.core.check()
            return wire.Reply(number, dataclasses.replace(self.core.stats(), pid=os.getpid()))
        except AssertionError as error:
            return wire.Reply(number, error=f"leak: {error}")


def _announce(ids: str | list[str] | None) -> None:
    """Reports requests before the engine starts on them: if they kill the process, they are the suspects.

    A plain write to a pipe is complete when it returns; a message queued in zmq would be lost with this process.
    """
    os.write(sys.stdout.fileno(), msgspec.json.encode(ids) + b"\n")


def build(spec: wire.WorkerSpec, socket: zmq.Socket) -> EngineCore:
    """Builds the core that the spec describes, and reports its progress on the socket. Raises KvasirError."""
    if spec.fake is not None:
        from kvasir.runner.fake import FakeRunner
        from kvasir.sched.scheduler import Scheduler

        options = dict(spec.fake)
        eos = options.pop("eos_ids", ())
        fake = FakeRunner(**options)
        adapters = make_adapters(fake, fake.info)
        return EngineCore(fake, Scheduler(fake.capacity, eos_ids=eos, adapters=adapters), ["fake runner"])
    from kvasir.engine.build import build_core

    assert spec.options is not None

    def progress(done: int, total: int, kernels: bool = False) -> None:
        socket.send(wire.encode(wire.Progress(done, total, kernels)))

    return build_core(spec.options, progress, on_loss=lambda _: os._exit(1))


def end_with_parent(address: str) -> None:
    """Starts a thread that ends this process when standard input ends, and removes the socket if it still exists."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        remove_socket(Path(address.removeprefix("ipc://")))
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="kvasir-parent-watch").start()


def main() -> int:
    """Runs the engine process; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for kind in (signal.SIGINT, signal.SIGTERM):  # terminals and service managers signal all processes at once
        signal.signal(kind, signal.SIG_IGN)  # the parent decides when to stop
    prepare_torch()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.WorkerSpec)
    end_with_parent(sys.argv[1])
    if spec.processors and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec.processors)  # before libraries count processors and start threads
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger, socket.sndhwm = 1000, wire.AHEAD
        socket.reconnect_ivl = 5  # ms: the parent may bind its end later
        socket.connect(sys.argv[1])
        try:
            core = build(spec, socket)
        except KvasirError as error:
            socket.send(wire.encode(wire.to_fault("", error)))
            return 2
        worker = EngineWorker(socket, core)
        worker.send(wire.Ready(core.info, core.summary))
        worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
