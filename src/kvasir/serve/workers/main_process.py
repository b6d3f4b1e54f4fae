"""MainProcess owns what a server with several API workers has once: the engine with its journal and its supervision,
limits of keys, adapters, stored records, and metrics.

clients --- one port --- worker 1 ... N      HTTP, TLS, keys, templates, tokenizers, text of streams
                             |
                             | engine.sock   ids of requests and tokens (engine/host.py)
                             | main.sock     limits, adapters, reports (worker_link.py); whole requests (relay.py)
                             |
                       main process ------ engine process

Each worker has a socket of its own on the port and listens once it is ready; the kernel divides the connections between
those that listen. The main process holds the port with a socket that never listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.engine.host import EngineHost
from kvasir.engine.sockets import make_socket_path, remove_socket
from kvasir.errors import ConfigError
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.http.asgi import settle
from kvasir.serve.http.drain import DrainGate
from kvasir.serve.server import GRACE, Announce, bind, opening, print_line
from kvasir.serve.telemetry.reports import WorkerReport, total_of
from kvasir.serve.upkeep import Upkeep
from kvasir.serve.workers import messages
from kvasir.serve.workers.process import ApiProcess
from kvasir.serve.workers.relay import serve_relayed
from kvasir.serve.workers.spec import MAX_WORKERS
from kvasir.serve.workers.worker_link import WorkerLink

log = logging.getLogger("kvasir.serve")

LEARN_SECONDS = 2.0  # for workers to take over changed adapters
MAIN_SOCKET = "main.sock"


class Spec(Protocol):
    """Makes the line that a worker is told at its start. listener: descriptor of its socket."""

    def __call__(self, number: int, listener: int, *, engine: Path, main: Path) -> bytes: ...


class MainProcess:
    """Serves a catalogue of one model with `count` API workers."""

    def __init__(self, catalogue: OneModel, count: int, module: str, spec: Spec, hang_seconds: float):
        """module: that of a worker, see ApiProcess. Raises ConfigError."""
        if not 1 <= count <= MAX_WORKERS:
            raise ConfigError(f"{count} API workers", f"expected 1 to {MAX_WORKERS}")
        self._catalogue = catalogue
        self._count, self._module, self._spec, self._hang = count, module, spec, hang_seconds
        self._links: dict[int, WorkerLink] = {}
        self._gone: list[WorkerReport] = []  # of ended workers, as one report
        self._workers: list[ApiProcess] = []
        self._tasks: set[asyncio.Task] = set()
        self._version = 0
        self._told: messages.ShelfState | None = None
        self._signalled = asyncio.Event()

    async def serve(self, announce: Announce = print_line) -> None:
        """From the start of the engine until SIGTERM or SIGINT. Raises KvasirError."""
        settings = self._catalogue.settings
        async with contextlib.AsyncExitStack() as stack:
            holder = stack.enter_context(bind(settings))
            share(holder)
            app = self.app = create_app(self._catalogue)
            app.state.reports, app.state.abort = self._reports, self._abort
            engine_path = make_socket_path()
            main_path = engine_path.parent / MAIN_SOCKET
            stack.callback(_remove, main_path, engine_path)
            for number in range(self._count):
                spec = functools.partial(self._spec, number, engine=engine_path, main=main_path)
                self._workers.append(ApiProcess(self._module, spec, lambda: another(holder), self._hang))
            upkeep = Upkeep(app, settings, on_signal=self._signal)
            running = [asyncio.ensure_future(worker.run()) for worker in self._workers]
            stack.push_async_callback(settle, *running)
            await self._catalogue.start()
            stack.push_async_callback(self._catalogue.stop)
            await stack.enter_async_context(upkeep.running())
            await stack.enter_async_context(self._hosting(engine_path, main_path))
            with self._handling_signals():
                await self._until_served(running)
                announce(await opening(self._catalogue, holder.getsockname()[1]))
                await self._signalled.wait()
                await self._end(app.state.drain_gate, upkeep, running)

    @contextlib.asynccontextmanager
    async def _hosting(self, engine_path: Path, main_path: Path) -> AsyncIterator[None]:
        [serving] = self._catalogue.loaded()
        host = EngineHost(serving.front.engine)
        await host.listen_unix(engine_path)
        server = await asyncio.start_unix_server(self._accept, main_path)
        os.chmod(main_path, 0o600)
        try:
            yield
        finally:
            server.close()
            await settle(*self._tasks)
            await host.close()

    async def _until_served(self, running: list[asyncio.Task]) -> None:
        """Returns when all workers accept connections, or a signal came. Raises ConfigError if one cannot start."""
        serving = asyncio.ensure_future(asyncio.gather(*(worker.serving.wait() for worker in self._workers)))
        stopped = asyncio.ensure_future(self._signalled.wait())
        try:
            await asyncio.wait([serving, stopped, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                if task.done():
                    task.result()
        finally:
            await settle(serving, stopped)

    async def _end(self, gate: DrainGate, upkeep: Upkeep, running: list[asyncio.Task]) -> None:
        """As a server of one process ends: requests drain, then the engine ends, then the connections close."""
        gate.close()
        await upkeep.end_batches()
        for worker in self._workers:
            worker.end()
        drained = asyncio.ensure_future(_all(gate.empty(), *running))
        try:
            if not await self._done(drained, self._catalogue.settings.drain):
                log.warning("requests are still running; aborting them")
                await self._catalogue.stop()
                await self._done(drained, 3 * GRACE)
        finally:
            await settle(drained)
            for worker in self._workers:
                worker.kill()

    async def _done(self, work: asyncio.Future, seconds: float) -> bool:
        """Waits for work; a further signal skips that."""
        self._signalled.clear()
        forced = asyncio.ensure_future(self._signalled.wait())
        try:
            await asyncio.wait([work, forced], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if forced.done():
                for worker in self._workers:
                    worker.end()
            return work.done()
        finally:
            await settle(forced)

    # -- workers -----------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connection(FrameSocket(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, link: FrameSocket) -> None:
        try:
            if not link.is_own_user:
                return
            begun = decoded(messages.first, await link.read(messages.MAX_FRAME, self._hang))
            if isinstance(begun, messages.Head):
                await serve_relayed(self.app, link, begun, self._synced)
            elif 0 <= begun.number < self._count:
                await self._follow(begun.number, link)
        except (FrameError, OSError) as error:
            log.debug("a connection of a worker has ended: %s", error)
        except Exception:
            log.exception("a connection of a worker failed")
        finally:
            await link.close()

    async def _follow(self, number: int, link: FrameSocket) -> None:
        """Serves the link of a worker until it ends."""
        worker = self._workers[number]
        [serving] = self._catalogue.loaded()
        worker.heard()
        one = WorkerLink(
            link, self._catalogue.quotas, serving.front.adapters, self._synced, worker.heard, worker.serving.set
        )
        self._links[number] = one
        one.send(self._shelf_state())
        try:
            await one.run()
        finally:
            if self._links.get(number) is one:
                del self._links[number]
            if one.report:
                self._gone = [total_of(one.report.ended, self._gone)]

    def _signal(self, kind: signal.Signals) -> None:
        for worker in self._workers:
            worker.signal(kind)

    async def _abort(self, name: str | None) -> int:
        """Aborts requests by name in all processes; see OpenRequests.abort."""
        own = self.app.state.open_requests.abort(name)
        return sum(await asyncio.gather(own, *(link.abort(name) for link in self._links.values())))

    async def _reports(self) -> list[WorkerReport]:
        """Those of all workers, including ended ones."""
        reports = await asyncio.gather(*(link.ask_report() for link in self._links.values()))
        return [*self._gone, *(report for report in reports if report)]

    # -- adapters ----------------------------------------------------------------------------------------------

    def _shelf_state(self) -> messages.ShelfState:
        """The adapters; with a new version if they have changed."""
        [serving] = self._catalogue.loaded()
        shelf = serving.front.adapters
        defaults, always = shelf.scales
        now = messages.ShelfState(self._version, shelf.known, dict(shelf.options), defaults, always)
        if now != self._told:
            self._version += 1
            self._told = messages.ShelfState(self._version, now.known, now.options, defaults, always)
        assert self._told is not None
        return self._told

    async def _synced(self) -> None:
        """Returns when all workers have the adapters, or do not answer."""
        before, state = self._version, self._shelf_state()
        if self._version != before:
            for link in self._links.values():
                link.send(state)
        waiting = [link.has_learnt(state.version) for link in self._links.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEARN_SECONDS):
                await asyncio.gather(*waiting)

    # -- signals -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _handling_signals(self):
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGTERM, signal.SIGINT)
        for kind in kinds:
            loop.add_signal_handler(kind, self._signalled.set)
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)


def share(holder: socket.socket) -> None:
    """Lets further sockets use the address of a bound one. It was bound alone, so the address was free. Raises
    ConfigError where the system cannot share a port."""
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except (AttributeError, OSError) as error:
        raise ConfigError(f"API workers cannot share the port: {error}", "leave --api-workers out") from None


def another(holder: socket.socket) -> socket.socket:
    """A further socket on the same address, which does not listen yet. Raises OSError."""
    sock = socket.socket(holder.family, holder.type, holder.proto)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(holder.getsockname())
    except BaseException:
        sock.close()
        raise
    return sock


async def _all(*work) -> None:
    await asyncio.gather(*work, return_exceptions=True)


def _remove(main_path: Path, engine_path: Path) -> None:
    main_path.unlink(missing_ok=True)
    remove_socket(engine_path)
