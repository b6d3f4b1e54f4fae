"""From a conversation to a request of the engine: its prompt, and how the choices are parsed and constrained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvasir.engine.front import Bound
from kvasir.engine.reading import Reading
from kvasir.engine.thinking import may_think
from kvasir.serve.conversation.messages import Conversation
from kvasir.serve.conversation.tools import tool_grammar
from kvasir.serve.hosting.serving import Serving
from kvasir.types import Request, SamplingParams


async def prompt_ids(
    conversation: Conversation, serving: Serving, trust: bool | None, bound: Bound = "context"
) -> tuple[int, ...]:
    """The prompt of a conversation, including the tools shown to the model. trust: whether texts may be control tokens;
    None: the server's default. bound: as in `Front.encode`. Raises InvalidRequest, TemplateError."""
    return await serving.front.encode_chat(
        conversation.messages,
        add_special_tokens=conversation.add_special_tokens,
        trust_special_tokens=trust,
        bound=bound,
        **_template_inputs(conversation),
    )


async def prompt_text(conversation: Conversation, serving: Serving) -> tuple[str, Sequence[tuple[int, int]]]:
    """The prompt as a text, and its parts that must not contain control tokens. Raises TemplateError."""
    rendered = await serving.front.render_chat(conversation.messages, **_template_inputs(conversation))
    return rendered.text, serving.front.foreign(rendered, conversation.tools.shown)


async def to_request(
    conversation: Conversation,
    ids: Sequence[int],
    params: SamplingParams,
    serving: Serving,
    *,
    id: str | None = None,
    fields: Mapping[str, Any],
) -> tuple[Request, Reading | None]:
    """The engine's request, and how its output is parsed. ids: the prompt. fields: see `scheduling_fields`. Raises
    InvalidRequest."""
    front, tools = serving.front, conversation.tools
    if params.thinking_token_budget is None and front.reader.ends_thinking(tools.shown):
        params = replace(params, thinking_token_budget=0)
    usable = tools.callable()
    reading = front.reader.reading(ids, usable, await _may_reason(conversation, params, serving))
    grammar = await tool_grammar(tools, front, reading, params)
    if grammar is not None:  # the grammar includes the structure of the content
        params = replace(params, structured_outputs=None)
        fields = {**fields, "grammar": grammar}
    await front.learn(params)
    return front.resolve(ids, params, id=id, param="messages", **fields), reading


async def _may_reason(conversation: Conversation, params: SamplingParams, serving: Serving) -> bool:
    """Whether reasoning may precede the constrained part of the choice."""
    if not conversation.tools.constrains(params):
        return True
    return await may_think(serving.front, conversation.messages, **_template_inputs(conversation))


def _template_inputs(conversation: Conversation) -> dict[str, Any]:
    own = {"chat_template": conversation.template} if conversation.template is not None else {}
    return own | {
        "tools": conversation.tools.shown,
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        "variables": conversation.variables,
    }
