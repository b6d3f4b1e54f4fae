"""Whether an answer may reason before it says anything: what the chat template's switch makes of its prompt."""

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
    """Whether the answer to a conversation may reason first: not where its variables switch that off, or where its
    prompt is the one with the template's switch off and does not say itself what switching on would add. Without a
    switch, the model decides.

    Arguments as in `Front.render_chat`, and errors."""
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
    """Whether a prompt is the one with thinking off, which differs from that with thinking on, and says nowhere itself
    what switching on would add."""
    return prompt == off != on and not _says(prompt, _added(off, on))


def _added(off: str, on: str) -> str:
    """What switching thinking on adds to a prompt."""
    begin = _alike(off, on)
    end = _alike(off[begin:][::-1], on[begin:][::-1])
    return on[begin : len(on) - end].strip()


def _alike(a: str, b: str) -> int:
    """The length of their common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _says(prompt: str, word: str) -> bool:
    """Whether a switch such as /think stands in a prompt, as a word of its own."""
    return bool(word) and re.search(rf"(?<!\S){re.escape(word)}(?![\w>])", prompt) is not None
