"""HostedClient: one client of an EngineHost, with its requests.

Each request has a task that moves its deltas from the engine to the outbox; the outbox goes out in one frame when the
event loop has run all of these tasks, or later while the client is late. The deltas of a request that is paused, or
has much in the outbox, stay in the engine, which pauses it in turn. So a slow client costs bounded memory, and the
others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace

from kvasir.engine import remote_wire as wire
from kvasir.engine.board import MAX_NOTE, Board
from kvasir.engine.cache_fan import CacheFan
from kvasir.engine.client import Engine, EngineState, Sleeps
from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.engine.remote_checks import check_drain, check_request
from kvasir.engine.streams import entries
from kvasir.engine.wire import to_fault
from kvasir.errors import EngineLost, InvalidRequest, KvasirError, QueueFull
from kvasir.kv.changes import CacheChanges
from kvasir.types import AdapterInfo, Request

MAX_OPEN = 16384  # requests of a client
MAX_QUERIES = 64  # of a client at once
UNSENT = 1024  # entries of a request in the outbox, see streams.FULL
PULSE_SECONDS = 1.0
SHUTTING_DOWN = "the engine's host is shutting down"
WATCH_SECONDS = 0.2  # between two looks at the engine's state


class _Open:
    """A request. unsent: entries in the outbox. goes: cleared while its deltas stay in the engine."""

    __slots__ = ("goes", "id", "paused", "task", "unsent")

    def __init__(self, id: str):
        self.id = id
        self.unsent = 0
        self.paused = False
        self.goes = asyncio.Event()
        self.goes.set()
        self.task: asyncio.Task | None = None


class HostedClient:
    """refuses: it gets no further requests."""

    def __init__(self, link: FrameSocket, engine: Engine, instance: str, number: int, fan: CacheFan, board: Board):
        """instance: of the host. number: makes the ids of its requests unique among all clients. fan: of the engine's
        prefix cache. board: of all clients."""
        self.refuses = False
        self._link = link
        self._engine = engine
        self._fan = fan
        self._board = board
        self._instance = instance
        self._number = number
        self._open: dict[int, _Open] = {}
        self._last = 0  # the greatest handle
        self._out = wire.Outbox()
        self._flush_due = False
        self._work: set[asyncio.Task] = set()
        self._queries = 0
        self._told: tuple[EngineState, bool] | None = None
        self._adapters: tuple[AdapterInfo, ...] | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Serves the client until it leaves. Raises FrameError."""
        self._send(wire.Welcome(self._engine.info, self._engine.summary, self._instance))
        self._tell()
        watching = asyncio.ensure_future(self._watch())
        try:
            while True:
                body = await self._link.read(wire.MAX_FRAME, wire.SILENT_SECONDS)
                self._take(decoded(wire.from_client, body))
                if self._link.late:
                    await self._link.drain()
        finally:
            self._fan.leave(self._report)
            self._board.leave(self._note)
            watching.cancel()
            work = [watching, *self._work, *(one.task for one in self._open.values() if one.task)]
            self._open.clear()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    # -- to the client -----------------------------------------------------------------------------------------

    def _send(self, message: wire.FromHost) -> None:
        self._link.write(wire.encode(message))

    def _report(self, changes: CacheChanges) -> None:
        if not self._link.late:
            self._send(wire.CacheReport(changes))

    def _note(self, note: bytes) -> None:
        if not self._link.late:
            self._send(wire.NoteLeft(note))

    async def _watch(self) -> None:
        """Tells the client what changes, and sends signs of life."""
        quiet = 0.0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            quiet += WATCH_SECONDS
            if self._tell() or quiet >= wire.BEAT_SECONDS:
                quiet = 0.0
                self._send(wire.Beat(*self._told) if self._told else wire.Beat())

    def _tell(self) -> bool:
        """Sends the adapters and the engine's state, if they have changed; returns whether it sent the state."""
        if (adapters := self._engine.adapters) != self._adapters:
            self._adapters = adapters
            self._send(wire.AdapterList(adapters))
        own = EngineState("restarting", SHUTTING_DOWN) if self.refuses else self._engine.state
        if (state := (own, self._engine.ended)) == self._told:
            return False
        self._told = state
        self._send(wire.Beat(*state))
        return True

    def _soon(self) -> None:
        """Lets the outbox go out after the tasks that are ready now."""
        if not self._flush_due:
            self._flush_due = True
            if self._link.late:
                self._do(self._flush_later())
            else:
                asyncio.get_running_loop().call_soon(self._flush_now)

    async def _flush_later(self) -> None:
        try:
            await self._link.drain()
        except FrameError:
            return self._link.abort()
        self._flush_now()

    def _flush_now(self) -> None:
        self._flush_due = False
        if self._out:
            self._send(self._out.take())
            for one in self._open.values():
                if one.unsent:
                    one.unsent = 0
                    if not one.paused:
                        one.goes.set()

    async def flush(self) -> None:
        """Sends what is in the outbox, if the client reads."""
        self._flush_now()
        with contextlib.suppress(FrameError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._link.drain()

    # -- from the client ---------------------------------------------------------------------------------------

    def _take(self, message: wire.FromClient) -> None:
        match message:
            case wire.Submit(handle, request):
                self._submit(handle, request)
            case wire.Abort(handle, index):
                self._abort(handle, index)
            case wire.Pause(handle, whether):
                if one := self._open.get(handle):
                    one.paused = whether
                    one.goes.clear() if whether else one.goes.set()
            case wire.FollowCache():
                self._fan.follow(self._report)
            case wire.LeaveNote(note):
                if len(note) > MAX_NOTE:
                    raise FrameError(f"a note of {len(note)} bytes")
                self._board.leave_note(self._note, note)
            case wire.Ask(number) | wire.Sleep(number) | wire.LoadAdapter(number) | wire.UnloadAdapter(number):
                if self._queries >= MAX_QUERIES:
                    raise FrameError(f"more than {MAX_QUERIES} queries at once")
                self._queries += 1
                self._do(self._answer(number, message))

    def _do(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _submit(self, handle: int, request: Request) -> None:
        if not self._last < handle < 2**63:
            raise FrameError("a handle that is not greater than those before")
        self._last = handle
        try:
            if self.refuses:
                raise EngineLost(SHUTTING_DOWN, deaths=request.deaths, lives=request.lives)
            if len(self._open) >= MAX_OPEN:
                raise QueueFull(f"this client has {MAX_OPEN} requests open", "try again later")
            check_request(self._engine.info, request)
        except KvasirError as error:
            return self._send(wire.Fault(handle, 0, to_fault("", error)))
        one = self._open[handle] = _Open(f"c{self._number}.{handle}-{request.id}")
        one.task = asyncio.ensure_future(self._pump(handle, one, replace(request, id=one.id)))

    def _abort(self, handle: int, index: int | None) -> None:
        one = self._open.get(handle)
        if one is None:
            return
        if index is not None:
            return self._do(self._engine.abort(one.id, index))
        del self._open[handle]
        assert one.task is not None
        self._work.add(one.task)
        one.task.add_done_callback(self._work.discard)
        one.task.cancel()

    async def _pump(self, handle: int, one: _Open, request: Request) -> None:
        """Moves the deltas of a request from the engine to the outbox."""
        try:
            async with aclosing(self._engine.submit(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if self._open.get(handle) is not one:
                        return
                    self._out.add(handle, delta)
                    self._soon()
                    one.unsent += entries(delta)
                    if one.unsent >= UNSENT:
                        one.goes.clear()
                    if not one.goes.is_set():
                        await one.goes.wait()
        except KvasirError as error:
            self._fail(handle, one, error)
        except Exception as error:
            self._fail(handle, one, KvasirError(f"the engine failed: {type(error).__name__}"))
            raise
        finally:
            if self._open.get(handle) is one:
                del self._open[handle]

    def _fail(self, handle: int, one: _Open, error: KvasirError) -> None:
        if self._open.get(handle) is one:
            self._flush_now()  # what came before
            self._send(wire.Fault(handle, 0, to_fault("", error)))

    async def _answer(self, number: int, query: wire.FromClient) -> None:
        try:
            answer = await self._find(number, query)
        except KvasirError as error:
            answer = wire.Fault(0, number, to_fault("", error))
        finally:
            self._queries -= 1
        self._send(answer)

    async def _find(self, number: int, query: wire.FromClient) -> wire.Answer:
        engine = self._engine
        match query:
            case wire.Ask(what="stats"):
                return wire.Answer(number, stats=await engine.stats())
            case wire.Ask(what="look"):
                return wire.Answer(number, snapshot=await engine.look())
            case wire.Ask(what="pulse"):
                return wire.Answer(number, alive=await engine.alive(PULSE_SECONDS))
            case wire.Ask(what="reset_prefix_cache"):
                return wire.Answer(number, freed=await engine.reset_prefix_cache())
            case wire.Sleep(drain=drain) if isinstance(engine, Sleeps):
                await engine.sleep(check_drain(drain))
                self._tell()
                return wire.Answer(number)
            case wire.Ask(what="wake_up") if isinstance(engine, Sleeps):
                await engine.wake_up()
                self._tell()
                return wire.Answer(number)
            case wire.LoadAdapter(_, name, path, replaces, pinned):
                info = await engine.load_adapter(name, path, replace=replaces, pinned=pinned)
                self._tell()
                return wire.Answer(number, adapter=info)
            case wire.UnloadAdapter(_, name):
                await engine.unload_adapter(name)
                self._tell()
                return wire.Answer(number)
            case _:
                raise InvalidRequest("an unknown query", "run the same version of Kvasir on both sides")
