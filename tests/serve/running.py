"""Servers for tests: in process behind httpx, or on a socket in a thread. Each proves that nothing was
left."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx

from kvasir.engine.front import Front
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import Catalogue, OneModel
from kvasir.serve.server import Server, bind
from kvasir.serve.settings import ServeSettings
from kvasir.types import Delta, FinishReason, Request, TokenLogprob
from tests.serve.fakes import EchoEngine, byte_tokenizer, template


def make_front(engine: EchoEngine | None = None, **runner) -> Front:
    return Front(engine or EchoEngine(**runner), byte_tokenizer(), template())


def out_of_time(after: int) -> Front:
    """A front whose engine gives `after` tokens before the deadline passes."""
    front = make_front()

    async def submit(request: Request) -> AsyncIterator[Delta]:
        logprobs = () if request.params.logprobs is None else (TokenLogprob(ord("a"), -0.5, 1),)
        for _ in range(after):
            yield Delta(request.id, token_ids=(ord("a"),), logprobs=logprobs)
        yield Delta(request.id, finish_reason=FinishReason.TIMEOUT)

    front.engine.submit = submit  # type: ignore[method-assign]
    return front


async def assert_idle(front: Front, patience: float = 30.0) -> None:
    """The engine holds nothing but the prefixes that requests asked to be kept (`cache_ttl`), and the front half
    follows nothing. patience: seconds to wait while nothing changes; an engine that still works may take longer."""
    clock, seen, deadline = asyncio.get_running_loop().time, None, 0.0
    while any((now := await _held(front))[:-1]):
        if now != seen:
            seen, deadline = now, clock() + patience
        assert clock() < deadline, f"running, waiting, paused, open requests and steps so far: {now}"
        await asyncio.sleep(0.01)
    await front.engine.check()  # type: ignore[attr-defined]


async def _held(front: Front) -> tuple[int, ...]:
    stats = await front.stats()
    return stats.running, stats.waiting, stats.paused, front.meter.open_requests, stats.steps


@asynccontextmanager
async def client(
    settings: ServeSettings = ServeSettings(),
    front: Front | None = None,
    headers: dict | None = None,
    **runner,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this event loop; `client.app` is the application, `client.front` its front half."""
    front = front or make_front(**runner)
    await front.start()
    app = create_app(OneModel(front, settings))
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
            http.front, http.app = front, app  # type: ignore[attr-defined]
            yield http
        await assert_idle(front)
    finally:
        await front.stop()


@dataclass
class Live:
    url: str
    catalogue: Catalogue
    loop: asyncio.AbstractEventLoop
    server: Server

    @property
    def front(self) -> Front:
        """Of a server of one model."""
        [serving] = self.catalogue.loaded()
        return serving.front

    def ask(self, coroutine):
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(240)


@contextmanager
def live(settings: ServeSettings | None = None, front: Front | None = None, **runner) -> Iterator[Live]:
    """A server on a loopback port."""
    front = front or make_front(**runner)
    with live_on(lambda: OneModel(front, settings or ServeSettings(port=0))) as server:
        yield server
        server.ask(assert_idle(front))


@contextmanager
def live_on(make: Callable[[], Catalogue]) -> Iterator[Live]:
    """A server of the application that `make` returns, in a separate thread."""
    ready = threading.Event()
    found: list[Live] = []

    async def main() -> None:
        catalogue = make()
        with bind(catalogue.settings) as listener:
            await catalogue.start()
            server = Server(catalogue)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            found.append(Live(url, catalogue, asyncio.get_running_loop(), server))
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            ready.set()
            await serving
            await catalogue.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    while not ready.wait(0.05):
        assert thread.is_alive(), "the server ended before it was there"
    try:
        yield found[0]
    finally:
        found[0].server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def events(body: str) -> list[dict]:
    """The JSON events of a whole stream; asserts that it has its end mark."""
    parts = [p for p in body.split("\n\n") if p and not p.startswith(":")]
    assert all(p.startswith("data: ") for p in parts), parts
    assert parts[-1] == "data: [DONE]"
    return [json.loads(p.removeprefix("data: ")) for p in parts[:-1]]
