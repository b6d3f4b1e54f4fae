"""POST /api/chat"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.conversation.chat_format import NamedChoice, chosen_name
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.limits import check_logprobs
from kvasir.serve.conversation.messages import Conversation
from kvasir.serve.conversation.request import to_request
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.tools import ToolChoice, Tools
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.ollama.answer import Clock, OllamaJob, as_message
from kvasir.serve.dialects.ollama.asking import answer
from kvasir.serve.dialects.ollama.params import (
    check_fits,
    context_of,
    drafted_of,
    options_of,
    room_for_answer,
    to_params,
)
from kvasir.serve.dialects.ollama.prompt import (
    Prompter,
    must_be_kept_from_thinking,
    thinking_variables,
    to_messages,
    without,
)
from kvasir.serve.dialects.ollama.route import STREAMED
from kvasir.serve.dialects.ollama.wire import ChatRequest
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.wire import refuse_fields

router = APIRouter(route_class=JsonRoute)


@router.post("/api/chat", tags=["ollama"], responses=STREAMED)
async def chat(wire: ChatRequest, request: HTTPRequest) -> Response:
    refuse_fields(wire)
    return await answer(wire, request, as_message, to_job if wire.messages else None)


async def to_job(wire: ChatRequest, serving: Serving, request: HTTPRequest, clock: Clock) -> OllamaJob:
    """The job of a request. Raises InvalidRequest for unsupported requests, TemplateError."""
    front, entry = serving.front, serving.entry
    check_logprobs(serving, top_logprobs=wire.top_logprobs)
    options = options_of(wire.options, entry.parameters if entry else {})
    context = context_of(options, front.info)
    tools = _tools(wire)
    shown = tools.shown
    if must_be_kept_from_thinking(wire.think, front, shown):
        options = options.model_copy(update={"thinking_token_budget": 0})
    messages = serving.conversation(to_messages(wire.messages or ()))
    variables = thinking_variables(wire.think, front, shown, wire.model)
    prompter = Prompter(front, shown, variables, trust_of(wire, serving, request))
    left_out = 0
    if wire.truncate:
        ids, left_out = await prompter.fitting(messages, context - room_for_answer(options, context))
    else:
        ids = await prompter.ids(messages)
    check_fits(len(ids), context, "messages")
    params = to_params(wire, options, front.info, context - len(ids))
    conversation = Conversation(without(messages, left_out), tools, variables)
    fields = scheduling_fields(wire, serving, request) | speculation_of(wire, drafted_of(options))
    core, reading = await to_request(conversation, ids, params, serving, fields=fields)
    truncated = {"messages": left_out} if left_out else {}
    return OllamaJob(wire.model, serving, core, reading, clock, as_message, truncated)


def _tools(wire: ChatRequest) -> Tools:
    functions = [tool.function.model_dump(exclude_none=True) for tool in wire.tools or ()]
    shown = [{"type": "function", "function": function} for function in functions]
    if isinstance(wire.tool_choice, NamedChoice):
        return Tools(shown, ToolChoice.one(chosen_name(wire.tool_choice, "tool_choice")), wire.parallel_tool_calls)
    return Tools(shown, ToolChoice(wire.tool_choice or "auto"), wire.parallel_tool_calls)
