"""WorkerLink: the main process's end of the link to one API worker. It keeps the worker's open places, and what it
counted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kvasir.engine.adapter_shelf import AdapterShelf
from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.engine.wire import to_fault
from kvasir.errors import KvasirError
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.http.held import Held
from kvasir.serve.telemetry.reports import WorkerReport
from kvasir.serve.workers import messages

ASK_SECONDS = 1.0


class WorkerLink:
    """report: the worker's last."""

    def __init__(
        self,
        link: FrameSocket,
        quotas: Quotas,
        shelf: AdapterShelf,
        changed: Callable[[], Awaitable[None]],
        heard: Callable[[], None],
        serves: Callable[[], None],
    ):
        """changed: returns when all workers have the shelf's adapters. heard: called with each sign of life. serves:
        called when the worker accepts connections."""
        self.report: WorkerReport | None = None
        self._link = link
        self._quotas = quotas
        self._shelf = shelf
        self._changed = changed
        self._heard = heard
        self._places: dict[str, list[Held]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._work: set[asyncio.Task] = set()
        self._serves = serves
        self._learnt = 0  # the version of the adapters that the worker has
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Serves the worker until its connection ends, and then gives its places back. Raises FrameError."""
        try:
            while True:
                body = await self._link.read(messages.MAX_FRAME, None)
                self._heard()
                await self._take(decoded(messages.to_main, body))
        finally:
            for places in self._places.values():
                for place in places:
                    place.leave()
            for task in self._work:
                task.cancel()
            for answer in self._asked.values():
                answer.cancel()
            self._learnt = 1 << 62  # no one waits for it any more
            self._news.set()

    def send(self, message: messages.ToWorker) -> None:
        self._link.write(messages.encode(message))

    async def has_learnt(self, version: int) -> None:
        """Returns when the worker has the adapters of this version, or has left."""
        while self._learnt < version:
            self._news.clear()
            await self._news.wait()

    async def ask_report(self) -> WorkerReport | None:
        """The worker's report as of now, or its last one."""
        self.report = await self._ask(messages.AskReport) or self.report
        return self.report

    async def abort(self, name: str | None) -> int:
        """Aborts the worker's requests of this name, or all (None); returns how many there were."""
        return await self._ask(lambda number: messages.AbortNamed(number, name)) or 0

    async def _ask(self, question: Callable[[int], messages.ToWorker]) -> Any:
        """The worker's reply, None if it does not reply."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(question(number))
            async with asyncio.timeout(ASK_SECONDS):
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            return None
        finally:
            del self._asked[number]

    async def _take(self, message: messages.ToMain) -> None:
        match message:
            case messages.Serving():
                self._serves()
            case messages.Alive(report):
                self.report = report
            case messages.Reported(number, result) | messages.Aborted(number, result):
                if (answer := self._asked.get(number)) and not answer.done():
                    answer.set_result(result)
            case messages.Learnt(version):
                self._learnt = version
                self._news.set()
            case messages.OpenPlace(number, key) | messages.Prompt(number, key):
                self._do(self._answer(number, key, message))
            case messages.ClosePlace(key):
                if places := self._places.get(key):
                    places.pop().leave()
            case messages.Generated(key, tokens):
                self._quotas.answer(key, tokens)
            case messages.LoadOption() | messages.UnloadName():
                self._do(self._change(message))
            case messages.Link():
                raise FrameError("a second greeting")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _answer(self, number: int, key: str, asked: messages.OpenPlace | messages.Prompt) -> None:
        self.send(await self._grant(number, key, asked))

    async def _grant(self, number: int, key: str, asked: messages.OpenPlace | messages.Prompt) -> messages.ToWorker:
        account = self._quotas.accounts.get(key)
        if account is None:  # a key that only one of the processes knows yet, or still
            if isinstance(asked, messages.OpenPlace):
                self._places.setdefault(key, []).append(Held())
            return messages.Granted(number)
        try:
            if isinstance(asked, messages.OpenPlace):
                self._places.setdefault(key, []).append(await self._quotas.open(key))
            else:
                await self._quotas.prompt(key, asked.tokens)
        except KvasirError as error:
            return messages.Refused(number, to_fault("", error), account.buckets)
        return messages.Granted(number, account.buckets)

    async def _change(self, asked: messages.LoadOption | messages.UnloadName) -> None:
        try:
            if isinstance(asked, messages.LoadOption):
                info = await self._shelf.load(asked.option, replacing=asked.replacing)
                answer: messages.ToWorker = messages.Granted(asked.number, adapter=info)
            else:
                await self._shelf.unload(asked.name)
                answer = messages.Granted(asked.number)
        except KvasirError as error:
            answer = messages.Refused(asked.number, to_fault("", error))
        await self._changed()
        self.send(answer)
