"""Conversation: what a client asks of a model, whatever its dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

from kvasir.serve.conversation.tools import Tools


class CallMessage(TypedDict, total=False):
    """A tool call. function: its name and its arguments, as an object or as JSON text."""

    id: str
    type: str
    function: Required[dict[str, Any]]


class TemplateMessage(TypedDict, total=False):
    """A message as chat templates read it
    (https://huggingface.co/docs/transformers/chat_templating_writing).

    content: a text, or parts of the form {"type": "text", "text": ...}. name, tool_call_id: of a tool's result.
    """

    role: Required[str]
    content: str | list[dict[str, Any]] | None
    reasoning_content: str
    tool_calls: list[CallMessage]
    tool_call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages and everything else that a chat template reads.

    messages: `TemplateMessage`s, after those of the model's store entry. variables: of the template, such as its
    switch for thinking. template: the source of a template instead of the model's. continue_final_message: the model
    continues the last message, which is its own. add_special_tokens: the tokenizer adds its own, besides those that
    the template writes.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = field(default_factory=Tools)
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
