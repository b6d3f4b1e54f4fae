"""Work: runs the lines of a batch through the routes of the application; completed lines never run again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Set
from pathlib import Path
from typing import Any

from kvasir.batch_statistics import BatchStats
from kvasir.errors import LimitExceeded
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.http.asgi import settle
from kvasir.serve.http.faults import NotFound
from kvasir.serve.records.batches.call import Caller, CallResult, retry_pause
from kvasir.serve.records.batches.files import FILE, Files
from kvasir.serve.records.batches.in_flight import InFlight
from kvasir.serve.records.batches.lines import (
    BatchEntry,
    BatchJournal,
    LineTask,
    answered,
    left_out,
    read_tasks,
    to_jsonl,
)
from kvasir.serve.records.batches.run import BatchRun
from kvasir.serve.records.batches.wire import MONTH
from kvasir.serve.records.store import new_id
from kvasir.serve.settings import ServeSettings

log = logging.getLogger("kvasir.serve")

RETRY_SECONDS = 60.0  # after an error of the disk
_LEFT_OUT = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


class BatchWorker:
    """Runs batches: `do` for each, concurrently."""

    def __init__(
        self,
        caller: Caller,
        files: Files,
        save: Callable[[BatchRun], Awaitable[None]],
        settings: ServeSettings,
        key_named: Callable[[str], Key | None],
        quotas: Quotas,
        journals: Path | None,
        in_flight: InFlight,
        stats: BatchStats,
    ):
        """save: stores the state of a batch; raises OSError. key_named: raises KeyError. journals: a folder; None: in
        memory. stats: counted into."""
        self._caller = caller
        self._files = files
        self._save = save
        self._settings = settings
        self._key_named = key_named
        self._quotas = quotas
        self._journals = journals
        self._in_flight = in_flight
        self._stats = stats
        self._reading = asyncio.Lock()  # one file at a time is parsed

    async def do(self, run: BatchRun) -> None:
        """Runs the batch until it or the server ends."""
        journal = BatchJournal(self._journals and self._journals / f"{run.id}.jsonl")
        while True:
            try:
                await asyncio.to_thread(journal.open)
                await self._try(run, journal)
                break
            except asyncio.CancelledError:  # the server shuts down
                await self._close(run, journal)
                raise
            except OSError as error:  # for example, a full disk: completed lines are kept
                log.error("batch %s: %s; retrying in %g seconds", run.id, error, RETRY_SECONDS)
                await self._close(run, journal)
                await asyncio.sleep(RETRY_SECONDS)
        await self._close(run, journal, remove=True)

    async def _try(self, run: BatchRun, journal: BatchJournal) -> None:
        """Runs the batch; errors other than OSError make it fail. Raises OSError."""
        try:
            await self._do(run, journal)
        except OSError:
            raise
        except _KeyGone:
            await self._fail(run, [_error("gone", "there is no such key any more, or it may not run inference")])
        except Exception:
            log.exception("batch %s", run.id)
            await self._fail(run, [_error("server_error", "an internal server error; see the server's log")])

    async def _close(self, run: BatchRun, journal: BatchJournal, remove: bool = False) -> None:
        async with run.writing:
            await asyncio.to_thread(journal.close, remove)

    async def _do(self, run: BatchRun, journal: BatchJournal) -> None:
        batch = run.batch
        try:
            self._key_of(run)
            if batch["status"] == "validating":
                self._files.check_room(run.owner)
            tasks, errors = await self._read(run)
        except (NotFound, LimitExceeded) as error:
            code = "gone" if isinstance(error, NotFound) else "storage_full"
            return await self._fail(run, [_error(code, str(error))])
        if errors:
            return await self._fail(run, errors)
        batch["request_counts"]["total"] = len(tasks)
        if batch["status"] == "validating":
            run.enter("in_progress")
            await self._save(run)
        if batch["status"] == "in_progress":
            await self._run_all(run, tasks, journal)
        elif batch["status"] == "cancelling":
            run.end = "cancelled"
        await self._finalize(run, tasks, journal)

    async def _read(self, run: BatchRun) -> tuple[list[LineTask], list[dict[str, Any]]]:
        async with self._reading:
            data = await self._files.content(run.owner, run.batch["input_file_id"])
            return await asyncio.to_thread(read_tasks, data, run.batch["endpoint"], self._settings)

    async def _run_all(self, run: BatchRun, tasks: list[LineTask], journal: BatchJournal) -> None:
        """Runs the lines until all are done, the completion window is over, or the batch is cancelled; sets
        `run.end`."""
        run.batch["request_counts"] |= {"completed": 0, "failed": 0}
        for entry in await asyncio.to_thread(journal.entries):
            run.count(entry.index, entry.ok)
        if run.batch["status"] == "cancelling":
            run.end = "cancelled"
            return
        left = iter([task for task in tasks if task.index not in run.done])
        run.lines = asyncio.ensure_future(self._run_lines(run, left, journal))
        try:
            await asyncio.wait((run.lines,), timeout=max(0.0, run.batch["expires_at"] - time.time()))
            ended = run.lines.done() and not run.lines.cancelled()
        finally:
            await settle(run.lines)
        if ended:
            run.lines.result()
        run.end = "completed" if ended else "cancelled" if run.batch["status"] == "cancelling" else "expired"

    async def _run_lines(self, run: BatchRun, left: Iterator[LineTask], journal: BatchJournal) -> None:
        try:
            async with self._in_flight.batch() as places, asyncio.TaskGroup() as group:
                for task in left:
                    await places.enter()
                    group.create_task(self._run_one(run, task, journal)).add_done_callback(lambda _: places.leave())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_one(self, run: BatchRun, task: LineTask, journal: BatchJournal) -> None:
        id = new_id("req")
        answer = await self._ask(run, task, id)
        await asyncio.shield(self._write(run, task, answer, journal, id))

    async def _write(self, run: BatchRun, task: LineTask, answer: CallResult, journal: BatchJournal, id: str) -> None:
        async with run.writing:
            entry = await asyncio.to_thread(answered, task, answer.status, answer.body, id)
            await asyncio.to_thread(journal.add, entry)
            run.count(entry.index, entry.ok)
            self._stats.lines["completed" if entry.ok else "failed"] += 1

    def _key_of(self, run: BatchRun) -> Key | None:
        """The current key. Raises _KeyGone."""
        try:
            key = self._key_named(run.owner)
        except KeyError:
            raise _KeyGone from None
        if key is not None and KeyScope.INFERENCE not in key.scopes:
            raise _KeyGone
        return key

    async def _ask(self, run: BatchRun, task: LineTask, id: str) -> CallResult:
        """The response to a line; retries while the server is too busy. Raises _KeyGone."""
        while True:
            async with self._quotas.line(run.owner), self._in_flight.all.one():
                answer = await self._caller.post(run.batch["endpoint"], task.body, self._key_of(run), id)
            if (pause := retry_pause(answer)) is None:
                return answer
            self._stats.lines["retried"] += 1
            await asyncio.sleep(pause)

    async def _finalize(self, run: BatchRun, tasks: list[LineTask], journal: BatchJournal) -> None:
        """Writes the output files. Their ids are saved first, so that they stay the same if this is repeated."""
        batch = run.batch
        async with run.writing:
            entries = await asyncio.to_thread(journal.entries)
        code = _LEFT_OUT.get(run.end or "", _LEFT_OUT["cancelled"])
        good, bad = await asyncio.to_thread(_sorted_out, tasks, entries, code)
        batch["request_counts"] |= {"completed": len(good), "failed": len(bad)}
        batch["usage"] = usage_object([entry.usage for entry in good])
        for name, some in (("output_file_id", good), ("error_file_id", bad)):
            batch[name] = batch[name] or (new_id(FILE) if some else None)
        run.enter("finalizing")
        await self._save(run)
        expires = batch["output_expires_after"]
        for name, some in (("output_file_id", good), ("error_file_id", bad)):
            if batch[name]:
                data = await asyncio.to_thread(to_jsonl, some)
                filename = f"{run.id}_{name.removesuffix('_file_id')}.jsonl"
                seconds = expires["seconds"] if expires else MONTH
                await self._files.put(run.owner, data, filename, "batch_output", seconds, batch[name], beyond=True)
        assert run.end is not None
        run.enter(run.end)
        await self._save(run)

    async def _fail(self, run: BatchRun, errors: list[dict[str, Any]]) -> None:
        run.batch["errors"] = {"object": "list", "data": errors}
        run.enter("failed")
        await self._save(run)


class _KeyGone(Exception):
    """The batch's key does not exist any more, or lost the scope inference."""


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "line": None, "param": None}


def _sorted_out(
    tasks: list[LineTask], entries: list[BatchEntry], code: tuple[str, str]
) -> tuple[list[BatchEntry], list[BatchEntry]]:
    """The successful and the failed entries; tasks without an entry count as failed."""
    done = {entry.index for entry in entries}
    entries = [*entries, *(left_out(task, *code, new_id("req")) for task in tasks if task.index not in done)]
    return [entry for entry in entries if entry.ok], [entry for entry in entries if not entry.ok]


def usage_object(usages: list[tuple[int, int, int, int]]) -> dict[str, Any]:
    given, cached, made, reasoned = (sum(usage[i] for usage in usages) for i in range(4))
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": given + made,
    }


def sweep_journals(folder: Path | None, ids: Set[str]) -> None:
    """Removes the journals of batches that are not in progress, left by a server that ended before removing them.
    Blocks."""
    for path in folder.glob("*.jsonl") if folder else ():
        if path.stem not in ids:
            path.unlink(missing_ok=True)
