"""ProcessEngine: a supervised engine in a separate process. No torch on this side.

A process that dies is restarted without limit: at once for the first three attempts in a row, then with growing pauses.
The journal decides which requests go to the new process; since results are exact, a running stream resumes where it
stopped. A hung process (watchdog.py) is killed, which counts as a death.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import IO

import msgspec
import zmq
import zmq.asyncio

from kvasir.config import EngineOptions
from kvasir.engine import wire
from kvasir.engine.adapters import Adapters, TakesAdapters
from kvasir.engine.client import ASLEEP, EngineState
from kvasir.engine.cumulative_stats import CumulativeStats
from kvasir.engine.journal import Journal
from kvasir.engine.progress import Progress
from kvasir.engine.receiver import Receiver
from kvasir.engine.rest import Rest, asleep
from kvasir.engine.sockets import make_socket_path, remove_socket
from kvasir.engine.spawning import close_pipes, end, exited, pause_after, spawn
from kvasir.engine.starting import Killed, first_events
from kvasir.engine.streams import Streams
from kvasir.engine.watchdog import Watchdog
from kvasir.engine.watching import watch
from kvasir.errors import EngineDead, EngineLost, QueueFull
from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request

log = logging.getLogger("kvasir.engine")

STABLE_SECONDS = 60.0  # of running, after which the count of attempts is reset
HANG_SECONDS = 20.0
LOAD_FACTOR = 3  # how much longer a process may be idle while it loads: disks may be remote


class ProcessEngine(TakesAdapters):
    """`options` for a model, or `fake` options for the FakeRunner. `progress` is called during the start with bytes of
    loaded weights, then with numbers of compiled kernels (`kernels` is true)."""

    follows_contents = False  # whether followers of the prefix cache get the contents of blocks

    def __init__(
        self,
        options: EngineOptions | None = None,
        *,
        fake: dict | None = None,
        progress: Progress | None = None,
        max_waiting: int = 1024,
        hang_seconds: float = HANG_SECONDS,
        patient: bool = False,
        hands_over: bool = False,
        processors: Sequence[int] = (),
    ):
        """hang_seconds: how long the process may owe a reply and be idle. patient: also restart it if it is killed
        during the first start. hands_over: requests that another engine can continue end with EngineLost when the
        process dies. processors: ids of those that the process may use; () for all."""
        self._hands_over = hands_over
        self._hang_seconds = hang_seconds
        self._patient = patient
        self._watchdog = Watchdog(hang_seconds)
        self._state = EngineState("starting")
        self._attempts = 0  # restarts since it last ran for a while
        self._spec = wire.WorkerSpec(options, fake, tuple(processors))
        self._progress = progress
        self._max_waiting = options.max_waiting if options else max_waiting
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._receiver: Receiver | None = None
        self._process: subprocess.Popen | None = None
        self._launched = False  # whether the process is one that `start` has not waited for yet
        self._streams = Streams(self._set_paused, merges=True)
        self._journal = Journal()
        pin, drop = (lambda x, kind=kind: self._command(kind(x)) for kind in (wire.PinAdapter, wire.DropAdapter))
        self._adapters = Adapters(self._read_adapter, pin, drop)
        self._cumulative = CumulativeStats()
        self._follower: Callable[[CacheChanges], None] | None = None  # of the prefix cache
        self._questions: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task] = []
        self._info: ModelInfo | None = None
        self._dead: str | None = "the engine has not been started"
        self._rest: Rest | None = None  # while it is asleep, or falls asleep
        self._ready = False
        self.summary: tuple[str, ...] = ()
        self.restarts = 0

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def ended(self) -> bool:
        return self._dead is not None and self._info is not None

    @property
    def state(self) -> EngineState:
        if self._dead is not None and self._info is not None:
            return EngineState("ended", self._dead)
        return replace(self._state, trying=self._journal.on_trial)

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None before the first start."""
        return self._process.pid if self._process else None

    # -- the protocol ------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Starts the process, which loads the model while the caller prepares the rest; `start` waits for it. Call
        `abandon` if `start` is not reached."""
        self._spawn()
        self._launched = True

    def abandon(self) -> None:
        """Ends a process that was launched and not started; any other is left alone."""
        if not self._launched:
            return
        self._launched = False
        assert self._process is not None and self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # it had not read all
            self._process.stdin.close()
        self._stdout.close()
        remove_socket(self._address)
        self._context.term()

    async def start(self) -> None:
        try:
            await self._first_launch()
        except BaseException:
            self._context.term()
            raise
        self._dead = None
        self._tasks = [asyncio.create_task(self._supervise())]

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        request = self._adapters.names.resolve(request)
        held = self._journal.num_held
        if held and held + request.params.n > self._max_waiting:
            raise QueueFull("the engine is restarting and the queue is full", "try again later")
        stream = self._streams.run(request, self._send, self._cancel)
        timer = None
        if request.deadline is not None:
            timer = asyncio.get_running_loop().call_later(request.deadline, self._end_overdue)
        try:
            async for delta in stream:
                yield delta
        finally:
            if timer:
                timer.cancel()
            await stream.aclose()  # type: ignore[attr-defined]

    def _end_overdue(self) -> None:
        """Ends requests that are held back here beyond their deadline; the engine ends its own."""
        self._streams.deliver(self._journal.overdue())
        self._flush()

    def _send(self, request: Request) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._rest is not None:
            raise asleep()
        if self._hands_over and not self._ready:
            raise EngineLost("the engine is restarting", deaths=request.deaths, lives=request.lives)
        self._journal.add(request)
        self._flush()

    def _cancel(self, request_id: str) -> None:
        self._journal.forget(request_id)
        self._abort(request_id, None)
        self._flush()

    def _abort(self, request_id: str, index: int | None) -> None:
        if self._command(wire.Abort(request_id, index)):
            self._streams.leaves(request_id)

    def _set_paused(self, request_id: str, whether: bool) -> None:
        self._journal.pause(request_id, whether)
        self._command(wire.Pause(request_id, whether))
        self._flush()

    async def abort(self, request_id: str, index: int | None = None) -> None:
        entry = self._journal.entries.get(request_id)
        indices = range(entry.request.params.n) if entry and index is None else (index or 0,)
        for i in list(indices):
            self._journal.abandon(request_id, i)
        self._abort(request_id, index)
        self._streams.abort(request_id, indices)
        self._flush()

    async def _read_adapter(self, path: str) -> AdapterInfo:
        answer = await self._ask(lambda number: wire.ReadAdapter(number, path))
        assert answer.adapter is not None
        return answer.adapter

    async def reset_prefix_cache(self) -> int:
        return (await self._query("reset_prefix_cache")).freed

    async def stats(self) -> EngineStats:
        answer = await self._query("stats")
        assert answer.stats is not None
        return self._named(self._cumulative.add(answer.stats))

    async def look(self) -> Snapshot:
        answer = await self._query("look")
        assert answer.snapshot is not None
        return replace(answer.snapshot, stats=self._named(self._cumulative.add(answer.snapshot.stats)))

    def follow_cache(self, take: Callable[[CacheChanges], None]) -> None:
        self._follower = take
        self._command(wire.FollowCache(self.follows_contents))

    async def check(self) -> None:
        """Checks that nothing leaked in the engine. Raises AssertionError."""
        await self._query("check")

    async def alive(self, timeout: float = 1.0) -> bool:
        try:
            await asyncio.wait_for(self._query("pulse"), timeout)
        except EngineDead:
            return False
        except TimeoutError:
            # It replies between steps, and a step of a large model on a small machine takes long.
            return not self._watchdog.is_frozen
        return True

    async def _query(self, what: str) -> wire.Reply:
        return await self._ask(lambda number: wire.EngineQuery(number, what))

    async def _ask(self, question: Callable[[int], wire.Command]) -> wire.Reply:
        if self._dead is not None or not self._ready:
            raise asleep() if self._rest and not self._dead else EngineDead(self._dead or "the engine is restarting")
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._command(question(number))
            return await answer
        finally:
            self._questions.pop(number, None)

    def _end_questions(self, reason: str) -> None:
        """Ends the questions that the process will not answer."""
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))

    async def sleep(self, drain: float = 0.0) -> None:
        if self._rest is None:
            rest = self._rest = Rest()
            try:
                await self._drain(drain if self._ready else 0.0)
                await self.stats()  # the counters go on from here
            except EngineDead:
                if not rest.begun.is_set():
                    self._rest = None
                    raise
            self._streams.fail_all(asleep())
            for request_id in [*self._journal.entries]:
                self._journal.forget(request_id)
            self._command(wire.Stop())
            await asyncio.to_thread(end, self._process)
        await self._rest.begun.wait()
        if self._dead is not None:
            raise EngineDead(self._dead)

    async def wake_up(self) -> None:
        if self._rest is not None:
            if self._dead is not None:
                raise EngineDead(self._dead)
            await self._rest.wake()

    async def _drain(self, seconds: float) -> None:
        """Waits for the end of all requests, for up to `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while len(self._streams) and self._dead is None and loop.time() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self, drain: float = 0.0) -> None:
        await self._drain(drain)
        self._dead = "the engine has been stopped"
        self._streams.fail_all(EngineDead(self._dead))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_questions(self._dead)
        if self._rest is not None:
            self._rest.begun.set()
        self._command(wire.Stop())
        await asyncio.to_thread(end, self._process)
        close_pipes(self._process)
        self._close_socket()
        self._context.term()

    # -- commands and events -----------------------------------------------------------------------------------

    def _command(self, command: wire.Command) -> bool:
        """Sends a command; returns whether there is an engine to take it."""
        if self._socket is None or not (self._ready or isinstance(command, wire.Stop)):
            return False
        # Do not send through a synchronous shadow socket: it would consume the wake-ups of the asyncio socket.
        # Without a high-water mark the future is done at once.
        self._socket.send(wire.encode(command))
        return True

    def _flush(self) -> None:
        """Sends all requests that the journal releases."""
        if not self._ready:
            return
        for request in self._journal.to_send():
            self._command(wire.Add(request))

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    def _read_stages(self) -> None:
        """Reads from the process's standard output how far requests got in the engine."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._stdout.fileno(), 65536):
                self._partial_line += data
        *lines, self._partial_line = self._partial_line.split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                self._journal.take_report(msgspec.json.decode(line, type=str | list[str] | None))

    def _receive(self, message: bytes) -> None:
        self._watchdog.heard()
        self._handle(wire.decode_event(message))

    def _handle(self, event: wire.Event) -> None:
        match event:
            case wire.Deltas():
                self._streams.deliver([d for d in event.each() if self._journal.take(d)])
                self._flush()
            case wire.ErrorReport(id=request_id):
                self._journal.forget(request_id)
                self._streams.fail(request_id, wire.to_error(event))
                self._flush()
            case wire.Aborted(request_id):
                self._streams.left(request_id)
            case wire.CacheReport(changes) if self._follower:
                self._follower(changes)
            case wire.Reply(number, error=error, fault=fault):
                answer = self._questions.get(number)
                if answer is not None and not answer.done():
                    failed = wire.to_error(fault) if fault else AssertionError(error) if error else None
                    answer.set_exception(failed) if failed else answer.set_result(event)

    # -- the process -------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._address = make_socket_path()
        try:
            self._process = spawn(self._spec, self._address)
        except BaseException:
            remove_socket(self._address)
            raise

    async def _launch(self) -> None:
        """Starts a process, unless one was launched already, and waits until it is ready. Raises KvasirError if it
        cannot start."""
        if not self._launched:
            self._spawn()
        self._launched = False
        assert self._process is not None
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndhwm, self._socket.rcvhwm = 0, wire.AHEAD
        self._socket.bind(f"ipc://{self._address}")
        try:
            watchdog = Watchdog(LOAD_FACTOR * self._hang_seconds) if self._info else None
            ready = await first_events(self._socket, self._process, self._progress, watchdog)
        except BaseException:
            self._process.kill()
            end(self._process)
            close_pipes(self._process)
            self._close_socket()
            raise
        remove_socket(self._address)  # it is connected; a process that is killed later leaves no files
        self._info, self.summary = ready.info, ready.summary
        self._ready = True
        if self._follower:
            self._command(wire.FollowCache(self.follows_contents))
        self._state = EngineState()
        self._partial_line = b""
        os.set_blocking(self._stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._stdout, self._read_stages)
        self._receiver = Receiver(self._socket, self._receive)

    async def _first_launch(self) -> None:
        """Raises KvasirError; for a killed process only if this engine is not patient."""
        while True:
            try:
                return await self._launch()
            except Killed as error:
                if not self._patient:
                    raise
                await self._pause(str(error))

    async def _supervise(self) -> None:
        while True:
            assert self._process is not None
            since, pulse = time.monotonic(), lambda: self._query("pulse")
            watching = asyncio.create_task(watch(self._process, self._watchdog, pulse))
            try:
                status = await exited(self._process)
            finally:
                watching.cancel()
            if time.monotonic() - since > STABLE_SECONDS:
                self._attempts = 0
            await self._bury()
            if self._rest is None:
                log.error("the engine process exited with status %d; restarting it", status)
                await self._relaunch(f"the engine process exited with status {status}")
                self.restarts += 1
            else:
                self._state = EngineState(ASLEEP)
                await self._rest.over(self._launch)
                self._rest = None
            self._adapters.pin_again()
            self._flush()

    async def _bury(self) -> None:
        """Handles the last messages of the dead process, then lets the journal decide about its requests."""
        assert self._receiver is not None
        await self._receiver.end()
        self._read_stages()
        self._ready = False
        self._streams.all_left()
        self._cumulative.end()
        self._close_socket()
        close_pipes(self._process)
        self._end_questions("the engine process exited")
        for request in self._journal.death():
            error = EngineDead(
                "the engine process exited twice while computing this request, the second time with no other request",
                "it will not be retried",
            )
            self._streams.fail(request.id, error)
        self._end_overdue()
        for entry in self._journal.give_up() if self._hands_over else ():
            lost = EngineLost("the engine process exited", deaths=entry.deaths, lives=entry.lives)
            self._streams.fail(entry.request.id, lost)

    async def _relaunch(self, reason: str) -> None:
        """Starts the engine again, without a limit on attempts."""
        while True:
            await self._pause(reason)
            try:
                return await self._launch()
            except Exception as error:
                reason = str(error)
                log.error("attempt %d to restart the engine failed: %s", self._attempts, reason)

    async def _pause(self, reason: str) -> None:
        """Waits before the next attempt, unless deaths are narrowing down a poison request: that takes few attempts."""
        pause = 0.0 if self._journal.on_trial else pause_after(self._attempts)
        self._state = EngineState("restarting", reason, self._attempts, time.time() + pause)
        if pause:
            log.warning("%s; next attempt in %g seconds", reason, pause)
        await asyncio.sleep(pause)
        self._attempts += 1
        log.info("attempt %d to restart the engine", self._attempts)
        self._state = EngineState("starting", reason, self._attempts)

    def _close_socket(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
            remove_socket(self._address)
