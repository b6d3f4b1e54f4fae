"""Records that a server stores for its clients: bytes by id, in memory or in a folder, bounded, each belonging to a
key.

    <folder>/<key's name>-<digest>/<id>.json       files 0600, folders 0700

A file is written to a temporary name in the same folder and then renamed, so that a crash leaves the old version or the
new one. When a key's share is full, its least recently used records are dropped, or new ones are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvasir.errors import LimitExceeded
from kvasir.serve.records.disk import ID, FolderStorage, MemoryStorage

log = logging.getLogger("kvasir.serve")


def new_id(kind: str) -> str:
    """A new id that cannot be guessed."""
    return f"{kind}_{secrets.token_hex(24)}"


def parsed(data: bytes) -> dict[str, Any] | None:
    """The decoded JSON record; None if it is damaged, for example by a failing disk."""
    try:
        return msgspec.json.decode(data, type=dict)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.error("skipping a damaged record: %s", error)
        return None


def is_id(id: str, kind: str) -> bool:
    return id.startswith(f"{kind}_") and ID.fullmatch(id) is not None


@dataclass(slots=True)
class _Entry:
    """size: bytes. used: when it was last written or read, in seconds since 1970."""

    size: int
    used: float


class Records:
    """One kind of records of all keys. Call all methods on one event loop; files are read and written in threads, one
    write of a key at a time."""

    def __init__(
        self,
        folder: Path | None,
        *,
        max_count: int,
        max_bytes: int | Callable[[], int],
        max_age: float,
        refuse: bool = False,
        pinned: Callable[[str], bool] = lambda id: False,
        clock: Callable[[], float] = time.time,
    ):
        """folder: None keeps the records in memory. max_count, max_bytes: per key. max_age: seconds after its last use
        at which a record is dropped. refuse: refuse new records if a share is full, instead of dropping old ones.
        pinned: of an id, whether its record stays regardless of age and count. Raises ConfigError for a folder that is
        open to others or that another server uses."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._refuse = refuse
        self._pinned = pinned
        self._clock = clock
        self._index: dict[str, OrderedDict[str, _Entry]] = {}  # by place and id, least recently used first
        self._locks: dict[str, asyncio.Lock] = {}
        self._files: MemoryStorage | FolderStorage = MemoryStorage() if folder is None else FolderStorage(folder)
        for place, id, size, used in sorted(self._files.all(), key=lambda found: found[3]):
            self._index.setdefault(place, OrderedDict())[id] = _Entry(size, used)

    def close(self) -> None:
        """Unlocks the folder, for use by another server."""
        self._files.close()

    @property
    def max_bytes(self) -> int:
        return self._max_bytes if isinstance(self._max_bytes, int) else self._max_bytes()

    async def put(self, owner: str, id: str, data: bytes, beyond: bool = False) -> None:
        """Stores the record, replacing any with this id. beyond: even if the key's share is full. Raises LimitExceeded
        for more than its share, OSError."""
        assert ID.fullmatch(id), id
        if len(data) > self.max_bytes and not beyond:
            raise LimitExceeded(f"{len(data)} bytes are more than a key may store", f"at most {self.max_bytes}")
        await asyncio.shield(self._put(_place(owner), id, data, beyond))  # a written file is always indexed

    async def _put(self, place: str, id: str, data: bytes, beyond: bool) -> None:
        async with self._lock(place):
            if not beyond:
                if self._refuse:
                    await self._drop(place, self._too_old(place))
                self._check_room(place, id, len(data))
            used = self._clock()
            await asyncio.to_thread(self._files.write, place, id, data, used)
            entries = self._index.setdefault(place, OrderedDict())
            entries[id] = _Entry(len(data), used)
            entries.move_to_end(id)
            await self._drop(place, self._surplus(entries))

    def _lock(self, place: str) -> asyncio.Lock:
        return self._locks.setdefault(place, asyncio.Lock())

    async def get(self, owner: str, id: str) -> bytes | None:
        """The record; None if this key has no such record."""
        place = _place(owner)
        entries = self._index.get(place)
        if entries is None or (entry := entries.get(id)) is None:
            return None
        if self._is_old(id, entry):
            await self.delete(owner, id)
            return None
        entry.used = self._clock()
        entries.move_to_end(id)
        return await asyncio.to_thread(self._files.read, place, id, entry.used)

    async def delete(self, owner: str, id: str) -> bool:
        """Deletes the record; returns whether it existed."""
        place = _place(owner)
        async with self._lock(place):
            if id not in self._index.get(place, {}):
                return False
            await self._drop(place, [id])
            return True

    async def all(self, owner: str | None = None) -> list[bytes]:
        """The records of a key, or of all keys, in no particular order. Does not count as a use."""
        places = list(self._index) if owner is None else [_place(owner)]
        wanted = [(place, id) for place in places for id in self._index.get(place, ())]
        return await asyncio.to_thread(self._read_all, wanted)

    @property
    def ids(self) -> set[tuple[str, str]]:
        """(place, id) of all records."""
        return {(place, id) for place, entries in self._index.items() for id in entries}

    async def keep(self, ids: set[tuple[str, str]]) -> None:
        """Drops all records but these."""
        await self.drop({id for _, id in self.ids - ids})

    async def drop(self, ids: set[str]) -> None:
        """Drops the records of these ids, of any key."""
        for place in list(self._index):
            async with self._lock(place):
                await self._drop(place, [id for id in self._index[place] if id in ids])

    async def sweep(self) -> None:
        """Drops records that are too old."""
        for place in list(self._index):
            async with self._lock(place):
                await self._drop(place, self._too_old(place))

    async def open(self, owner: str, id: str) -> tuple[BinaryIO, int] | None:
        """An open file of the record, to be closed by the caller, and its size in bytes. Does not count as a use."""
        place = _place(owner)
        entry = self._index.get(place, {}).get(id)
        file = None if entry is None else await asyncio.to_thread(self._files.open, place, id)
        return None if entry is None or file is None else (file, entry.size)

    def _read_all(self, wanted: list[tuple[str, str]]) -> list[bytes]:
        found = (self._files.read(place, id, None) for place, id in wanted)
        return [data for data in found if data is not None]

    def check_room(self, owner: str) -> None:
        """Raises LimitExceeded if the key's share has no room for one more byte."""
        self._check_room(_place(owner), "", 1)

    def _check_room(self, place: str, id: str, size: int) -> None:
        """Counts the records that will not be dropped to make room."""
        entries = self._index.get(place, {}).items()
        others = [entry.size for other, entry in entries if other != id and (self._refuse or self._pinned(other))]
        max_count, max_bytes = self._max_count, self.max_bytes
        if len(others) >= max_count or sum(others) + size > max_bytes:
            message = f"this key stores {len(others)} of {max_count} and {sum(others)} of {max_bytes} bytes here"
            if self._refuse:
                raise LimitExceeded(message, "delete some")
            raise LimitExceeded(message, "wait for some to end", 60.0)

    def _is_old(self, id: str, entry: _Entry) -> bool:
        return self._clock() - entry.used > self._max_age and not self._pinned(id)

    def _too_old(self, place: str) -> list[str]:
        return [id for id, entry in self._index.get(place, {}).items() if self._is_old(id, entry)]

    def _surplus(self, entries: OrderedDict[str, _Entry]) -> list[str]:
        """The ids to drop because they are too old or exceed the share."""
        max_count, max_bytes = self._max_count, self.max_bytes
        count, size = len(entries), sum(entry.size for entry in entries.values())
        surplus = []
        for id, entry in entries.items():
            is_over = not self._refuse and (count > max_count or size > max_bytes)
            if self._is_old(id, entry) or (is_over and not self._pinned(id)):
                surplus.append(id)
                count, size = count - 1, size - entry.size
        return surplus

    async def _drop(self, place: str, ids: list[str]) -> None:
        for id in ids:
            del self._index[place][id]
        if ids:
            await asyncio.to_thread(self._files.remove, place, ids)


def _place(owner: str) -> str:
    """The folder name of a key: its name for readability, and a digest, since some file systems do not distinguish
    "Ann" from "ann"."""
    return f"{owner or 'nobody'}-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
