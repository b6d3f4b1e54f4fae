"""POST /api/chat"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.thinking import may_think
from kvasir.serve.conversation.limits import check_logprobs
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.ollama.answer import Clock, Job, as_message
from kvasir.serve.dialects.ollama.asking import answer
from kvasir.serve.dialects.ollama.params import check_fits, context_of, options_of, room_for_answer, to_params
from kvasir.serve.dialects.ollama.prompt import (
    Prompter,
    must_be_kept_from_thinking,
    thinking_variables,
    to_messages,
    without,
)
from kvasir.serve.dialects.ollama.route import STREAMED
from kvasir.serve.dialects.ollama.wire import ChatRequest
from kvasir.serve.dialects.openai.tools import callable_tools, follows, shown_tools, tool_grammar
from kvasir.serve.dialects.openai.wire import ChatRequest as OpenAIChat
from kvasir.serve.dialects.openai.wire import FunctionDefinition
from kvasir.serve.dialects.openai.wire import Tool as OpenAITool
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.wire import refuse_fields

router = APIRouter(route_class=JsonRoute)


@router.post("/api/chat", tags=["ollama"], responses=STREAMED)
async def chat(wire: ChatRequest, request: HTTPRequest) -> Response:
    refuse_fields(wire)
    return await answer(wire, request, as_message, to_job if wire.messages else None)


async def to_job(wire: ChatRequest, serving: Serving, request: HTTPRequest, clock: Clock) -> Job:
    """The job of a request. Raises InvalidRequest for unsupported requests, TemplateError."""
    front, entry = serving.front, serving.entry
    check_logprobs(serving, top_logprobs=wire.top_logprobs)
    options = options_of(wire.options, entry.parameters if entry else {})
    context = context_of(options, front.info)
    asked = _tools(wire)
    shown = shown_tools(asked)
    if must_be_kept_from_thinking(wire.think, front, shown):
        options = options.model_copy(update={"thinking_token_budget": 0})
    messages: Any = to_messages(wire.messages or ())
    messages = entry.conversation(messages) if entry else messages
    variables = thinking_variables(wire.think, front, shown, wire.model)
    prompter = Prompter(front, shown, variables, trust_of(wire, serving, request))
    left_out = 0
    if wire.truncate:
        ids, left_out = await prompter.fitting(messages, context - room_for_answer(options, context))
    else:
        ids = await prompter.ids(messages)
    check_fits(len(ids), context, "messages")
    params = to_params(wire, options, front.info, context - len(ids))
    said = without(messages, left_out)
    thinks = not follows(asked, params) or await may_think(front, said, tools=shown, variables=variables)
    reading = front.reader.reading(ids, callable_tools(asked), thinks)
    fields = scheduling_fields(wire, serving, request)
    grammar = await tool_grammar(asked, front, reading, params)
    if grammar is not None:  # the grammar includes the structure of the content
        params = replace(params, structured_outputs=None)
        fields["grammar"] = grammar
    await front.learn(params)
    core = front.resolve(ids, params, param="messages", **fields)
    truncated = {"messages": left_out} if left_out else {}
    return Job(wire.model, serving, core, reading, clock, as_message, truncated)


def _tools(wire: ChatRequest) -> OpenAIChat:
    """The tools and the tool choice as an OpenAI request, for which the shared rules are written."""
    functions = [FunctionDefinition(**tool.function.model_dump()) for tool in wire.tools or ()]
    return OpenAIChat.model_construct(
        tools=[OpenAITool(type="function", function=function) for function in functions] or None,
        tool_choice=wire.tool_choice,
        parallel_tool_calls=wire.parallel_tool_calls,
    )
