"""POST /v1/responses/compact: a long conversation as its users' messages and a summary, to go on with instead of it.

The model writes the summary, which comes back as a `compaction` item. As input of a later response, such an item is a
message of the model.
"""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.auth.keys import owner_of
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.limits import charge
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.request import prompt_ids, to_request
from kvasir.serve.conversation.sampling import asked_fields, sampling_params
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.openai.params import TIERS
from kvasir.serve.dialects.openai.responses.items import sealed
from kvasir.serve.dialects.openai.responses.making import surplus
from kvasir.serve.dialects.openai.responses.request import check, check_items, named, own_items, to_conversation
from kvasir.serve.dialects.openai.responses.shapes import usage_object
from kvasir.serve.dialects.openai.responses.wire import CompactRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.faults import AnswerFailed
from kvasir.serve.http.responses import json_response
from kvasir.serve.records.responses import Kept, item_id
from kvasir.serve.records.store import new_id

router = APIRouter(route_class=JsonRoute)

MOST_TOKENS = 1024  # of a summary, unless the request says otherwise
ASK = (
    "Summarize our conversation so far for yourself, so that you can continue it from the summary alone. Keep what was "
    "asked for and decided, facts, names, numbers, results of tools, and what is still open. Write only the summary."
)


@router.post("/v1/responses/compact", tags=["openai"])
async def compact_response(wire: CompactRequest, request: HTTPRequest) -> Response:
    """The messages of users, developers and the system, and an item `compaction` with a summary of everything. Send
    `output` as the beginning of the next `input`. max_output_tokens is 1024 unless given."""
    serving, responses = await serving_of(request, wire.model), request.app.state.responses
    check(wire)
    owner, id = owner_of(request), new_id("resp")
    own = await own_items(wire, id, owner, responses)
    items = [*await responses.history(owner, wire.previous_response_id), *own]
    check_items(items[: len(items) - len(own)], own)
    asking = [*items, _asking(id, len(items))]
    wire.tool_choice = "none"
    front = serving.front
    if wire.max_output_tokens is None:
        wire.max_output_tokens = min(MOST_TOKENS, max(1, front.info.max_model_len // 4))
    with named():
        dropped = await surplus(wire, asking, serving, request) if wire.truncation == "auto" else 0
        conversation = await to_conversation(wire, asking[dropped:], serving)
        ids = await prompt_ids(conversation, serving, trust_of(wire, serving, request))
        fields = scheduling_fields(wire, serving, request, TIERS.get(wire.service_tier or "")) | speculation_of(wire)
        given = {"max_tokens": wire.max_output_tokens}
        params = sampling_params(asked_fields(wire, "openai"), front.info, serving.own, **given)
        core, reading = await to_request(conversation, ids, params, serving, fields=fields)
    core = replace(core, id=id, params=replace(core.params, n=1))
    await charge(serving, [core], request, whole=True)
    [answer] = await while_connected(request.receive, front.complete(core, reading))
    check_finish(answer, id)
    if not (summary := answer.message.content.strip()):
        raise AnswerFailed("the model wrote no summary", "raise max_output_tokens, or lower reasoning.effort")
    compaction = {"id": item_id("cmp", id, len(items)), "type": "compaction", "encrypted_content": sealed(summary)}
    return json_response(
        {
            "id": id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*filter(_stays, items), compaction],
            "usage": usage_object(answer.usage),
            **({"dropped_items": dropped} if wire.truncation == "auto" else {}),
        }
    )


def _asking(id: str, index: int) -> Kept:
    """The message that asks for the summary."""
    content = [{"type": "input_text", "text": ASK}]
    return {"id": item_id("msg", id, index), "type": "message", "role": "user", "content": content}


def _stays(item: Kept) -> bool:
    return item["type"] == "message" and item["role"] != "assistant"
