"""/v1/files: input and output files of batches. A file is two records, one of its metadata and one of its bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, BinaryIO

import fastapi
import msgspec
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keys import owner_of
from kvasir.serve.hosting.catalogue import catalogue_of
from kvasir.serve.http.faults import AnswerFailed, NotFound
from kvasir.serve.http.responses import json_response
from kvasir.serve.records.batches.upload import Upload, read_upload
from kvasir.serve.records.batches.wire import MONTH, FileForm, FilePage
from kvasir.serve.records.store import Records, is_id, new_id, parsed
from kvasir.serve.settings import ServeSettings

router = APIRouter()
FILE = "file"
PIECE = 256 << 10  # bytes of a file in memory while it is sent
UPLOADS = 2  # concurrent uploads of a key
SLOWER = 10  # factor on the time limit of other bodies

_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": MONTH},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"application/octet-stream": {}}}
}


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
            raise NotFound(f"there is no file {id!r:.80}", "it was deleted, has expired, or is another key's")
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


def page_of(found: Sequence[dict[str, Any]], after: str | None, limit: int) -> Response:
    """A page of objects that starts after the id `after`. Raises InvalidRequest."""
    if after is not None:
        place = next((i for i, item in enumerate(found) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"there is nothing with the id {after!r:.80}", "give an id of the list", param="after")
        found = found[place + 1 :]
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(found) > len(page)
    return json_response({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def files_of(request: HTTPRequest) -> Files:
    return request.app.state.batches.files


@router.post("/v1/files", tags=["openai"], openapi_extra=_BODY)
async def create_file(request: HTTPRequest) -> Response:
    """A form with `file`, `purpose` (`batch`), `expires_after[anchor]` (`created_at`) and `expires_after[seconds]`."""
    files, owner = files_of(request), owner_of(request)
    async with files.turn(owner):
        patience = SLOWER * catalogue_of(request).settings.body_time
        return json_response(await _keep(files, owner, await read_upload(request, files.max_bytes, patience)))


async def _keep(files: Files, owner: str, upload: Upload) -> dict[str, Any]:
    try:
        form = FileForm.model_validate(upload.fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "purpose"
        raise InvalidRequest(first["msg"], "files are for batches here", param=name) from None
    await files.clear(owner)
    try:
        seconds = MONTH if form.seconds is None else form.seconds
        return await files.put(owner, upload.data, upload.filename[:256], form.purpose, seconds)
    except OSError as error:
        raise AnswerFailed("the file cannot be stored", "the server's log has the details") from error


@router.get("/v1/files", tags=["openai"])
async def list_files(query: Annotated[FilePage, fastapi.Query()], request: HTTPRequest) -> Response:
    found = [f for f in await files_of(request).all(owner_of(request)) if query.purpose in (None, f["purpose"])]
    return page_of(found if query.order == "asc" else found[::-1], query.after, query.limit)


@router.get("/v1/files/{file_id}", tags=["openai"])
async def retrieve_file(file_id: str, request: HTTPRequest) -> Response:
    return json_response(await files_of(request).get(owner_of(request), file_id))


@router.get("/v1/files/{file_id}/content", tags=["openai"], responses=_BYTES)
async def retrieve_content(file_id: str, request: HTTPRequest) -> Response:
    file, size = await files_of(request).open(owner_of(request), file_id)
    request.scope["state"]["leases"].callback(file.close)
    headers = {"content-disposition": "attachment", "content-length": str(size)}
    return StreamingResponse(_pieces(file), media_type="application/octet-stream", headers=headers)


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    """Reads the file in pieces, so that many slow readers take little memory."""
    while piece := await asyncio.to_thread(file.read, PIECE):
        yield piece


@router.delete("/v1/files/{file_id}", tags=["openai"])
async def delete_file(file_id: str, request: HTTPRequest) -> Response:
    files, owner = files_of(request), owner_of(request)
    await files.get(owner, file_id)
    if request.app.state.batches.uses(file_id):
        raise InvalidRequest("a batch that is not done reads this file", "cancel the batch first", param="file_id")
    await files.delete(owner, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
