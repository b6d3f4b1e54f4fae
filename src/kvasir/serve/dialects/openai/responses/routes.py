"""POST, GET and DELETE /v1/responses and the routes below it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keys import owner_of
from kvasir.serve.auth.quota import hold_place
from kvasir.serve.conversation.limits import charge
from kvasir.serve.conversation.request import prompt_ids
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.openai.responses import background
from kvasir.serve.dialects.openai.responses.making import Making, begin
from kvasir.serve.dialects.openai.responses.request import check, check_items, named, own_items, to_conversation
from kvasir.serve.dialects.openai.responses.shapes import encoded
from kvasir.serve.dialects.openai.responses.wire import ItemsQuery, ResponseRequest, RetrieveQuery, TokenCountRequest
from kvasir.serve.dialects.openai.shapes import error_response
from kvasir.serve.hosting.catalogue import catalogue_of, serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.faults import AnswerFailed, Fault, fault_of
from kvasir.serve.http.responses import json_response, write_json
from kvasir.serve.http.sse import STREAMED, EventStream
from kvasir.serve.records.responses import ResponseRun, Responses
from kvasir.serve.records.store import new_id

router = APIRouter(route_class=JsonRoute)


def responses_of(request: HTTPRequest) -> Responses:
    return request.app.state.responses


@router.post("/v1/responses", tags=["openai"], responses=STREAMED)
async def create_response(wire: ResponseRequest, request: HTTPRequest) -> Response:
    serving, responses = await serving_of(request, wire.model), responses_of(request)
    making = await begin(wire, serving, request, responses)
    await charge(serving, [making.core], request, whole=True)
    if wire.background:
        run = await _run(wire, making, request)
        return _follow(request, run, 0) if wire.stream else json_response(making.response | {"status": "queued"})
    if wire.stream:
        events = _events(making, serving, responses)
        return EventStream(events, to_response=error_response, to_event=_error_event, ping=serving.settings.ping)
    await while_connected(request.receive, _whole(making, serving))
    await making.keep(responses)
    return await write_json(making.core.params.logprobs is not None, dict, making.response)


async def _whole(making: Making, serving: Serving) -> None:
    async with aclosing(making.run(serving.front)) as batches:
        async for _ in batches:
            pass


async def _events(making: Making, serving: Serving, responses: Responses) -> AsyncGenerator[bytes]:
    """The stream's events. The first ones are sent with the first tokens: until then an error is an HTTP error."""
    first = [making.status_event("created"), making.status_event("in_progress")]
    try:
        async with aclosing(making.run(serving.front)) as batches:
            async for events in batches:
                if events := [*first, *events]:
                    yield b"".join(map(encoded, events))
                first = []
    except Exception as error:
        if first:
            raise
        yield b"".join(map(encoded, making.fail(fault_of(error))))
    await making.keep(responses)
    yield encoded(making.last())


def _error_event(fault: Fault) -> bytes:
    """The error event of a stream that has not sent any response event."""
    error = {"code": fault.code, "message": fault.message, "param": fault.param}
    return encoded({"type": "error", **error, "sequence_number": 0})


async def _run(wire: ResponseRequest, making: Making, request: HTTPRequest) -> background.BackgroundRun:
    """Starts the response in the background. It is stored first, so that it can be found however it ends."""
    responses = responses_of(request)
    run = background.BackgroundRun(making, bool(wire.stream))
    responses.add(run)
    try:
        making.response["status"] = "queued"
        await making.store(responses)
    except BaseException as error:
        responses.remove(run)
        if isinstance(error, OSError):
            raise AnswerFailed("the response cannot be stored", "see the server's log") from error
        raise
    work = run.start(catalogue_of(request), wire.model, responses)
    request.app.state.drain_gate.hold(work)
    hold_place(request.scope, work)
    request.scope["state"]["reservation"].hold(work)
    await run.leased.wait()  # so the model stays leased when this request releases its own lease
    return run


def _follow(request: HTTPRequest, run: ResponseRun, start: int) -> Response:
    ping = catalogue_of(request).settings.ping
    return EventStream(run.follow(start), to_response=error_response, to_event=_error_event, ping=ping)


@router.post("/v1/responses/input_tokens", tags=["openai"])
async def count_input_tokens(wire: TokenCountRequest, request: HTTPRequest) -> Response:
    serving, responses = await serving_of(request, wire.model), responses_of(request)
    check(wire)
    owner = owner_of(request)
    earlier = await responses.history(owner, wire.previous_response_id)
    own = await own_items(wire, new_id("resp"), owner, responses)
    check_items(earlier, own)
    with named():
        conversation = await to_conversation(wire, [*earlier, *own], serving)
        ids = await prompt_ids(conversation, serving, trust_of(wire, serving, request), "count")
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def _turn(request: HTTPRequest) -> None:
    """Waits for a turn, which is held until the response is sent."""
    turn = responses_of(request).turn(owner_of(request))
    await request.scope["state"]["leases"].enter_async_context(turn)


@router.get("/v1/responses/{response_id}", tags=["openai"], responses=STREAMED)
async def retrieve_response(
    response_id: str, query: Annotated[RetrieveQuery, fastapi.Query()], request: HTTPRequest
) -> Response:
    responses, owner = responses_of(request), owner_of(request)
    if not query.stream:
        if query.starting_after is not None:
            raise InvalidRequest("starting_after needs stream=true", "add stream=true", param="starting_after")
        await _turn(request)
        record = await responses.get(owner, response_id)
        return await asyncio.to_thread(json_response, record["response"])
    await responses.get(owner, response_id)
    run = responses.events(owner, response_id)
    if run is None or not run.streamed:
        hint = "events are kept for a while for responses made with background and stream"
        raise InvalidRequest("the events of this response are not kept", hint, param="stream")
    return _follow(request, run, 0 if query.starting_after is None else query.starting_after + 1)


@router.delete("/v1/responses/{response_id}", tags=["openai"])
async def delete_response(response_id: str, request: HTTPRequest) -> Response:
    await responses_of(request).delete(owner_of(request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", tags=["openai"])
async def cancel_response(response_id: str, request: HTTPRequest) -> Response:
    responses, owner = responses_of(request), owner_of(request)
    record = await responses.get(owner, response_id)
    if not record["response"]["background"]:
        raise InvalidRequest("only responses made in the background can be cancelled", "close the connection instead")
    if run := responses.run(response_id):
        await run.cancel()
        return json_response(run.response)
    return json_response(record["response"])


@router.get("/v1/responses/{response_id}/input_items", tags=["openai"])
async def list_input_items(
    response_id: str, query: Annotated[ItemsQuery, fastapi.Query()], request: HTTPRequest
) -> Response:
    await _turn(request)
    items: list[dict[str, Any]] = (await responses_of(request).get(owner_of(request), response_id))["input"]
    if query.order == "desc":
        items = items[::-1]
    if query.after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == query.after), None)
        if place is None:
            raise InvalidRequest(f"there is no item {query.after!r:.80}", "give the id of one", param="after")
        items = items[place + 1 :]
    page = items[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(items) > len(page)
    found = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
    return await asyncio.to_thread(json_response, found)
