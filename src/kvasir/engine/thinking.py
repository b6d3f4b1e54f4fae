"""Whether a choice may reason before its content, given how the chat template's switch changes the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.engine.front import Front
from kvasir.engine.reading import SWITCHES


async def may_think(
    front: Front,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    **template: Any,
) -> bool:
    """Whether the choice for a conversation may reason first. False if the conversation's variables switch reasoning
    off, or if its prompt equals the prompt with the template's switch off and does not itself contain the text that
    switching on would add. Without a switch, the model decides.

    Arguments and errors as in `Front.render_chat`."""
    given, switch = variables or {}, front.reader.switch(tools)
    if any(given.get(name) is False for name in SWITCHES):
        return False
    if switch is None or given.get(switch) is True:
        return True
    prompt, off, on = [
        (await front.render_chat(messages, tools=tools, variables={**given, **more}, **template)).text
        for more in ({}, {switch: False}, {switch: True})
    ]
    return not switched_off(prompt, off, on)


def switched_off(prompt: str, off: str, on: str) -> bool:
    """Whether a prompt equals the prompt with thinking off, which differs from the prompt with thinking on, and does
    not contain the text that switching on would add."""
    return prompt == off != on and not _contains_word(prompt, _added(off, on))


def _added(off: str, on: str) -> str:
    """The text that switching thinking on adds to a prompt."""
    begin = _alike(off, on)
    end = _alike(off[begin:][::-1], on[begin:][::-1])
    return on[begin : len(on) - end].strip()


def _alike(a: str, b: str) -> int:
    """The length of their common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _contains_word(prompt: str, word: str) -> bool:
    """Whether a prompt contains a switch such as /think as a separate word."""
    return bool(word) and re.search(rf"(?<!\S){re.escape(word)}(?![\w>])", prompt) is not None
