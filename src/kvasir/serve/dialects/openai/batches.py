"""/v1/batches"""

from __future__ import annotations

from typing import Annotated

import fastapi
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.auth.keys import owner_of
from kvasir.serve.dialects.openai.files import page_of
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.faults import AnswerFailed
from kvasir.serve.http.responses import json_response
from kvasir.serve.records.batches.kept import Batches
from kvasir.serve.records.batches.wire import BatchRequest, Page

router = APIRouter(route_class=JsonRoute)


def batches_of(request: HTTPRequest) -> Batches:
    return request.app.state.batches


@router.post("/v1/batches", tags=["openai"])
async def create_batch(wire: BatchRequest, request: HTTPRequest) -> Response:
    try:
        return json_response(await batches_of(request).create(owner_of(request), wire))
    except OSError as error:
        raise AnswerFailed("the batch cannot be stored", "see the server's log") from error


@router.get("/v1/batches", tags=["openai"])
async def list_batches(query: Annotated[Page, fastapi.Query()], request: HTTPRequest) -> Response:
    return page_of(await batches_of(request).all(owner_of(request)), query.after, query.limit)


@router.get("/v1/batches/{batch_id}", tags=["openai"])
async def retrieve_batch(batch_id: str, request: HTTPRequest) -> Response:
    return json_response(await batches_of(request).get(owner_of(request), batch_id))


@router.delete("/v1/batches/{batch_id}", tags=["openai"])
async def delete_batch(batch_id: str, request: HTTPRequest) -> Response:
    """Deletes a batch that has ended. Its files stay and can be deleted separately."""
    await batches_of(request).delete(owner_of(request), batch_id)
    return json_response({"id": batch_id, "object": "batch", "deleted": True})


@router.post("/v1/batches/{batch_id}/cancel", tags=["openai"])
async def cancel_batch(batch_id: str, request: HTTPRequest) -> Response:
    return json_response(await batches_of(request).cancel(owner_of(request), batch_id))
