"""Mapper: one engine that answers rows, with a checkpoint of what is finished. Of a Ray dataset, one in each actor."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvasir.adapters import Lora, given_adapters, parse_adapters
from kvasir.config import EngineOptions, check
from kvasir.data.checkpoint import Checkpoint, content_key
from kvasir.data.identity import model_identity
from kvasir.data.rows import RowAnswer, answer_of, failed, params_of, plain, request_of
from kvasir.engine.division import divided, processors_of
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_tasks, load_text
from kvasir.engine.loop_thread import LoopThread
from kvasir.engine.outputs import raise_fault
from kvasir.engine.subprocess import ProcessEngine
from kvasir.environment import user_path
from kvasir.errors import ConfigError, InvalidRequest, KvasirError, QueueFull
from kvasir.fleet.engine import FleetEngine
from kvasir.types import SamplingParams

log = logging.getLogger("kvasir.data")

PAUSE = 0.2  # seconds before work is tried again that found a queue full
T = TypeVar("T")


class Mapper:
    """A class for `Dataset.map_batches`. It adds the columns of `RowAnswer` to each row; a row that cannot be answered
    gets an `error`, and the job continues.

    The engine is a process of its own: if it dies, it is started again, and its requests continue with the same tokens.
    """

    def __init__(
        self,
        model: str,
        column: str = "prompt",
        *,
        sampling_params: SamplingParams | None = None,
        params_column: str | None = None,
        chat: bool = False,
        lora_column: str | None = None,
        checkpoint: str | Path | None = None,
        replicas: int = 1,
        **options: Any,
    ):
        """column: of the prompts: texts, token ids, or messages. params_column: of objects with fields that replace
        those of `sampling_params`. chat: texts are messages of a user. lora_column: of names of adapters. checkpoint:
        a folder of finished rows, which are not computed again. replicas: engines that divide the machine. options:
        fields of EngineOptions. Raises KvasirError."""
        self._column, self._params_column, self._lora_column = column, params_column, lora_column
        self._params, self._chat = sampling_params or SamplingParams(), chat
        options["lora"] = list(given_adapters(options.get("lora"))) or None
        try:
            self.options = EngineOptions(model=model, **options)
        except TypeError as error:
            raise ConfigError(str(error).rpartition("() ")[2], "see kvasir.EngineOptions") from None
        check(self.options)
        if replicas < 1:
            raise ConfigError(f"replicas is {replicas}", "expected 1 or more")
        self._replicas = replicas
        self._checkpoint = None if checkpoint is None else Checkpoint(user_path(checkpoint))
        self._under_way: dict[bytes, asyncio.Future[RowAnswer]] = {}
        self._closed = False
        self._loop = LoopThread("kvasir-data")
        try:
            self._front, self._identity, self._window = self._loop.wait(self._start())
        except BaseException:
            self._loop.end()
            raise

    async def _start(self) -> tuple[Front, str, asyncio.Semaphore]:
        engine = engine_of(self.options, self._replicas)
        engine.launch()
        try:
            text = await asyncio.to_thread(load_text, self.options)
            adapters = (*load_tasks(self.options), *parse_adapters(self.options.lora or ()))
            front = Front(engine, *text, adapters=adapters)
        except BaseException:
            engine.abandon()
            raise
        await front.start()
        try:
            identity = await asyncio.to_thread(model_identity, self.options, front.info)
        except BaseException:
            await front.stop()
            raise
        return front, identity, asyncio.Semaphore(max(1, self._most // self._params.n))

    @property
    def _most(self) -> int:
        """Choices that may wait in the engines."""
        return self.options.max_waiting * self._replicas

    # -- rows --------------------------------------------------------------------------------------------------

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch, a dict of columns, with the columns of the answers. Raises InvalidRequest for a missing column,
        EngineDead if the engine cannot be started any more."""
        names = [name for name in (self._column, self._params_column, self._lora_column) if name is not None]
        if missing := next((name for name in names if name not in batch), None):
            raise InvalidRequest(f"the dataset has no column {missing!r}", f"it has {', '.join(batch)}")
        columns = [batch[name] for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        found = await asyncio.wrap_future(self._loop.run(self._all(rows)))
        columns = {name: [answer.columns[name] for answer in found] for name in RowAnswer.__struct_fields__}
        return {**batch, **columns}

    async def _all(self, rows: Iterable[Mapping[str, Any]]) -> list[RowAnswer]:
        if self._checkpoint is not None:
            self._checkpoint.refresh()  # rows of actors that have died may come to this one
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(row)) for row in rows]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The rows with the columns of their answers, in order; as many are under way as may wait in the engine."""
        most, open_rows = self._most, deque[tuple[Mapping[str, Any], Future[RowAnswer]]]()
        source = iter(rows)
        try:
            while True:
                while len(open_rows) < most and (row := next(source, None)) is not None:
                    open_rows.append((row, self._loop.run(self._answer(row))))
                if not open_rows:
                    return
                row, future = open_rows.popleft()
                yield {**row, **future.result().columns}
        finally:
            for _, future in open_rows:
                future.cancel()

    async def _answer(self, row: Mapping[str, Any]) -> RowAnswer:
        """Raises EngineDead if there is no engine any more, OSError if the checkpoint cannot be used."""
        several = self._params.n > 1
        try:
            if not isinstance(row, Mapping) or self._column not in row:
                raise InvalidRequest(f"the row has no column {self._column!r}", "name the column of the prompts")
            params = params_of(self._params, plain(row.get(self._params_column)) if self._params_column else None)
            lora: Lora | None = (row.get(self._lora_column) or None) if self._lora_column else None
            async with self._window:
                prompt = plain(row[self._column])
                request, content = await _unless_full(lambda: request_of(self._front, prompt, params, self._chat, lora))
                return await self._kept(content_key((self._identity, content)), request)
        except KvasirError as error:
            if self._front.engine.ended:
                raise
            return failed(error, several)
        except OSError:
            raise
        except Exception as error:  # no row may end the job
            log.exception("a row failed")
            return failed(f"an internal error: {error!r:.200}", several)

    async def _kept(self, key: bytes, request: Any) -> RowAnswer:
        """The answer from the checkpoint, from a row with the same key that is under way, or from the engine."""
        if self._checkpoint is not None and (kept := self._checkpoint.get(key)) is not None:
            with suppress(msgspec.MsgspecError):  # otherwise it was not written by this class
                return msgspec.json.decode(kept, type=RowAnswer)
        if (other := self._under_way.get(key)) is not None:
            return await asyncio.shield(other)
        mine = self._under_way[key] = asyncio.ensure_future(self._compute(key, request))
        try:
            return await mine
        finally:
            del self._under_way[key]

    async def _compute(self, key: bytes, request: Any) -> RowAnswer:
        answers = await _unless_full(lambda: self._front.complete(request))
        for answer in answers:
            raise_fault(answer)
        found = answer_of(request, answers)
        if self._checkpoint is not None:
            self._checkpoint.add(key, msgspec.json.encode(found))
        return found

    # -- its end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the engine; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.wait(self._front.stop())
        finally:
            self._loop.end()
            if self._checkpoint is not None:
                self._checkpoint.close()

    def __enter__(self) -> Mapper:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _unless_full(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is tried again while a queue is full: a job may wait."""
    while True:
        try:
            return await work()
        except QueueFull:
            await asyncio.sleep(PAUSE)


def engine_of(options: EngineOptions, replicas: int) -> ProcessEngine | FleetEngine:
    """The engine, which is not started: a process, or several that divide the machine."""
    if replicas == 1:
        return ProcessEngine(options)
    processors = processors_of(options, replicas)

    def make(index: int) -> ProcessEngine:
        own = divided(options, replicas, index)
        return ProcessEngine(own, hands_over=True, processors=processors[index])

    return FleetEngine(make, replicas, max_waiting=options.max_waiting)
