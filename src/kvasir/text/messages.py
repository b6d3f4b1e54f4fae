"""Chat messages converted to the form that a template can read.

Templates differ: some accept a message's content only as a string, some only as a list of parts, some as either; some
print a tool call's arguments as an object, some insert them as text; some show calls only if the content is null,
others fail on null. What a template accepts is determined by rendering a small conversation and checking whether the
words appear intact.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import InvalidRequest, TemplateError, TemplateLimit

Message = dict[str, Any]
Render = Callable[[list[Message]], str]

# Keys under which a message has its reasoning; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_WORD, _OTHER = "yggdrasil", "ratatoskr"


def takes_strings(render: Render) -> bool:
    """Whether the template reads string contents. A template that fails on a simple greeting is assumed to read
    them."""
    return _rendered(render, [{"role": "user", "content": _WORD}], otherwise=_WORD).count(_WORD) > 0


def takes_parts(render: Render) -> bool:
    """Whether the template reads contents that are lists of parts, and does not print the list itself."""
    parts = [{"type": "text", "text": _WORD}]
    text = _rendered(render, [{"role": "user", "content": parts}], otherwise="")
    return _WORD in text and not any(f"{q}text{q}: {q}{_WORD}" in text for q in "'\"")


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template reads messages with tool calls. argument_objects: arguments as an object, not as JSON text. empty:
    the contents that a message with only calls may have: "", None."""

    argument_objects: bool = True
    empty: tuple[str | None, ...] = ("",)


def call_style(render: Render) -> CallStyle:
    """The style in which the template shows a call; some templates show it only if the content is null, others fail on
    null."""
    for argument_objects in (True, False):
        texts = {
            content: _rendered(render, _calling(content, argument_objects), otherwise="") for content in ("", None)
        }
        empty = tuple(content for content, text in texts.items() if _shows_call(text, argument_objects))
        if "" in empty and texts[None].count("None") > texts[""].count("None"):
            empty = ("",)
        if empty:
            return CallStyle(argument_objects, empty)
    return CallStyle()


def _calling(content: str | None, argument_objects: bool) -> list[Message]:
    arguments = {_WORD: _OTHER}
    function = {"name": "look_up", "arguments": arguments if argument_objects else json.dumps(arguments)}
    call = {"id": "call00001", "type": "function", "function": function}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


def _shows_call(text: str, argument_objects: bool) -> bool:
    return _OTHER in text and not (argument_objects and f"{{'{_WORD}'" in text)


def _rendered(render: Render, messages: list[Message], otherwise: str) -> str:
    try:
        return render(messages)
    except TemplateLimit:  # another attempt would take as long
        raise
    except TemplateError:
        return otherwise


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequest for messages that do not form a conversation; finer checks are up to the template."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest("each message must be an object with a role", param="messages")
        if not isinstance(message.get("tool_calls") or [], list):
            raise InvalidRequest("tool_calls of a message must be a list", param="messages")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    strings: bool = True,
    parts: bool = False,
    calls: CallStyle = CallStyle(),
) -> list[Message]:
    """Copies of the messages with contents, reasoning and tool calls in the form that the template accepts.

    `strings`, `parts` and `calls` describe that form. Text parts are joined with newlines if it accepts no parts; a
    string becomes one part if it accepts no strings. Arguments in JSON text become objects, or vice versa. A null
    content stays null in messages with calls, unless the template accepts only "" there; elsewhere it becomes "".
    Raises `InvalidRequest` for messages that cannot be converted to that form.
    """
    return [made for message in messages for made in _normalized(dict(message), strings, parts, calls)]


def _normalized(message: Message, strings: bool, parts: bool, calls: CallStyle) -> list[Message]:
    content = message.get("content")
    if isinstance(content, list) and not parts:
        message["content"] = "\n".join(_part_text(part) for part in content)
    elif isinstance(content, str) and parts and not strings and not _only_calls(message):
        message["content"] = [{"type": "text", "text": content}]
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, calls.argument_objects) for call in message["tool_calls"]]
        return _with_calls(message, calls.empty)
    return [{**message, "content": ""} if "content" in message and message["content"] is None else message]


def _only_calls(message: Message) -> bool:
    return not message.get("content") and bool(message.get("tool_calls"))


def _with_calls(message: Message, empty: Sequence[str | None]) -> list[Message]:
    """The message with a content with which the template shows the calls; two messages if it shows no calls together
    with text."""
    content = message.get("content")
    if not content:
        return [message if content in empty and "content" in message else {**message, "content": empty[0]}]
    if "" in empty:
        return [message]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return [rest, {"role": message["role"], "content": None, "tool_calls": message["tool_calls"]}]


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequest(
        f"this model's chat template takes text only, not a content part of type {kind!r}", param="messages"
    )


def _tool_call(call: Any, argument_objects: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if argument_objects and isinstance(arguments, str):
        arguments = _parsed(arguments)
    elif not argument_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of a tool call are not valid JSON: {error}", param="messages") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the arguments of a tool call are not a JSON object", param="messages")
    return value
