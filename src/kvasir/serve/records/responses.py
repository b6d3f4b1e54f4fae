"""Stored responses: by id, belonging to a key; the conversations that they form, and their items.

A record is {"response": the object that the API returns, "input": the items of its request}. The id of an item contains
the id of its response, so items need no index.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from kvasir.errors import InvalidRequest, LimitExceeded
from kvasir.serve.http.faults import NotFound
from kvasir.serve.http.wire import MAX_MESSAGES
from kvasir.serve.records.store import Records, is_id, parsed
from kvasir.serve.settings import ServeSettings

Kept = dict[str, Any]  # an item of a conversation as it is stored

MAX_ENDED = 64  # ended runs per key whose events are kept
READERS = 8  # concurrent readers per key
RUNNING = ("queued", "in_progress")
_ITEM = re.compile(r"[a-z]{1,8}_([0-9a-f]{48})([0-9a-f]{5})")
_LOST = {"code": "server_error", "message": "the server ended before this response was complete"}

Record = dict[str, Any]


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of the index-th item of a response, counting its input and output."""
    return f"{prefix}_{response_id.partition('_')[2]}{index:05x}"


class _Output(msgspec.Struct):
    output: msgspec.Raw


class _Items(msgspec.Struct):
    """The parts of a record that count towards a conversation."""

    input: msgspec.Raw
    response: _Output


class Reach:
    """Limits how much stored data one request may read. left: remaining bytes of items. read: by response and id, the
    items already read for this request; each record is read once."""

    def __init__(self, max_bytes: int):
        self._max_bytes = self._left = max_bytes
        self.read: dict[str, dict[str, Kept]] = {}

    def take(self, data: bytes) -> None:
        """Counts a record before it is decoded. Raises InvalidRequest."""
        items = msgspec.json.decode(data, type=_Items)
        self._left -= memoryview(items.input).nbytes + memoryview(items.response.output).nbytes
        if self._left < 0:
            message = f"what is kept of this conversation has more than {self._max_bytes} bytes"
            raise InvalidRequest(message, "as many as a body may have; begin a new one", "previous_response_id")


class ResponseRun(Protocol):
    """A response generated in the background; see background.BackgroundRun."""

    streamed: bool
    ended: bool

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def status(self) -> str: ...

    @property
    def response(self) -> dict[str, Any]: ...

    async def cancel(self) -> None: ...

    def follow(self, start: int) -> AsyncGenerator[bytes]: ...


class Responses:
    """The stored responses, and those generated in the background: one per application."""

    def __init__(self, records: Records, max_running: int, max_reach: int):
        """max_running: background responses of one key. max_reach: bytes of stored items that one request may read."""
        self.records = records
        self._max_reach = max_reach
        self._max_running = max_running
        self._runs: dict[str, ResponseRun] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}
        # The last ended runs, by owner and id, for clients that reconnect to read on.
        self._ended: dict[str, OrderedDict[str, ResponseRun]] = {}

    @classmethod
    def of(cls, settings: ServeSettings, num_keys: Callable[[], int]) -> Responses:
        """num_keys: returns the current number of keys that share the storage. Raises ConfigError for an unusable
        folder."""
        folder = settings.data_dir and settings.data_dir / "responses"
        records = Records(
            folder,
            max_count=settings.stored_count,
            max_bytes=lambda: settings.stored_bytes // max(1, num_keys()),
            max_age=settings.stored_days * 86400,
        )
        return cls(records, settings.max_background, settings.max_body)

    async def sweep(self) -> None:
        """Removes records that are unused for too long, of all keys, including removed ones."""
        await self.records.sweep()

    def close(self) -> None:
        """Unlocks the folder, for use by another server."""
        self.records.close()

    # -- in the background -------------------------------------------------------------------------------------

    def add(self, run: ResponseRun) -> None:
        """Registers a background run. Raises LimitExceeded."""
        owner = run.owner
        count = sum(other.owner == owner for other in self._runs.values())
        if count >= self._max_running:
            message = f"{count} responses of this key are made in the background"
            raise LimitExceeded(message, f"at most {self._max_running} at once", 5.0)
        self._runs[run.id] = run

    def remove(self, run: ResponseRun) -> None:
        del self._runs[run.id]
        if run.ended and run.streamed:
            ended = self._ended.setdefault(run.owner, OrderedDict())
            ended[run.id] = run
            while len(ended) > MAX_ENDED or sum(other.size for other in ended.values()) > self.records.max_bytes:
                ended.popitem(last=False)

    @property
    def running(self) -> Mapping[str, ResponseRun]:
        """The background runs in progress, by id."""
        return MappingProxyType(self._runs)

    def run(self, id: str) -> ResponseRun | None:
        """The running background run of this response."""
        return self._runs.get(id)

    def events(self, owner: str, id: str) -> ResponseRun | None:
        """The run, running or recently ended, that has the events of this response."""
        return self._runs.get(id) or self._ended.get(owner, {}).get(id)

    # -- kept --------------------------------------------------------------------------------------------------

    async def put(self, owner: str, record: Record) -> None:
        """Stores a record. Raises LimitExceeded, OSError."""
        data = await asyncio.to_thread(msgspec.json.encode, record)
        await self.records.put(owner, record["response"]["id"], data)

    def turn(self, owner: str) -> asyncio.Semaphore:
        """Hold it while a record is in memory for sending; it bounds the number of these per key."""
        return self._turns.setdefault(owner, asyncio.Semaphore(READERS))

    def reach(self) -> Reach:
        return Reach(self._max_reach)

    async def find(self, owner: str, id: str, reach: Reach | None = None) -> Record | None:
        """The record, or None. reach: limit of the request that reads it. Raises InvalidRequest beyond that limit."""
        if not is_id(id, "resp") or (data := await self.records.get(owner, id)) is None:
            return None
        if (record := await asyncio.to_thread(_decoded, data, reach)) is None:
            return None
        response = record["response"]
        if response["status"] in RUNNING:
            run = self._runs.get(id)
            response |= {"status": run.status} if run else {"status": "failed", "error": _LOST}
        return record

    async def delete(self, owner: str, id: str) -> None:
        """Cancels and deletes a response. Raises NotFound."""
        await self.get(owner, id)
        if run := self._runs.get(id):
            await run.cancel()
        self._ended.get(owner, {}).pop(id, None)
        await self.records.delete(owner, id)

    async def get(self, owner: str, id: str) -> Record:
        """The record. Raises NotFound."""
        if (record := await self.find(owner, id)) is None:
            raise NotFound(f"there is no response {id!r:.80}", "it was not stored, or is not kept any more")
        return record

    async def item(self, owner: str, id: str, reach: Reach) -> Kept | None:
        """The stored item of this id, or None. Raises InvalidRequest."""
        found = _ITEM.fullmatch(id)
        if found is None:
            return None
        if (response_id := f"resp_{found[1]}") not in reach.read:
            record = await self.find(owner, response_id, reach)
            items = [*record["input"], *record["response"]["output"]] if record else []
            reach.read[response_id] = {item["id"]: item for item in items}
        return reach.read[response_id].get(id)

    async def history(self, owner: str, id: str | None) -> list[Kept]:
        """The items of a conversation up to and including a response. Raises NotFound, InvalidRequest."""
        turns: list[list[Kept]] = []
        count, reach = 0, self.reach()
        while id is not None:
            if (record := await self.find(owner, id, reach)) is None:
                message = f"the response {id!r:.80}, which the conversation goes back to, is not kept here"
                raise NotFound(message, "give the conversation as input", param="previous_response_id")
            response = record["response"]
            if response["status"] in RUNNING:
                raise InvalidRequest(f"response {id} is not complete yet", "wait for it", param="previous_response_id")
            turns.append([*record["input"], *response["output"]])
            count += len(turns[-1])
            if count > MAX_MESSAGES or len(turns) > MAX_MESSAGES:
                message = f"the conversation has more than {MAX_MESSAGES} items"
                raise InvalidRequest(message, "begin a new one", param="previous_response_id")
            id = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]


def _decoded(data: bytes, reach: Reach | None) -> Record | None:
    record = parsed(data)
    if record is not None and reach is not None:
        reach.take(data)
    return record
