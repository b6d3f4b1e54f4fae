"""RemoteEngine: an engine in another process or on another machine, served there by an EngineHost.

When the connection breaks, its requests end with EngineLost, and it is made again, with growing pauses. Whoever has a
journal of them (a fleet) continues them elsewhere; the host aborts them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from kvasir.engine import remote_wire as wire
from kvasir.engine.client import EngineState
from kvasir.engine.cumulative_stats import CumulativeStats
from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.engine.streams import Streams
from kvasir.engine.wire import to_error
from kvasir.errors import ConfigError, EngineDead, EngineLost, KvasirError, QueueFull
from kvasir.fields import MAX_N
from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request

log = logging.getLogger("kvasir.engine")

CONNECT_SECONDS = 10.0
START_PAUSE = 0.5  # seconds between two attempts of `start`
# Facts of an engine that may change when it starts again: they depend on the free memory, or are measured or drawn.
OWN = frozenset(("grade", "weight_bytes_read", "max_model_len", "adapter_bytes", "engine_id", "transfers_at"))
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0
MOST_QUEUED = 64 << 20  # bytes of requests that the host has not read


@dataclass(frozen=True, slots=True)
class HostAddress:
    """Where an EngineHost listens: a Unix socket, or a host and port, with TLS or without."""

    path: Path | None = None
    host: str = ""
    port: int = 0
    tls: bool = True

    @classmethod
    def parse(cls, text: str) -> HostAddress:
        """From unix:/path, tls://host:port or tcp://host:port. Raises ConfigError."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme == "unix" and parts.path and not parts.netloc:
            return cls(Path(parts.path))
        plain = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
        if parts.scheme in ("tls", "tcp") and parts.hostname and port and plain:
            return cls(None, parts.hostname, port, parts.scheme == "tls")
        raise ConfigError(f"{text!r:.200} is no address of an engine", "expected tls://host:port or unix:/path")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


class RemoteEngine:
    """Implements `Engine`. A connection that breaks is made again, unless `lasts` is false: then the engine has
    ended."""

    def __init__(
        self,
        address: HostAddress,
        key: str = "",
        tls: ssl.SSLContext | None = None,
        *,
        lasts: bool = True,
        patience: float = 0.0,
        server_name: str = "",
    ):
        """key: over TCP, the host's. tls: of an address with TLS; None for one that trusts the system's authorities.
        patience: seconds for which `start` tries again while nothing answers. server_name: what the host's certificate
        names, if not its address."""
        self.address = address
        self._key = key
        self._tls = tls
        self._server_name = server_name
        self._lasts = lasts
        self._patience = patience
        self._instance = ""
        self._cumulative = CumulativeStats()
        self._link: FrameSocket | None = None
        self._follower: Callable[[CacheChanges], None] | None = None  # of the prefix cache
        self._reader: Callable[[bytes], None] | None = None  # of notes
        self._streams = Streams(self._set_paused, merges=True)
        self._handles: dict[str, int] = {}
        self._fates: dict[str, tuple[int, int]] = {}  # deaths and lives of each request
        self._ids: dict[int, str] = {}
        self._next = itertools.count(1)
        self._questions: dict[int, asyncio.Future[wire.Answer]] = {}
        self._tasks: list[asyncio.Task] = []
        self._info: ModelInfo | None = None
        self._stopped = False
        self._host: tuple[EngineState, bool] = (EngineState("starting"), False)  # what the host says
        self._down: EngineState | None = EngineState("starting")  # while there is no connection
        self.adapters: tuple[AdapterInfo, ...] = ()
        self.summary: tuple[str, ...] = ()

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def ended(self) -> bool:
        return self._info is not None and (self._stopped or self._host[1] or (not self._lasts and not self._link))

    @property
    def state(self) -> EngineState:
        return self._down or self._host[0]

    # -- the protocol ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises EngineDead if nothing answers, ConfigError if the host refuses this client."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                await self._connect()
                break
            except EngineDead:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(START_PAUSE)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._beat())]

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        if self._link is None:
            raise self._lost(self._reason, request.deaths, request.lives)
        if self._link.queued > MOST_QUEUED:
            raise QueueFull("the engine's host reads too slowly", "try again later")
        stream = self._streams.run(request, self._send_request, self._cancel)
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
            self._forget(request.id)

    def _forget(self, request_id: str) -> int | None:
        """Removes the handle of a request that has ended."""
        self._fates.pop(request_id, None)
        handle = self._handles.pop(request_id, None)
        if handle is not None:
            del self._ids[handle]
        return handle

    def _send_request(self, request: Request) -> None:
        handle = next(self._next)
        self._handles[request.id], self._ids[handle] = handle, request.id
        self._fates[request.id] = request.deaths, request.lives
        self._send(wire.Submit(handle, request))

    def _cancel(self, request_id: str) -> None:
        if handle := self._forget(request_id):
            self._send(wire.Abort(handle, None))

    def _set_paused(self, request_id: str, whether: bool) -> None:
        if handle := self._handles.get(request_id):
            self._send(wire.Pause(handle, whether))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        if handle := self._handles.get(request_id):
            self._send(wire.Abort(handle, index))
            self._streams.abort(request_id, range(MAX_N) if index is None else (index,))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        answer = await self._ask(lambda number: wire.LoadAdapter(number, name, path, replace, pinned))
        if answer.adapter is None:
            raise EngineDead("the engine's host does not describe the adapter")
        return answer.adapter

    async def unload_adapter(self, name: str) -> None:
        await self._ask(lambda number: wire.UnloadAdapter(number, name))

    async def reset_prefix_cache(self) -> int:
        return (await self._ask(lambda number: wire.Ask(number, "reset_prefix_cache"))).freed

    async def sleep(self, drain: float = 0.0) -> None:
        await self._ask(lambda number: wire.Sleep(number, drain))

    async def wake_up(self) -> None:
        await self._ask(lambda number: wire.Ask(number, "wake_up"))

    async def stats(self) -> EngineStats:
        answer = await self._ask(lambda number: wire.Ask(number, "stats"))
        return self._cumulative.add(answer.stats or EngineStats())

    async def look(self) -> Snapshot:
        answer = await self._ask(lambda number: wire.Ask(number, "look"))
        if answer.snapshot is None:
            raise EngineDead("the engine's host shows nothing")
        return replace(answer.snapshot, stats=self._cumulative.add(answer.snapshot.stats))

    async def alive(self, timeout: float = 1.0) -> bool:
        try:
            return (await asyncio.wait_for(self._ask(lambda number: wire.Ask(number, "pulse")), timeout)).alive
        except (EngineDead, TimeoutError):
            return False

    async def stop(self, drain: float = 0.0) -> None:
        """Leaves the host, whose engine goes on."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while len(self._streams) and self._link and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("the engine has been stopped")

    async def _ask(self, question: Callable[[int], wire.FromClient]) -> wire.Answer:
        self._need()
        number = next(self._next)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            return await answer
        finally:
            self._questions.pop(number, None)

    # -- the connection ----------------------------------------------------------------------------------------

    def _need(self) -> FrameSocket:
        if self._link is None:
            raise EngineDead(self._reason)
        return self._link

    @property
    def _reason(self) -> str:
        """Why there is no connection."""
        return self._down.reason if self._down and self._down.reason else "the engine is not connected"

    def _lost(self, reason: str, deaths: int, lives: int) -> EngineDead:
        """What a request raises without a connection. deaths, lives: of the request."""
        if self._lasts and not self._stopped:
            return EngineLost(reason, deaths=deaths, lives=lives)
        return EngineDead(reason)

    def follow_cache(self, take: Callable[[CacheChanges], None]) -> None:
        self._follower = take
        self._send(wire.FollowCache())

    @property
    def meeting(self) -> str:
        return self._instance if self._link else ""

    def exchange(self, note: bytes, take: Callable[[bytes], None]) -> None:
        self._reader = take
        self._send(wire.LeaveNote(note))

    def _send(self, message: wire.FromClient) -> None:
        if self._link is not None:
            self._link.write(wire.encode(message))

    async def _connect(self) -> None:
        """Connects and greets. Raises EngineDead, ConfigError."""
        self.address = await self._find()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                link = await self._open()
                try:
                    await self._greet(link)
                except BaseException:
                    link.abort()
                    raise
        except (OSError, TimeoutError, FrameError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
            raise EngineDead(f"the engine at {self.address} cannot be reached: {reason}") from None
        self._link, self._down = link, None
        if self._follower:
            self._send(wire.FollowCache())

    async def _find(self) -> HostAddress:
        """Where the host is now. Raises EngineDead, ConfigError."""
        return self.address

    async def _open(self) -> FrameSocket:
        address = self.address
        if address.path:
            link = FrameSocket(*await asyncio.open_unix_connection(address.path))
            if not link.is_own_user:
                link.abort()
                raise FrameError("it belongs to another user")
            return link
        if not address.tls:
            return FrameSocket(*await asyncio.open_connection(address.host, address.port))
        self._tls = self._tls or ssl.create_default_context()
        name = self._server_name or address.host
        return FrameSocket(
            *await asyncio.open_connection(address.host, address.port, ssl=self._tls, server_hostname=name)
        )

    async def _greet(self, link: FrameSocket) -> None:
        link.write(wire.encode(wire.Hello(wire.VERSION, self._key)))
        first = decoded(wire.from_host, await link.read(wire.MAX_FRAME, None))
        if isinstance(first, wire.Fault):
            raise to_error(first.error)
        if not isinstance(first, wire.Welcome):
            raise FrameError("it did not greet")
        if self._info is not None and (wrong := _difference(first.info, self._info)):
            what = "now serves another model, or computes it otherwise"
            raise ConfigError(f"the engine at {self.address} {what}: its {wrong} differs")
        self._info, self.summary = first.info, first.summary
        if self._instance and self._instance != first.instance:
            self._cumulative.end()
        self._instance = first.instance
        for _ in range(2):  # its adapters and its state: known before the first request
            message = decoded(wire.from_host, await link.read(wire.MAX_FRAME, None))
            self._take(message)
            if isinstance(message, wire.Beat):
                break

    async def _run(self) -> None:
        """Takes messages; connects again when the connection breaks."""
        while True:
            assert self._link is not None
            reason = "the engine failed"
            try:
                while True:
                    body = await self._link.read(wire.MAX_FRAME, wire.SILENT_SECONDS)
                    self._take(decoded(wire.from_host, body))
            except FrameError as error:
                reason = f"the connection to the engine broke: {error}"
            except Exception:
                log.exception("a message of the engine's host could not be handled")
            self._lose(reason)
            if not self._lasts:
                return
            log.error("%s (%s); connecting again", reason, self.address)
            await self._reconnect(reason)

    async def _reconnect(self, reason: str) -> None:
        pause = FIRST_PAUSE
        for attempt in itertools.count(1):
            self._down = EngineState("restarting", reason, attempt, time.time() + pause)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
            try:
                return await self._connect()
            except KvasirError as error:
                reason = error.message
                log.warning("attempt %d to reach the engine again failed: %s", attempt, reason)

    def _lose(self, reason: str) -> None:
        """Ends all requests and queries."""
        link, self._link = self._link, None
        if link is None:
            return
        link.abort()
        self._down = EngineState("restarting" if self._lasts and not self._stopped else "ended", reason)
        for request_id, (deaths, lives) in self._fates.items():
            self._streams.fail(request_id, self._lost(reason, deaths, lives + 1))
        self._fates.clear()
        self._handles.clear()
        self._ids.clear()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT_SECONDS)
            self._send(wire.Beat())

    def _take(self, message: wire.FromHost) -> None:
        match message:
            case wire.Steps():
                self._deliver(message)
            case wire.CacheReport(changes) if self._follower:
                self._follower(changes)
            case wire.NoteLeft(note) if self._reader:
                self._reader(note)
            case wire.Fault(handle, number, error):
                if request_id := self._ids.get(handle):
                    self._streams.fail(request_id, to_error(error))
                elif (answer := self._questions.get(number)) and not answer.done():
                    answer.set_exception(to_error(error))
            case wire.Answer(number):
                if (answer := self._questions.get(number)) and not answer.done():
                    answer.set_result(message)
            case wire.AdapterList(adapters):
                self.adapters = adapters
            case wire.Beat(state, ended) if state is not None:
                self._host = state, ended

    def _deliver(self, steps: wire.Steps) -> None:
        try:
            deltas = [*wire.deltas(steps, self._ids)]
        except ValueError as error:
            raise FrameError(f"malformed results: {error}") from None
        self._streams.deliver(deltas)


def _difference(a: ModelInfo, b: ModelInfo) -> str:
    """The first fact that must stay the same for a running server and has not, or ""."""
    names = (f.name for f in fields(ModelInfo) if f.name not in OWN)
    return next((name for name in names if getattr(a, name) != getattr(b, name)), "")
