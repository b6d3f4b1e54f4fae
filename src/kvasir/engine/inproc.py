"""InProcessEngine: the engine in a thread of the caller's process. For `AsyncLLM`, tests and single-process
machines."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

from kvasir.engine.adapters import Adapters, TakesAdapters
from kvasir.engine.client import ASLEEP, EngineState
from kvasir.engine.core import EngineCore
from kvasir.engine.rest import asleep
from kvasir.engine.streams import Streams
from kvasir.engine.wire import AHEAD
from kvasir.errors import EngineDead, KvasirError
from kvasir.fields import MAX_N
from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request, Tokens, each_delta

log = logging.getLogger("kvasir.engine")

LAST_STEP = 60.0  # seconds for which `stop` waits for the step in progress
EXIT_SECONDS = 5.0  # the same at interpreter exit, for engines that were never stopped


class InProcessEngine(TakesAdapters):
    """Runs `build()` and then its core in a thread of its own."""

    def __init__(self, build: Callable[[], EngineCore]):
        self._build = build
        self._ahead = threading.Semaphore(AHEAD)
        self._commands: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._streams = Streams(self._set_paused)
        self._adapters = Adapters(
            self._read_adapter,
            lambda info: self._commands.put(lambda core: core.pin_adapter(info)),
            lambda content: self._commands.put(lambda core: core.drop_adapter(content)),
        )
        self._questions: set[asyncio.Future] = set()  # that the thread has not answered
        self._follower: Callable[[CacheChanges], None] | None = None  # of the prefix cache
        self._thread: threading.Thread | None = None
        self._launched = False  # whether the thread is one that `start` has not waited for yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._info: ModelInfo | None = None
        self.summary: tuple[str, ...] = ()
        self._dead: str | None = "the engine has not been started"
        self._asleep = False
        self._changing = asyncio.Lock()  # while it falls asleep or wakes up

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def ended(self) -> bool:
        return self._dead is not None and self._info is not None

    @property
    def state(self) -> EngineState:
        if self._dead is not None:
            return EngineState("ended", self._dead)
        return EngineState(ASLEEP) if self._asleep else EngineState()

    def launch(self) -> None:
        """Starts the thread, which builds the core while the caller prepares the rest; `start` waits for it. Call
        `abandon` if `start` is not reached."""
        self._commands = queue.SimpleQueue()
        self._ahead = threading.Semaphore(AHEAD)
        self._ready: Future[tuple[ModelInfo, tuple[str, ...]]] = Future()
        self._ready.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._thread = threading.Thread(target=self._run, args=(self._ready,), name="kvasir-engine", daemon=True)
        _started.add(self)
        self._thread.start()
        self._launched = True

    def abandon(self) -> None:
        """Ends a thread that was launched and not started, once the core is built; any other is left alone."""
        if self._launched:
            self._launched = False
            self._commands.put(None)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._built()
        self._dead = None
        self._adapters.pin_again()

    async def _built(self) -> None:
        """Waits for the core, whose thread is launched unless it has been. Raises what its construction raises."""
        if not self._launched:
            self.launch()
        self._launched = False
        try:
            self._info, self.summary = await asyncio.wrap_future(self._ready)
        except BaseException:
            self._commands.put(None)  # the unusable core ends itself once it is built
            raise

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._asleep:
            raise asleep()
        request = self._adapters.names.resolve(request)
        stream = self._streams.run(request, self._send, self._abort)
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _abort(self, request_id: str, index: int | None = None) -> None:
        def abort(core: EngineCore) -> None:
            core.abort(request_id, index)
            self._call(self._streams.left, request_id)

        self._streams.leaves(request_id)
        self._commands.put(abort)

    def _send(self, request: Request) -> None:
        if self._dead is not None:  # since `submit`
            raise EngineDead(self._dead)
        if self._asleep:
            raise asleep()

        def add(core: EngineCore) -> None:
            try:
                core.add(request)
            except KvasirError as error:
                self._call(self._streams.fail, request.id, error)

        self._commands.put(add)

    def _set_paused(self, request_id: str, whether: bool) -> None:
        self._commands.put(lambda core: core.pause(request_id, whether))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self._abort(request_id, index)
        self._streams.abort(request_id, range(MAX_N) if index is None else (index,))

    async def _read_adapter(self, path: str) -> AdapterInfo:
        runner = await self._ask(lambda core: core.runner)
        return await asyncio.to_thread(runner.read_adapter, path)

    async def reset_prefix_cache(self) -> int:
        return await self._ask(self._reset_prefix_cache)

    def _reset_prefix_cache(self, core: EngineCore) -> int:
        freed = core.reset_prefix_cache()
        self._report_cache(core)  # there may be no step for a long time
        return freed

    async def stats(self) -> EngineStats:
        return self._named(dataclasses.replace(await self._ask(EngineCore.stats), pid=os.getpid()))

    async def look(self) -> Snapshot:
        found = await self._ask(EngineCore.look)
        return dataclasses.replace(found, stats=self._named(found.stats))

    async def alive(self, timeout: float = 1.0) -> bool:
        try:
            await asyncio.wait_for(self._ask(lambda core: core.steps), timeout)
        except (TimeoutError, EngineDead):
            return False
        return True

    def follow_cache(self, take: Callable[[CacheChanges], None]) -> None:
        self._follower = take
        self._commands.put(lambda core: self._call(take, core.follow_cache()))

    async def check(self) -> None:
        """Checks that nothing leaked. Raises AssertionError."""
        await self._ask(EngineCore.check)

    async def _ask(self, question: Callable):
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._asleep:
            raise asleep()
        answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self._questions.add(answer)

        def command(core: EngineCore) -> None:
            try:
                self._call(_settle, answer, question(core), None)
            except BaseException as error:
                self._call(_settle, answer, None, error)

        self._commands.put(command)
        try:
            return await answer
        finally:
            self._questions.discard(answer)

    async def sleep(self, drain: float = 0.0) -> None:
        async with self._changing:
            if self._asleep:
                return
            if self._dead is not None:
                raise EngineDead(self._dead)
            self._asleep = True
            await self._drain(drain)
            self._streams.fail_all(asleep())
            await asyncio.to_thread(self.end, LAST_STEP)

    async def wake_up(self) -> None:
        async with self._changing:
            if not self._asleep or self._dead is not None:
                return
            await self._built()
            self._streams.all_left()  # aborts that came too late for the core before
            self._asleep = False
            self._adapters.pin_again()
            if self._follower:
                self.follow_cache(self._follower)

    async def _drain(self, seconds: float) -> None:
        """Waits for the end of all requests, for up to `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while len(self._streams) and loop.time() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self, drain: float = 0.0) -> None:
        if self._thread is None:
            return
        await self._drain(drain)
        self._dead = "the engine has been stopped"
        self._streams.fail_all(EngineDead(self._dead))
        await asyncio.to_thread(self.end, LAST_STEP)
        self._end_waiting(self._dead)

    def _end_waiting(self, reason: str) -> None:
        """Ends with EngineDead everything that waits for the engine's thread, which has ended."""
        self._streams.fail_all(EngineDead(reason))
        self._streams.all_left()
        for answer in self._questions:
            _settle(answer, None, EngineDead(reason))

    def end(self, seconds: float) -> None:
        """Asks the engine's thread to end and waits for up to `seconds`. After that the thread is left alone: the
        memory of its step stays allocated until the step ends."""
        if self._thread is None:
            return
        self._launched = False
        self._commands.put(None)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return
        log.warning(
            "the engine's last step has not ended after %g seconds; its memory stays allocated until it does", seconds
        )

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _run(self, ready: Future) -> None:
        try:
            core = self._build()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result((core.info, core.summary))
        try:
            self._serve(core)
        except BaseException as error:
            log.exception("the engine died")
            self._dead = f"the engine died: {type(error).__name__}: {error}"
            self._call(self._end_waiting, self._dead)
        finally:
            _close(core)

    def _serve(self, core: EngineCore) -> None:
        while self._take_commands(core):
            added = core.advance()
            if added:
                self._deliver(added)
            self._report_cache(core)

    def _report_cache(self, core: EngineCore) -> None:
        if (changes := core.cache_changes()) and self._follower:
            self._call(self._follower, changes)

    def _deliver(self, added: list[Delta | Tokens]) -> None:
        """Hands the results of a step to the event loop. Blocks while the loop has AHEAD unread results, so that the
        engine learns of a full queue before it computes much more."""
        assert self._loop is not None, "work comes after `start`"
        while not self._ahead.acquire(timeout=0.05) and self._loop.is_running():
            pass
        self._call(self._take, added)

    def _take(self, added: list[Delta | Tokens]) -> None:
        self._ahead.release()
        self._streams.deliver(each_delta(added))

    def _take_commands(self, core: EngineCore) -> bool:
        """Runs all queued commands; if there is nothing to compute, waits for a command or a deadline. False if the
        engine must end."""
        while True:
            idle = not core.has_work()
            if idle:
                core.rest()
            try:
                command = self._commands.get(idle, core.expires() if idle else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)

    def _call(self, function: Callable, *args: object) -> None:
        if self._loop is None:  # before `start` there is nothing to report to
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            log.debug("the event loop is closed; dropping %s", function)


_started: weakref.WeakSet[InProcessEngine] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends engines that were never stopped: no step may run during interpreter shutdown."""
    deadline = time.monotonic() + EXIT_SECONDS
    for engine in list(_started):
        engine.end(max(0.0, deadline - time.monotonic()))


def _close(core: EngineCore) -> None:
    try:
        core.close()
    except BaseException:
        log.exception("the engine could not be closed cleanly")


def _settle(future: asyncio.Future, value: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
