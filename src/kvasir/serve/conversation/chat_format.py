"""Messages and tools in the format that OpenAI's API introduced. vLLM's and llama.cpp's own routes take them, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvasir.engine.front import Front
from kvasir.engine.reading import TextGrammar
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.custom import INPUT, Syntax, custom_function, text_grammar
from kvasir.serve.conversation.messages import TemplateMessage
from kvasir.serve.conversation.tools import Tool, ToolChoice, Tools
from kvasir.serve.http.wire import MAX_PARTS, MAX_TOOLS, Name, Wire


class FunctionCall(Wire):
    name: Name
    arguments: str | dict[str, Any]


class CustomCall(Wire):
    name: Name
    input: str


class ToolCall(Wire):
    """function, custom: the one that `type` names."""

    IGNORED: ClassVar = ("index",)

    id: Name | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None
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


class CustomGrammar(Wire):
    """The grammar of a custom tool's text."""

    syntax: Syntax
    definition: Annotated[str, Field(min_length=1)]


class CustomFormat(Wire):
    """Of a custom tool's text. grammar: for the type `grammar`."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomDefinition(Wire):
    """A tool whose calls have a text instead of arguments. format: of that text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    format: CustomFormat | None = None


class ChatTool(Wire):
    """function, custom: the one that `type` names."""

    type: Literal["function", "custom"]
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class NamedFunction(Wire):
    name: Name


class NamedChoice(Wire):
    """function, custom: the one that `type` names."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Wire):
    """All tools are shown to the model, but only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None


def to_tools(tools: Sequence[ChatTool] | None, choice: Choice = None, parallel: bool | None = None) -> Tools:
    """The tools of a conversation and which of them may be called. Raises InvalidRequest."""
    texts: dict[str, TextGrammar] = {}
    shown = [_to_tool(tool, f"tools.{i}", texts) for i, tool in enumerate(tools or ())]
    match choice:
        case NamedChoice():
            return Tools(shown, ToolChoice.one(chosen_name(choice, "tool_choice")), parallel, texts)
        case AllowedChoice():
            where = "tool_choice.allowed_tools.tools"
            names = frozenset(chosen_name(tool, f"{where}.{i}") for i, tool in enumerate(choice.allowed_tools.tools))
            return Tools(shown, ToolChoice(choice.allowed_tools.mode, names), parallel, texts)
    return Tools(shown, ToolChoice(choice or "auto"), parallel, texts)


def custom_names(tools: Sequence[ChatTool] | None) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.custom.name for tool in tools or () if tool.custom)


def _to_tool(tool: ChatTool, where: str, texts: dict[str, TextGrammar]) -> Tool:
    """A tool as templates read it. texts: gets the grammar of a custom tool."""
    if tool.type == "function":
        return {"type": "function", "function": _named(tool, where).model_dump(exclude_none=True)}
    custom: CustomDefinition = _named(tool, where)
    format = custom.format or CustomFormat(type="text")
    parts = (format.grammar.syntax, format.grammar.definition) if format.grammar else (None, None)
    grammar = text_grammar(format.type, *parts, f"{where}.custom.format.grammar")
    if grammar:
        texts[custom.name] = grammar
    return custom_function(custom.name, custom.description, grammar)


def _named(wire: ChatTool | NamedChoice | ToolCall, where: str) -> Any:
    """The object that `type` names. Raises InvalidRequest if another one is given, or none."""
    names = ("function", "custom")
    if [name for name in names if getattr(wire, name) is not None] != [wire.type]:
        message = f"of the type {wire.type!r}, exactly the object {wire.type!r} is expected"
        raise InvalidRequest(message, param=f"{where}.{wire.type}")
    return getattr(wire, wire.type)


def chosen_name(choice: NamedChoice, where: str) -> str:
    """The tool that a choice names. Raises InvalidRequest."""
    return _named(choice, where).name


def _to_call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call as templates read it."""
    about = {"id": call.id} if call.id is not None else {}
    found = _named(call, where)
    if call.type == "function":
        return {**about, "type": "function", "function": found.model_dump()}
    return {**about, "type": "function", "function": {"name": found.name, "arguments": {INPUT: found.input}}}


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
    given = enumerate(message.tool_calls or ())
    calls: list[Any] = [_to_call(call, f"{where}.tool_calls.{i}") for i, call in given]
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
