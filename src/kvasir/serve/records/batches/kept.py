"""Stored batches: the operations of clients, the batches in progress, and the expiry of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from kvasir.batch_statistics import BatchStats
from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keyring import KeyRing
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.http.asgi import settle
from kvasir.serve.http.faults import NotFound
from kvasir.serve.records.batches.call import Caller
from kvasir.serve.records.batches.files import Files
from kvasir.serve.records.batches.in_flight import InFlight
from kvasir.serve.records.batches.run import OPEN, Batch, BatchRun
from kvasir.serve.records.batches.wire import BatchRequest
from kvasir.serve.records.batches.work import BatchWorker, sweep_journals
from kvasir.serve.records.store import Records, is_id, new_id, parsed
from kvasir.serve.settings import ServeSettings

WINDOW = 86400  # seconds
RUNNING = 2  # concurrent batches of a key: their lines are in memory


class Batches:
    """All batches of a server, on its event loop. `start` resumes those of an earlier server."""

    def __init__(
        self,
        caller: Caller,
        settings: ServeSettings,
        ring: KeyRing,
        quotas: Quotas,
        rows: Callable[[], Awaitable[int]],
    ):
        """rows: returns how many choices the engines compute at once. Raises ConfigError."""
        folder = settings.data_dir
        self.files = Files(settings, ring.__len__, self.uses)
        self._journals = folder and Path(folder) / "batch-lines"
        self._records = Records(
            folder and folder / "batches", max_count=settings.batch_count, max_bytes=settings.batch_count << 16,
            max_age=settings.stored_days * 86400, pinned=lambda id: id in self._runs,
        )  # fmt: skip
        self._caller = caller
        self._in_flight = InFlight(settings.batch_width, rows)
        self._stats = BatchStats()
        parts = quotas, self._journals, self._in_flight, self._stats
        self._work = BatchWorker(caller, self.files, self._save, settings, ring.named, *parts)
        self._runs: dict[str, BatchRun] = {}
        self._ending = False
        self._places: dict[str, asyncio.Semaphore] = {}  # by owner, limited to RUNNING

    async def start(self) -> None:
        await self.files.start()
        records = [record for data in await self._records.all() if (record := parsed(data))]
        # Batches that were waiting are resumed after those that had started.
        records.sort(key=lambda r: (r["batch"]["status"] == "validating", r["batch"]["created_at"], r["batch"]["id"]))
        for record in records:
            if record["batch"]["status"] in OPEN:
                self._begin(BatchRun(record["owner"], record["batch"], record.get("end")))
        await asyncio.to_thread(sweep_journals, self._journals, set(self._runs))

    async def sweep(self) -> None:
        """Removes expired files and batches of all keys, including removed ones."""
        await self.files.sweep()
        await self._records.sweep()

    async def stop(self) -> None:
        """Stops all work. Unfinished batches, and those created after this, are resumed by the next server."""
        self._ending = True
        await settle(*(run.task for run in self._runs.values() if run.task))

    def close(self) -> None:
        self.files.close()
        self._records.close()

    # -- operations of clients -----------------------------------------------------------------------------------

    async def create(self, owner: str, wire: BatchRequest) -> Batch:
        """Creates a batch. Raises InvalidRequest, NotFound, LimitExceeded, OSError."""
        try:
            file = await self.files.get(owner, wire.input_file_id)
        except NotFound as error:
            error.param = "input_file_id"
            raise
        if file["purpose"] != "batch":
            raise InvalidRequest(f"the file is for {file['purpose']}", "upload it for batch", param="input_file_id")
        self.files.check_room(owner)  # for the output
        now = int(time.time())
        expires = wire.output_expires_after
        batch = {
            "id": new_id("batch"), "object": "batch", "endpoint": wire.endpoint, "errors": None,
            "input_file_id": wire.input_file_id, "completion_window": wire.completion_window, "status": "validating",
            "output_file_id": None, "error_file_id": None, "created_at": now, "in_progress_at": None,
            "expires_at": now + WINDOW, "finalizing_at": None, "completed_at": None, "failed_at": None,
            "expired_at": None, "cancelling_at": None, "cancelled_at": None, "usage": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": wire.metadata,
            "output_expires_after": expires and expires.model_dump(),
        }  # fmt: skip
        return await asyncio.shield(self._take(BatchRun(owner, batch)))

    async def _take(self, run: BatchRun) -> Batch:
        self._runs[run.id] = run  # protects the record and its input file
        try:
            await self._save(run)
        except BaseException:
            del self._runs[run.id]
            raise
        self._begin(run)
        return run.batch

    async def get(self, owner: str, id: str) -> Batch:
        """The batch of this id. Raises NotFound."""
        data = await self._records.get(owner, id) if is_id(id, "batch") else None
        if data is None or (record := parsed(data)) is None:
            raise NotFound(f"there is no batch {id!r:.80}", "it has expired, or belongs to another key")
        return self._now(record["batch"])

    async def all(self, owner: str) -> list[Batch]:
        """The batches of a key, newest first."""
        records = await self._records.all(owner)
        found = await asyncio.to_thread(lambda: [record["batch"] for data in records if (record := parsed(data))])
        return [self._now(batch) for batch in sorted(found, key=lambda b: (b["created_at"], b["id"]), reverse=True)]

    def _now(self, batch: Batch) -> Batch:
        return self._runs[batch["id"]].batch if batch["id"] in self._runs else batch

    async def cancel(self, owner: str, id: str) -> Batch:
        """Cancels a batch. Raises NotFound, InvalidRequest."""
        batch = await self.get(owner, id)
        run = self._runs.get(id)
        if batch["status"] == "validating" and run is not None and not run.begun:
            assert run.task is not None
            run.enter("cancelling")
            run.enter("cancelled")
            await settle(run.task)
            await self._save(run)
            del self._runs[id]
        elif batch["status"] in ("validating", "in_progress") and run is not None:
            run.enter("cancelling")
            await self._save(run)
            if run.lines is not None:
                run.lines.cancel()
        elif batch["status"] not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"the batch is {batch['status']}", "only a running batch can be cancelled")
        return run.batch if run else batch

    async def delete(self, owner: str, id: str) -> None:
        """Deletes a batch that has ended; its files stay. Raises NotFound, InvalidRequest."""
        batch = await self.get(owner, id)
        if batch["status"] in OPEN:
            raise InvalidRequest(f"the batch is {batch['status']}", "cancel it first")
        if (run := self._runs.get(id)) is not None and run.task is not None:
            await asyncio.wait((run.task,))  # it saves its record once more
        await self._records.delete(owner, id)

    def uses(self, file_id: str) -> bool:
        """Whether an unfinished batch reads this file."""
        return any(run.batch["input_file_id"] == file_id for run in self._runs.values())

    @property
    def unfinished(self) -> Mapping[str, BatchRun]:
        """The batches that run or wait for their turn, by id."""
        return MappingProxyType(self._runs)

    @property
    def stats(self) -> BatchStats:
        """The statistics at present."""
        begun = sum(run.begun for run in self._runs.values())
        states = {"running": begun, "waiting": len(self._runs) - begun}
        return replace(self._stats, batches=states, running=self._in_flight.all.taken, places=self._in_flight.all.size)

    # -- in progress ---------------------------------------------------------------------------------------------

    async def _save(self, run: BatchRun) -> None:
        """Saves the batch. Raises OSError; LimitExceeded for a new batch if all stored batches of its key are in
        progress."""
        record = {"owner": run.owner, "batch": run.batch, "end": run.end}
        await self._records.put(run.owner, run.id, msgspec.json.encode(record), beyond=run.task is not None)

    def _begin(self, run: BatchRun) -> None:
        if self._ending:
            self._runs.pop(run.id, None)
            return
        self._runs[run.id] = run
        run.task = asyncio.ensure_future(self._do(run))

    async def _do(self, run: BatchRun) -> None:
        async with self._places.setdefault(run.owner, asyncio.Semaphore(RUNNING)):
            run.begun = True
            await self._work.do(run)
        del self._runs[run.id]
