"""Tools of a chat: which may be called, and the grammar that a choice follows if its calls must be enforced.

Text before a call is free, unless a call is required; a call that has begun names an existing tool, with arguments of
its schema, so malformed calls are impossible. `strict` of a tool refuses schema keywords that cannot be enforced;
without it such keywords are ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from kvasir.engine.front import Front
from kvasir.engine.reading import Calling, Reading
from kvasir.errors import InvalidRequest
from kvasir.serve.dialects.openai.wire import AllowedChoice, ChatRequest, NamedChoice
from kvasir.types import SamplingParams, StructuredOutputs

Choice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None


def shown_tools(wire: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools shown to the model."""
    return [t.model_dump(exclude_none=True) for t in wire.tools] if wire.tools else None


def callable_tools(wire: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the model may call. Raises InvalidRequest for a tool_choice that does not match the tools."""
    tools = shown_tools(wire) or []
    seen: set[str] = set()
    for name in (t["function"]["name"] for t in tools):
        if name in seen:
            raise InvalidRequest(f"two tools are named {name[:80]!r}", "give each its own name", param="tools")
        seen.add(name)
    if wire.tool_choice == "required" and not tools:
        raise InvalidRequest('tool_choice is "required" and there are no tools', "give tools", param="tool_choice")
    names = _names(wire.tool_choice)
    for name in sorted(names - seen):
        raise InvalidRequest(f"tool_choice names {name[:80]!r}", "give a tool of this name", param="tool_choice")
    if names:
        tools = [t for t in tools if t["function"]["name"] in names]
    return None if wire.tool_choice == "none" else tools or None


def _names(choice: Choice) -> set[str]:
    """The tools that a tool_choice names; empty: all."""
    match choice:
        case NamedChoice():
            return {choice.function.name}
        case AllowedChoice():
            return {tool.function.name for tool in choice.allowed_tools.tools}
    return set()


def follows(wire: ChatRequest, params: SamplingParams) -> bool:
    """Whether a choice must follow a structure or a call from its beginning, or after its reasoning."""
    return params.structured_outputs is not None or wire.tool_choice not in (None, "auto", "none")


async def tool_grammar(wire: ChatRequest, front: Front, reading: Reading | None, params: SamplingParams) -> str | None:
    """The grammar that the choices of a chat follow: calls of its tools, the structure of the content, the budget of
    the reasoning; None if nothing is constrained. Raises InvalidRequest."""
    calling = _calling(wire, front, reading)
    if calling:
        _check_ends(calling, params)
    return await front.grammars.later(front.grammars.answer, reading, params, calling)


def _calling(wire: ChatRequest, front: Front, reading: Reading | None) -> Calling | None:
    tools = callable_tools(wire)
    if not tools:
        return None
    named = isinstance(wire.tool_choice, NamedChoice)
    allowed = wire.tool_choice.allowed_tools if isinstance(wire.tool_choice, AllowedChoice) else None
    required = named or wire.tool_choice == "required" or (allowed is not None and allowed.mode == "required")
    if reading is None or not reading.calls:
        if required:
            fault = front.reader.fault(tools) or "the chat template says of no format of tool calls"
            message = f"no call can be required of this model: {fault}"
            raise InvalidRequest(message, 'use "auto", or name one with --tool-format', param="tool_choice")
        return None
    if not reading.format.calls.enforced:
        if required or wire.parallel_tool_calls is False or any(t["function"].get("strict") for t in tools):
            message = f"calls in the format {reading.format.calls.name!r} cannot be enforced"
            raise InvalidRequest(message, 'use "auto", without strict or parallel_tool_calls', param="tool_choice")
        return None
    functions = [
        (t["function"]["name"], t["function"].get("parameters") or {}, bool(t["function"].get("strict")))
        for t in tools
    ]  # fmt: skip
    return Calling(functions, required, parallel=not named and wire.parallel_tool_calls is not False)


def _check_ends(calling: Calling, params: SamplingParams) -> None:
    """Raises InvalidRequest for parameters that conflict with calls that end the choice."""
    _check_content(params.structured_outputs)
    if calling.required or not calling.parallel:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(params, name):
                message = f"{name} goes against a tool that has to be called, or calls of which there is one at most"
                raise InvalidRequest(message, f"leave {name} out", param=name)


def _check_content(wanted: StructuredOutputs | None) -> None:
    """Raises InvalidRequest for a structure that is not supported together with tools."""
    if wanted is not None and not wanted.json_object and (wanted.json is None or isinstance(wanted.json, str)):
        message = "beside tools an answer can have a JSON schema, and no other structure"
        raise InvalidRequest(message, "leave tools or this out", param="structured_outputs")
