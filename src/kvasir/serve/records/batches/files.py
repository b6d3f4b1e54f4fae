"""Input and output files of batches. A file is two records, one of its metadata and one of its bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from kvasir.serve.http.faults import NotFound
from kvasir.serve.records.store import Records, is_id, new_id, parsed
from kvasir.serve.settings import ServeSettings

FILE = "file"
UPLOADS = 2  # concurrent uploads of a key


class Files:
    def __init__(self, settings: ServeSettings, num_keys: Callable[[], int], in_use: Callable[[str], bool]):
        """num_keys: returns the current number of keys that share the storage. in_use: of an id, whether its file must
        outlive its expiry. Raises ConfigError."""
        folder = settings.data_dir
        bounds = {"max_count": settings.file_count, "max_age": float("inf"), "refuse": True}
        self._max_file = settings.max_file
        self._in_use = in_use
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._facts = Records(folder and folder / "files", max_bytes=settings.file_count << 12, **bounds)
        self._contents = Records(
            folder and folder / "file-contents", max_bytes=lambda: settings.file_bytes // max(1, num_keys()), **bounds
        )

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of one file."""
        return min(self._max_file, self._contents.max_bytes)

    async def start(self) -> None:
        """Removes contents without metadata, left by a server that ended while storing a file."""
        await self._contents.keep(self._facts.ids)

    def close(self) -> None:
        self._facts.close()
        self._contents.close()

    def turn(self, owner: str) -> asyncio.Semaphore:
        """Hold it while a body is in memory; it bounds the number of these per key."""
        return self._turns.setdefault(owner, asyncio.Semaphore(UPLOADS))

    async def put(
        self, owner: str, data: bytes, name: str, purpose: str, seconds: int | None, id: str = "", beyond: bool = False
    ) -> dict[str, Any]:
        """The object of the new file. seconds: until it expires. beyond: even if the key's share is full. Raises
        LimitExceeded, OSError."""
        return await asyncio.shield(self._put(owner, data, name, purpose, seconds, id or new_id(FILE), beyond))

    async def _put(
        self, owner: str, data: bytes, name: str, purpose: str, seconds: int | None, id: str, beyond: bool
    ) -> dict[str, Any]:
        now = int(time.time())
        expires = {} if seconds is None else {"expires_at": now + seconds}
        file = {"id": id, "object": "file", "bytes": len(data), "created_at": now, "filename": name}
        file |= {"purpose": purpose, "status": "processed", **expires}
        await self._contents.put(owner, file["id"], data, beyond)
        try:
            await self._facts.put(owner, file["id"], msgspec.json.encode(file), beyond)
        except BaseException:  # contents without metadata would occupy the share for good
            await self._contents.delete(owner, file["id"])
            raise
        return file

    def check_room(self, owner: str) -> None:
        """Raises LimitExceeded if a key's share is full."""
        self._contents.check_room(owner)

    async def get(self, owner: str, id: str) -> dict[str, Any]:
        """The object of a file. Raises NotFound."""
        data = await self._facts.get(owner, id) if is_id(id, FILE) else None
        file = parsed(data) if data is not None else None
        if file is None or self._expired(file):
            if file is not None:
                await self.delete(owner, id)
            raise NotFound(f"there is no file {id!r:.80}", "it was deleted, has expired, or belongs to another key")
        return file

    async def content(self, owner: str, id: str) -> bytes:
        """The bytes of a file. Raises NotFound."""
        await self.get(owner, id)
        if (data := await self._contents.get(owner, id)) is None:
            raise NotFound(f"the content of file {id!r:.80} is lost")
        return data

    async def open(self, owner: str, id: str) -> tuple[BinaryIO, int]:
        """The content as an open file, to be closed by the caller, and its size in bytes. Raises NotFound."""
        await self.get(owner, id)
        if (found := await self._contents.open(owner, id)) is None:
            raise NotFound(f"the content of file {id!r:.80} is lost")
        return found

    async def all(self, owner: str) -> list[dict[str, Any]]:
        """The files of a key, oldest first."""
        found = [file for data in await self._facts.all(owner) if (file := parsed(data))]
        return sorted(
            (file for file in found if not self._expired(file)), key=lambda file: (file["created_at"], file["id"])
        )

    async def clear(self, owner: str) -> None:
        """Makes room: deletes a key's expired files."""
        await self._drop_expired(await self._facts.all(owner))

    async def sweep(self) -> None:
        """Deletes expired files of all keys, including removed ones."""
        await self._drop_expired(await self._facts.all())

    async def _drop_expired(self, facts: Sequence[bytes]) -> None:
        files = await asyncio.to_thread(lambda: [file for data in facts if (file := parsed(data))])
        if expired := {file["id"] for file in files if self._expired(file)}:
            await self._facts.drop(expired)
            await self._contents.drop(expired)

    def _expired(self, file: dict[str, Any]) -> bool:
        return file.get("expires_at", float("inf")) <= time.time() and not self._in_use(file["id"])

    async def delete(self, owner: str, id: str) -> None:
        await self._facts.delete(owner, id)
        await self._contents.delete(owner, id)
