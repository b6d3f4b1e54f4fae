"""Messages and tools in the format that OpenAI's API introduced. vLLM's and llama.cpp's own routes take them, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.messages import TemplateMessage
from kvasir.serve.conversation.tools import ToolChoice, Tools
from kvasir.serve.http.wire import MAX_PARTS, MAX_TOOLS, Name, Wire


class FunctionCall(Wire):
    name: Name
    arguments: str | dict[str, Any]


class ToolCall(Wire):
    IGNORED: ClassVar = ("index",)

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients echo streamed calls back with it


class ContentPart(Wire):
    """A part of a message's content. Only text is supported; the other kinds are refused by name."""

    REFUSED: ClassVar = dict.fromkeys(
        ("image_url", "input_audio", "file", "prompt_cache_breakpoint"), ((), "this model reads text")
    )

    type: Name
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None


class ChatMessage(Wire):
    REFUSED: ClassVar = {"audio": ((), "this server writes text")}
    IGNORED: ClassVar = ("annotations",)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # clients send back the annotations of a response
    audio: Any = None


class FunctionDefinition(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Wire):
    name: Name


class NamedChoice(Wire):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Wire):
    """All tools are shown to the model, but only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None


def to_tools(tools: Sequence[ChatTool] | None, choice: Choice = None, parallel: bool | None = None) -> Tools:
    """The tools of a conversation and which of them may be called."""
    shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    match choice:
        case NamedChoice():
            return Tools(shown, ToolChoice.one(choice.function.name), parallel)
        case AllowedChoice():
            names = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
            return Tools(shown, ToolChoice(choice.allowed_tools.mode, names), parallel)
    return Tools(shown, ToolChoice(choice or "auto"), parallel)


def to_messages(messages: Sequence[ChatMessage], front: Front, tools: Tools) -> list[TemplateMessage]:
    """The messages as the model's template reads them. Raises InvalidRequest."""
    roles = template_roles(front, tools)
    return [_to_message(message, i, roles) for i, message in enumerate(messages)]


def template_roles(front: Front, tools: Tools) -> dict[str, str]:
    """The roles that stand for roles that the model's template does not know."""
    knows_developer = any(front.template_mentions(f"{q}developer{q}", tools.shown) for q in "'\"")
    return {"developer": "developer" if knows_developer else "system", "function": "tool"}


def _to_message(message: ChatMessage, index: int, roles: dict[str, str]) -> TemplateMessage:
    """roles: replaces roles that this template does not know."""
    where = f"messages.{index}"
    if message.audio is not None:
        raise InvalidRequest("audio is not supported", param=f"{where}.audio")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest("content is missing", param=f"{where}.content")
    result: TemplateMessage = {"role": roles.get(message.role, message.role)}
    content = message.content
    if isinstance(content, list):
        content = [_to_part(part, f"{where}.content.{i}") for i, part in enumerate(content)]
    result["content"] = content if content is not None else message.refusal
    calls: list[Any] = [call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append({"type": "function", "function": message.function_call.model_dump()})
    if calls:
        result["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    return result


def _to_part(part: ContentPart, where: str) -> dict[str, str]:
    """A text part. Raises InvalidRequest naming any other kind."""
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None or part.image_url or part.input_audio or part.file:
        raise InvalidRequest(
            f"a content part of type {part.type[:40]!r} is not supported",
            "this model reads text",
            param=where,
        )
    if part.prompt_cache_breakpoint is not None:
        raise InvalidRequest("it is not supported", "leave it out", param=f"{where}.prompt_cache_breakpoint")
    return {"type": "text", "text": text}
