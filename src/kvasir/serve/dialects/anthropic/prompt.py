"""Converts the Messages API to a conversation:

    system          a first message of role system
    user            its texts are one message, each tool_result one of role tool, in their order
    assistant       its texts, with thinking as reasoning_content and tool_use as tool_calls
    last message    if it is the assistant's, the model continues it

Consecutive messages of one role are one turn, as the API specifies.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.messages import CallMessage, Conversation, TemplateMessage
from kvasir.serve.conversation.thinking import LEVELS, effort_variables
from kvasir.serve.conversation.tools import Tool, ToolChoice, Tools
from kvasir.serve.dialects.anthropic.wire import (
    AnyChoice,
    AutoChoice,
    Block,
    CustomTool,
    InputMessage,
    JsonFormat,
    MessagesBody,
    NamedTool,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
)
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.faults import ThreadUnsupported
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import StructuredOutputs

ALLOWED = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
CARRIES = "carries."  # prefix of a signature that holds the thinking itself, which the client asked to omit


def to_conversation(wire: MessagesBody, serving: Serving) -> tuple[Conversation, dict[str, Any]]:
    """The conversation, and the fields of SamplingParams that follow from it. Raises InvalidRequest with the location
    of an unsupported value, ThreadUnsupported."""
    _refuse(wire)
    front, messages = serving.front, list(_messages(wire))
    tools = _tools(wire)
    variables, fields = _thinking(wire, front, tools)
    fields["structured_outputs"] = _format(wire)
    continues = wire.messages[-1].role == "assistant"
    if continues and messages[-1].get("tool_calls"):
        message = "the last message calls tools, so it cannot be continued"
        raise InvalidRequest(message, "give the results of the calls", param=f"messages.{len(wire.messages) - 1}")
    conversation = Conversation(
        serving.conversation(messages),
        tools,
        variables,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return conversation, fields


def _refuse(wire: MessagesBody) -> None:
    """Raises InvalidRequest for unsupported fields, or ThreadUnsupported for `thread`, which is checked last: a client
    may then resend the whole conversation without it."""
    try:
        refuse_fields(wire)
    except InvalidRequest as error:
        if error.param == "thread":
            raise ThreadUnsupported(error.message, error.hint, error.param) from None
        raise


# -- messages ----------------------------------------------------------------------------------------------


def _messages(wire: MessagesBody) -> Iterator[TemplateMessage]:
    if wire.system:
        _check_parts(wire.system, "system")
        text = wire.system if isinstance(wire.system, str) else _parts(wire.system)
        yield {"role": "system", "content": text}
    names: dict[str, str] = {}  # of the called tools, by the ids of the calls
    for role, turn in groupby(_shown(wire), key=lambda shown: shown[0]):
        blocks = [block for _, some in turn for block in some]
        if role == "assistant":
            yield _assistant(blocks, names)
        else:
            yield from _others(role, blocks, names)


def _shown(wire: MessagesBody) -> list[tuple[str, list[Block]]]:
    """Role and content of the messages, without those that were to be cleared by this turn. Raises InvalidRequest."""
    last = max((i for i, message in enumerate(wire.messages) if message.role == "user"), default=-1)
    found = [(message, _blocks(message, i)) for i, message in enumerate(wire.messages)]
    return [
        (message.role, blocks)
        for i, (message, blocks) in enumerate(found)
        if i > last or message.clear_at != "next_user_message"
    ]


def _blocks(message: InputMessage, index: int) -> list[Block]:
    """A message's content. Raises InvalidRequest for a kind of block that its role does not allow."""
    refuse_fields(message, f"messages.{index}")
    if message.clear_at is not None and message.role != "system":
        raise InvalidRequest("only a system message may have it", "leave it out", param=f"messages.{index}.clear_at")
    if message.content is None:
        raise InvalidRequest("content is missing", "give a text or blocks", param=f"messages.{index}.content")
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    for j, block in enumerate(message.content):
        if not isinstance(block, ALLOWED[message.role]):
            raise InvalidRequest(
                f"a block of type {block.type} in a message of the {message.role}",
                "expected " + " or ".join(kind.__name__ for kind in ALLOWED[message.role]),
                param=f"messages.{index}.content.{j}",
            )
        refuse_fields(block, f"messages.{index}.content.{j}")
        if isinstance(block, ToolResultBlock):
            _check_parts(block.content or (), f"messages.{index}.content.{j}.content")
    return list(message.content)


def _check_parts(content: str | Sequence[TextBlock], place: str) -> None:
    for i, part in enumerate(content if not isinstance(content, str) else ()):
        refuse_fields(part, f"{place}.{i}")


def _assistant(turn: Sequence[Block], names: dict[str, str]) -> TemplateMessage:
    texts = [block for block in turn if isinstance(block, TextBlock)]
    thoughts = [thought(block) for block in turn if isinstance(block, ThinkingBlock)]
    calls: list[CallMessage] = []
    for block in turn:
        if isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    message: TemplateMessage = {"role": "assistant", "content": _parts(texts) if texts or not calls else None}
    if thinking := "\n".join(thoughts):
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: Any, turn: Sequence[Block], names: dict[str, str]) -> Iterator[TemplateMessage]:
    texts: list[TextBlock] = []
    for block in turn:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": _parts(texts)}
                texts = []
            yield _result(block, names)
    if texts or not turn:
        yield {"role": role, "content": _parts(texts)}


def _result(block: ToolResultBlock, names: dict[str, str]) -> TemplateMessage:
    """The result as a message of role tool. Templates cannot express a failed call, so the text states it."""
    name = names.get(block.tool_use_id)
    if name is None:
        message = f"no earlier tool_use has the id {block.tool_use_id[:80]!r}"
        raise InvalidRequest(message, "a tool_result must refer to a call of the conversation", param="messages")
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    text = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id, "name": name}


def _parts(texts: Sequence[TextBlock]) -> str | list[dict[str, Any]]:
    """One text unchanged; several as parts, which the template joins in its own way."""
    if len(texts) < 2:
        return texts[0].text if texts else ""
    return [{"type": "text", "text": block.text} for block in texts]


# -- thinking ----------------------------------------------------------------------------------------------


def _thinking(wire: MessagesBody, front: Front, tools: Tools) -> tuple[dict[str, Any], dict[str, Any]]:
    """The template's variables and the fields of SamplingParams for whether the model may think, and its budget:
    set by the template's switch, if it has one, otherwise disabled by a budget of 0. A model that does not think needs
    no budget. Raises InvalidRequest."""
    config, effort = wire.output_config, None
    if config is not None:
        refuse_fields(config, "output_config")
        if config.effort and front.template_mentions(LEVELS, tools.shown):
            effort = config.effort
    variables, fields = effort_variables(effort, front, tools.shown), dict[str, Any]()
    if wire.thinking is None:
        return variables, fields
    thinks = front.reader.format(tools.shown).thinking is not None
    disabled = isinstance(wire.thinking, ThinkingDisabled)
    if switch := front.reader.switch(tools.shown):
        variables[switch] = not disabled
    elif disabled and thinks:
        fields["thinking_token_budget"] = 0
    if not isinstance(wire.thinking, ThinkingDisabled):
        refuse_fields(wire.thinking, "thinking")
    if isinstance(wire.thinking, ThinkingEnabled) and thinks:
        fields["thinking_token_budget"] = wire.thinking.budget_tokens
    return variables, fields


def omits(wire: MessagesBody) -> bool:
    """Whether the client asks to omit thinking."""
    return not isinstance(wire.thinking, ThinkingDisabled | None) and wire.thinking.display == "omitted"


def signature(text: str, omitted: bool) -> str:
    """The signature of a thinking block. Omitted thinking is stored in it and returns to the model with it; otherwise
    it is only a digest, which is not checked when it comes back."""
    if omitted:
        return CARRIES + base64.b64encode(text.encode()).decode()
    return hashlib.sha256(text.encode()).hexdigest()


def thought(block: ThinkingBlock) -> str:
    """The thinking of a block. Raises InvalidRequest for a modified signature."""
    if block.thinking or not block.signature.startswith(CARRIES):
        return block.thinking
    try:
        return base64.b64decode(block.signature.removeprefix(CARRIES), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        message = "the signature of a thinking block was changed"
        raise InvalidRequest(message, "send it back unchanged", param="messages") from error


# -- tools and formats -------------------------------------------------------------------------------------


def _tools(wire: MessagesBody) -> Tools:
    tools, choice = wire.tools or [], wire.tool_choice
    for i, tool in enumerate(tools):
        refuse_fields(tool, f"tools.{i}")
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("two tools have one name", "give each its own", param="tools")
    shown = [_tool(tool) for tool in tools]
    match choice:
        case AutoChoice():
            return Tools(shown, ToolChoice("auto"), not choice.disable_parallel_tool_use)
        case AnyChoice():
            return Tools(shown, ToolChoice("required"), not choice.disable_parallel_tool_use)
        case NamedTool():
            return Tools(shown, ToolChoice.one(choice.name), not choice.disable_parallel_tool_use)
        case None:
            return Tools(shown)
    return Tools(shown, ToolChoice("none"))


def _tool(tool: CustomTool) -> Tool:
    schema = tool.input_schema
    if tool.input_examples:
        schema = {**schema, "examples": tool.input_examples}
    function = {"name": tool.name, "description": tool.description, "parameters": schema, "strict": tool.strict}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _format(wire: MessagesBody) -> StructuredOutputs | None:
    given: JsonFormat | None = wire.output_config.format if wire.output_config else None
    if given is not None and wire.output_format is not None:
        raise InvalidRequest("output_config.format is given too", "give one of them", param="output_format")
    given = given or wire.output_format
    return None if given is None else StructuredOutputs(json=given.schema_)
