"""/v1/files"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, BinaryIO

import fastapi
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keys import owner_of
from kvasir.serve.hosting.catalogue import catalogue_of
from kvasir.serve.http.faults import AnswerFailed
from kvasir.serve.http.responses import json_response
from kvasir.serve.records.batches.files import Files
from kvasir.serve.records.batches.upload import Upload, read_upload
from kvasir.serve.records.batches.wire import MONTH, FileForm, FilePage

router = APIRouter()
PIECE = 256 << 10  # bytes of a file in memory while it is sent
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


def files_of(request: HTTPRequest) -> Files:
    return request.app.state.batches.files


def page_of(found: Sequence[dict[str, Any]], after: str | None, limit: int) -> Response:
    """A page of objects that starts after the id `after`. Raises InvalidRequest."""
    if after is not None:
        place = next((i for i, item in enumerate(found) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(
                f"there is no entry with the id {after!r:.80}", "give an id of the list", param="after"
            )
        found = found[place + 1 :]
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(found) > len(page)
    return json_response({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


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
        raise InvalidRequest(first["msg"], "only files for batches are supported", param=name) from None
    await files.clear(owner)
    try:
        seconds = MONTH if form.seconds is None else form.seconds
        return await files.put(owner, upload.data, upload.filename[:256], form.purpose, seconds)
    except OSError as error:
        raise AnswerFailed("the file cannot be stored", "see the server's log") from error


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
    return StreamingResponse(pieces(file), media_type="application/octet-stream", headers=headers)


async def pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    """Reads the file in pieces, so that many slow readers take little memory."""
    while piece := await asyncio.to_thread(file.read, PIECE):
        yield piece


@router.delete("/v1/files/{file_id}", tags=["openai"])
async def delete_file(file_id: str, request: HTTPRequest) -> Response:
    files, owner = files_of(request), owner_of(request)
    await files.get(owner, file_id)
    if request.app.state.batches.uses(file_id):
        raise InvalidRequest("an unfinished batch uses this file", "cancel the batch first", param="file_id")
    await files.delete(owner, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
