"""Tools of a conversation: which may be called, and the grammar that a choice follows if its calls must be enforced.

Text before a call is free, unless a call is required; a call that has begun names an existing tool, with arguments of
its schema, so malformed calls are impossible. `strict` of a tool refuses schema keywords that cannot be enforced;
without it such keywords are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvasir.engine.front import Front
from kvasir.engine.reading import Calling, Reading, TextGrammar
from kvasir.errors import InvalidRequest
from kvasir.types import SamplingParams, StructuredOutputs

Mode = Literal["none", "auto", "required"]
Tool = dict[str, Any]  # {"type": "function", "function": {name, description, parameters, strict}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode: whether the model may call tools, or must. names: only these tools may be called; empty: all. single: at
    most one call."""

    mode: Mode = "auto"
    names: frozenset[str] = frozenset()
    single: bool = False

    @classmethod
    def one(cls, name: str) -> ToolChoice:
        """This tool must be called, once."""
        return cls("required", frozenset((name,)), single=True)


@dataclass(frozen=True, slots=True)
class Tools:
    """all: the tools, in the form that chat templates read. parallel: whether one choice may have several calls; None
    if the client did not set it. texts: grammars of the texts of custom tools, by the tool's name."""

    all: Sequence[Tool] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool | None = None
    texts: Mapping[str, TextGrammar] = field(default_factory=dict)

    @property
    def shown(self) -> list[Tool] | None:
        """The tools shown to the model."""
        return list(self.all) or None

    def callable(self) -> list[Tool] | None:
        """The tools that the model may call. Raises InvalidRequest for a choice that does not match the tools."""
        seen: set[str] = set()
        for name in (tool["function"]["name"] for tool in self.all):
            if name in seen:
                raise InvalidRequest(f"two tools are named {name[:80]!r}", "give each its own name", param="tools")
            seen.add(name)
        if self.choice.mode == "required" and not self.all:
            message = 'tool_choice is "required" and no tools are given'
            raise InvalidRequest(message, "give tools", param="tool_choice")
        for name in sorted(self.choice.names - seen):
            raise InvalidRequest(f"tool_choice names {name[:80]!r}", "give a tool of this name", param="tool_choice")
        if self.choice.mode == "none":
            return None
        names = self.choice.names or seen
        return [tool for tool in self.all if tool["function"]["name"] in names] or None

    def constrains(self, params: SamplingParams) -> bool:
        """Whether a choice must follow a structure or a call from its beginning, or after its reasoning."""
        return params.structured_outputs is not None or self.choice.mode == "required" or bool(self.choice.names)


async def tool_grammar(tools: Tools, front: Front, reading: Reading | None, params: SamplingParams) -> str | None:
    """The grammar that the choices of a conversation follow: calls of its tools, the structure of the content, the
    budget of the reasoning; None if nothing is constrained. Raises InvalidRequest."""
    calling = _calling(tools, front, reading)
    if calling:
        _check_ends(calling, params)
    return await front.grammars.later(front.grammars.answer, reading, params, calling)


def _calling(tools: Tools, front: Front, reading: Reading | None) -> Calling | None:
    usable = tools.callable()
    if not usable:
        return None
    required = tools.choice.mode == "required"
    if reading is None or not reading.calls:
        if required:
            fault = front.reader.fault(usable) or "the chat template has no known tool-call format"
            message = f"tool calls cannot be required of this model: {fault}"
            raise InvalidRequest(message, 'use "auto", or name one with --tool-format', param="tool_choice")
        return None
    if not reading.format.calls.enforced:
        if required or tools.parallel is False or any(t["function"].get("strict") for t in usable):
            message = f"calls in the format {reading.format.calls.name!r} cannot be enforced"
            raise InvalidRequest(message, 'use "auto", without strict or parallel_tool_calls', param="tool_choice")
        return None
    functions = [
        (f["name"], f.get("parameters") or {}, bool(f.get("strict")), tools.texts.get(f["name"]))
        for f in (tool["function"] for tool in usable)
    ]
    return Calling(functions, required, parallel=not tools.choice.single and tools.parallel is not False)


def _check_ends(calling: Calling, params: SamplingParams) -> None:
    """Raises InvalidRequest for parameters that conflict with calls that end the choice."""
    _check_content(params.structured_outputs)
    if calling.required or not calling.parallel:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(params, name):
                message = f"{name} conflicts with a required tool call, or with calls limited to one"
                raise InvalidRequest(message, f"leave {name} out", param=name)


def _check_content(wanted: StructuredOutputs | None) -> None:
    """Raises InvalidRequest for a structure that is not supported together with tools."""
    if wanted is not None and not wanted.json_object and (wanted.json is None or isinstance(wanted.json, str)):
        message = "together with tools, only a JSON schema is supported as structured output"
        raise InvalidRequest(message, "leave one of them out", param="structured_outputs")
