"""MainLink: an API worker's end of the link to the main process; and what the worker has instead of the main process's
own: the limits of keys (SharedQuotas), and the adapters (SharedShelf)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvasir.adapters import AdapterOption, check_name
from kvasir.engine.adapter_shelf import AdapterShelf
from kvasir.engine.client import Engine
from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.engine.wire import to_error
from kvasir.errors import EngineDead
from kvasir.serve.auth.keys import Key
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.http.held import Held
from kvasir.serve.telemetry.reports import WorkerReport
from kvasir.serve.workers import messages
from kvasir.types import AdapterInfo

BEAT_SECONDS = 1.0


class MainLink:
    """on_shelf: called with the adapters, at first and whenever they change. report: makes a report. abort: aborts
    requests by name; returns how many there were."""

    def __init__(self, number: int):
        self.on_shelf: Callable[[messages.ShelfState], None] = lambda state: None
        self.report: Callable[[], WorkerReport | None] = lambda: None
        self.abort: Callable[[str | None], Awaitable[int]] | None = None
        self._work: set[asyncio.Task] = set()
        self._number = number
        self._link: FrameSocket | None = None
        self._asked: dict[int, asyncio.Future[messages.Granted | messages.Refused]] = {}
        self._numbers = itertools.count(1)

    async def connect(self, main: Path) -> None:
        """Raises OSError."""
        self._link = FrameSocket(*await asyncio.open_unix_connection(main))
        self.send(messages.Link(self._number))

    async def run(self) -> None:
        """Takes the main process's messages until the connection ends."""
        assert self._link is not None
        beating = asyncio.ensure_future(self._beat())
        try:
            while True:
                self._take(decoded(messages.to_worker, await self._link.read(messages.MAX_FRAME, None)))
        except FrameError as error:
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(EngineDead(f"the server's main process has ended: {error}"))
        finally:
            beating.cancel()
            self._link.abort()
            self._link = None

    async def _beat(self) -> None:
        while True:
            if (report := self.report()) is not None:
                self.send(messages.Alive(report))
            await asyncio.sleep(BEAT_SECONDS)

    async def close(self) -> None:
        """Ends the link after sending what is queued."""
        if self._link is not None:
            await self._link.close()

    def send(self, message: messages.ToMain) -> None:
        if self._link is not None:
            self._link.write(messages.encode(message))

    async def ask(self, question: Callable[[int], messages.ToMain]) -> messages.Granted | messages.Refused:
        """The main process's reply. Raises EngineDead if it has ended."""
        if self._link is None:
            raise EngineDead("the server's main process has ended")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(question(number))
            return await answer
        finally:
            del self._asked[number]

    def _take(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Granted(number) | messages.Refused(number):
                if (answer := self._asked.get(number)) and not answer.done():
                    answer.set_result(message)
            case messages.ShelfState(version):
                self.on_shelf(message)
                self.send(messages.Learnt(version))
            case messages.AskReport(number):
                if (report := self.report()) is not None:
                    self.send(messages.Reported(number, report))
            case messages.AbortNamed(number, name):
                task = asyncio.ensure_future(self._abort(number, name))
                self._work.add(task)
                task.add_done_callback(self._work.discard)

    async def _abort(self, number: int, name: str | None) -> None:
        self.send(messages.Aborted(number, await self.abort(name) if self.abort else 0))


class SharedQuotas(Quotas):
    """The limits of keys, which the main process counts. The accounts here mirror its own, for headers; keys without
    limits are not asked about."""

    def __init__(self, keys: Sequence[Key], link: MainLink, servers: int = 1):
        super().__init__(keys, servers=servers)
        self._main = link
        self._generated: Counter[str] = Counter()

    async def open(self, tenant: str) -> Held:
        if not self.accounts[tenant].is_limited:
            return await super().open(tenant)
        place = _Place(self._main, tenant)
        asking = asyncio.ensure_future(self._ask(tenant, lambda number: messages.OpenPlace(number, tenant)))
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:  # the client has left; the main process may still grant the place
            asking.add_done_callback(lambda task: None if task.cancelled() or task.exception() else place.leave())
            raise
        return place

    async def prompt(self, tenant: str, tokens: int) -> None:
        account = self.accounts.get(tenant)
        if account is not None and account.is_limited:
            await self._ask(tenant, lambda number: messages.Prompt(number, tenant, tokens))

    async def _ask(self, tenant: str, question: Callable[[int], messages.ToMain]) -> None:
        answer = await self._main.ask(question)
        if account := self.accounts.get(tenant):
            account.mirror(answer.buckets)
        if isinstance(answer, messages.Refused):
            raise to_error(answer.error)

    def answer(self, tenant: str, tokens: int) -> None:
        account = self.accounts.get(tenant)
        if account is None or not account.is_limited:
            return
        account.answer(tokens)
        if not self._generated:
            asyncio.get_running_loop().call_soon(self._report)
        self._generated[tenant] += tokens

    def _report(self) -> None:
        """Sends what was generated since the last time, once for all streams of an iteration of the event loop."""
        for tenant, tokens in self._generated.items():
            self._main.send(messages.Generated(tenant, tokens))
        self._generated.clear()


class _Place(Held):
    def __init__(self, link: MainLink, key: str):
        self._link = link
        self._key = key

    def _release(self) -> None:
        self._link.send(messages.ClosePlace(self._key))


class SharedShelf(AdapterShelf):
    """The adapters, which the main process has and loads."""

    def __init__(self, engine: Engine, link: MainLink):
        super().__init__(engine)
        self._main = link
        self._known: tuple[AdapterInfo, ...] = ()
        self._first = asyncio.Event()
        link.on_shelf = self._take

    async def start(self) -> None:
        await self._first.wait()

    @property
    def known(self) -> tuple[AdapterInfo, ...]:
        return self._known

    def _take(self, state: messages.ShelfState) -> None:
        self._known, self.options = state.known, state.options
        self._defaults, self._always = state.defaults, state.always
        self._first.set()

    async def load(self, option: AdapterOption, *, replacing: bool = False) -> AdapterInfo:
        check_name(option.name, "lora_name")
        answer = await self._main.ask(lambda number: messages.LoadOption(number, option, replacing))
        if isinstance(answer, messages.Refused):
            raise to_error(answer.error)
        assert answer.adapter is not None
        return answer.adapter

    async def unload(self, name: str) -> None:
        answer = await self._main.ask(lambda number: messages.UnloadName(number, name))
        if isinstance(answer, messages.Refused):
            raise to_error(answer.error)
