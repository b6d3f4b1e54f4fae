"""/v1/messages/batches: many messages, generated when there is capacity.

https://platform.claude.com/docs/en/api/creating-message-batches

They are batches of /v1/batches with the endpoint /v1/messages: the requests become the lines of an input file, and the
output files are returned as results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import fastapi
import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keys import owner_of
from kvasir.serve.dialects.anthropic.errors import anthropic_error
from kvasir.serve.dialects.anthropic.pages import DEFAULT_LIMIT, MAX_LIMIT, page_of
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.faults import AnswerFailed, Fault, NotFound
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Wire
from kvasir.serve.records.batches import Batches
from kvasir.serve.records.batches.lines import MAX_LINES
from kvasir.serve.records.batches.wire import MONTH, BatchRequest

router = APIRouter(route_class=JsonRoute, tags=["anthropic"])

ENDPOINT = "/v1/messages"
COUNT = "requests"  # key in the metadata of a batch created by this API
_OURS, _THEIRS = "batch_", "msgbatch_"
_LEFT = {"batch_expired": "expired", "batch_cancelled": "canceled"}
_ENDED = ("completed", "failed", "expired", "cancelled")
_COUNTED = ("processing", "succeeded", "errored", "canceled", "expired")
_JSONL: dict[int | str, dict[str, Any]] = {
    200: {"description": "A line of JSON for each request.", "content": {"application/x-jsonl": {}}}
}


class BatchItem(Wire):
    """params: a body of /v1/messages, validated when the request runs."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchRequest(Wire):
    """POST /v1/messages/batches"""

    requests: Annotated[list[BatchItem], Field(min_length=1, max_length=MAX_LINES)]


class BatchesQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    after_id: Annotated[str, Field(max_length=64)] | None = None
    before_id: Annotated[str, Field(max_length=64)] | None = None
    beta: bool | None = None


# -- routes ------------------------------------------------------------------------------------------------


@router.post("/v1/messages/batches")
async def create_message_batch(wire: MessageBatchRequest, request: HTTPRequest) -> Response:
    batches, owner = batches_of(request), owner_of(request)
    _check(wire)
    try:
        async with batches.files.turn(owner):
            await batches.files.clear(owner)
            data = await asyncio.to_thread(_lines, wire)
            file = await batches.files.put(owner, data, "message_batch.jsonl", "batch", MONTH)
            asked = BatchRequest(
                completion_window="24h", endpoint=ENDPOINT, input_file_id=file["id"],
                metadata={COUNT: str(len(wire.requests))},
            )  # fmt: skip
            try:
                batch = await batches.create(owner, asked)
            except BaseException:
                await batches.files.delete(owner, file["id"])
                raise
    except OSError as error:
        raise AnswerFailed("the batch cannot be stored", "see the server's log") from error
    return json_response(await batch_object(batch, batches, owner, request))


@router.get("/v1/messages/batches")
async def list_message_batches(query: Annotated[BatchesQuery, fastapi.Query()], request: HTTPRequest) -> Response:
    batches, owner = batches_of(request), owner_of(request)
    found = [batch for batch in await batches.all(owner) if batch["endpoint"] == ENDPOINT]
    page, bounds = page_of(found, _id, query.limit, query.after_id, query.before_id)
    return json_response({"data": [await batch_object(batch, batches, owner, request) for batch in page], **bounds})


@router.get("/v1/messages/batches/{message_batch_id}")
async def retrieve_message_batch(message_batch_id: str, request: HTTPRequest) -> Response:
    batches, owner = batches_of(request), owner_of(request)
    batch = await _batch(batches, owner, message_batch_id)
    return json_response(await batch_object(batch, batches, owner, request))


@router.post("/v1/messages/batches/{message_batch_id}/cancel")
async def cancel_message_batch(message_batch_id: str, request: HTTPRequest) -> Response:
    batches, owner = batches_of(request), owner_of(request)
    batch = await _batch(batches, owner, message_batch_id)
    batch = await batches.cancel(owner, batch["id"])
    return json_response(await batch_object(batch, batches, owner, request))


@router.delete("/v1/messages/batches/{message_batch_id}")
async def delete_message_batch(message_batch_id: str, request: HTTPRequest) -> Response:
    """Deletes the batch with its results, and with its requests if this API created it."""
    batches, owner = batches_of(request), owner_of(request)
    batch = await _batch(batches, owner, message_batch_id)
    if batch["status"] not in _ENDED:
        raise InvalidRequest(f"the batch is {_status(batch)}", "cancel it, and wait until it has ended")
    await batches.delete(owner, batch["id"])
    made_here = COUNT in (batch["metadata"] or {})
    for name in ("output_file_id", "error_file_id", *(("input_file_id",) if made_here else ())):
        if batch[name]:
            await batches.files.delete(owner, batch[name])
    return json_response({"id": message_batch_id, "type": "message_batch_deleted"})


@router.get("/v1/messages/batches/{message_batch_id}/results", responses=_JSONL)
async def message_batch_results(message_batch_id: str, request: HTTPRequest) -> Response:
    """The successful results, then the others, each in the order of the requests."""
    batches, owner = batches_of(request), owner_of(request)
    await request.scope["state"]["leases"].enter_async_context(batches.files.turn(owner))  # until they are sent
    batch = await _batch(batches, owner, message_batch_id)
    if batch["status"] not in _ENDED:
        raise InvalidRequest(f"the batch is {_status(batch)}", "its results are available when it has ended")
    if batch["status"] == "failed":
        data = await batches.files.content(owner, batch["input_file_id"])
        lines = await asyncio.to_thread(failed_results, data, batch)
    else:
        names = [name for name in ("output_file_id", "error_file_id") if batch[name]]
        files = [await batches.files.content(owner, batch[name]) for name in names]
        lines = await asyncio.to_thread(results, files)
    return Response(lines, media_type="application/x-jsonl")


# -- requests ----------------------------------------------------------------------------------------------


def batches_of(request: HTTPRequest) -> Batches:
    return request.app.state.batches


def _check(wire: MessageBatchRequest) -> None:
    """Raises InvalidRequest for errors that affect the whole batch."""
    seen: set[str] = set()
    for i, item in enumerate(wire.requests):
        if item.custom_id in seen:
            message = f"an earlier request has the custom_id {item.custom_id!r}"
            raise InvalidRequest(message, "give each its own", param=f"requests.{i}.custom_id")
        seen.add(item.custom_id)
        if item.params.get("stream"):
            message = "batches do not support it"
            raise InvalidRequest(message, "leave it out", param=f"requests.{i}.params.stream")


def _lines(wire: MessageBatchRequest) -> bytes:
    lines = (
        {"custom_id": item.custom_id, "method": "POST", "url": ENDPOINT, "body": item.params} for item in wire.requests
    )
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


async def _batch(batches: Batches, owner: str, id: str) -> dict[str, Any]:
    """The batch of this id. Raises NotFound."""
    found = None
    if id.startswith(_THEIRS):
        found = await batches.get(owner, _OURS + id.removeprefix(_THEIRS))
    if found is None or found["endpoint"] != ENDPOINT:
        raise NotFound(f"there is no message batch {id!r:.80}", "it was deleted, or belongs to another key")
    return found


# -- batches -----------------------------------------------------------------------------------------------


async def batch_object(batch: dict[str, Any], batches: Batches, owner: str, request: HTTPRequest) -> dict[str, Any]:
    ended = batch["status"] in _ENDED
    ends = (batch[f"{status}_at"] for status in _ENDED)
    return {
        "id": _id(batch),
        "type": "message_batch",
        "processing_status": _status(batch),
        "request_counts": await _counts(batch, batches, owner),
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "cancel_initiated_at": _time(batch["cancelling_at"]),
        "ended_at": _time(next((end for end in ends if end is not None), None)),
        "archived_at": None,
        "results_url": f"{request.base_url}v1/messages/batches/{_id(batch)}/results" if ended else None,
    }


def _id(batch: dict[str, Any]) -> str:
    return _THEIRS + batch["id"].removeprefix(_OURS)


def _status(batch: dict[str, Any]) -> str:
    if batch["status"] in _ENDED:
        return "ended"
    return "canceling" if batch["cancelling_at"] is not None else "in_progress"


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def _counts(batch: dict[str, Any], batches: Batches, owner: str) -> dict[str, int]:
    """Counts of requests by state. All are "processing" until the whole batch has ended."""
    reported, status = batch["request_counts"], batch["status"]
    total = reported["total"] or int((batch["metadata"] or {}).get(COUNT, 0))
    counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
    if status not in _ENDED:
        return counts | {"processing": total}
    if status == "failed":
        return counts | {"errored": total}
    counts["succeeded"], counts["errored"] = reported["completed"], total - reported["completed"]
    if status in ("cancelled", "expired") and batch["error_file_id"]:
        kind = "canceled" if status == "cancelled" else "expired"
        counts[kind] = await _left_out(batch, batches, owner)
        counts["errored"] -= counts[kind]
    return counts


async def _left_out(batch: dict[str, Any], batches: Batches, owner: str) -> int:
    """Number of requests that were not run; 0 if the error file is gone."""
    try:
        data = await batches.files.content(owner, batch["error_file_id"])
    except NotFound:
        return 0
    return await asyncio.to_thread(lambda: sum(line.error is not None for line in _read(data)))


# -- results -----------------------------------------------------------------------------------------------


class _Error(msgspec.Struct):
    code: str
    message: str


class _Answer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Line(msgspec.Struct):
    """A line of a batch's output or error file."""

    custom_id: str
    response: _Answer | None = None
    error: _Error | None = None


def _read(data: bytes) -> Iterator[_Line]:
    return (msgspec.json.decode(line, type=_Line) for line in data.splitlines() if line)


def results(files: Iterable[bytes]) -> bytes:
    """The results, one JSON line each, from the output and error files of a batch."""
    return _jsonl((line.custom_id, _result(line)) for data in files for line in _read(data))


def failed_results(data: bytes, batch: dict[str, Any]) -> bytes:
    """The results of a batch that failed as a whole."""
    [first, *_] = batch["errors"]["data"]
    fault = Fault(500, first["message"], first["code"])
    error = {"type": "errored", "error": msgspec.Raw(anthropic_error(fault, None))}
    return _jsonl((line.custom_id, error) for line in _read(data))


def _result(line: _Line) -> dict[str, Any]:
    if line.response is None:
        return {"type": _LEFT[line.error.code] if line.error else "errored"}
    if line.response.status_code == 200:
        return {"type": "succeeded", "message": line.response.body}
    return {"type": "errored", "error": _error(line.response)}


def _error(answer: _Answer) -> msgspec.Raw:
    """The error in this API's format; converted if the request failed before it reached its route."""
    found = msgspec.json.decode(answer.body)
    if isinstance(found, dict) and found.get("type") == "error":
        return answer.body
    fault = Fault(answer.status_code, "the request failed", "internal_error")
    return msgspec.Raw(anthropic_error(fault, answer.request_id))


def _jsonl(results: Iterable[tuple[str, dict[str, Any]]]) -> bytes:
    return b"".join(msgspec.json.encode({"custom_id": id, "result": result}) + b"\n" for id, result in results)
