"""Whether and how much a model thinks: the fields that ask for it, in the words of its chat template."""

from __future__ import annotations

import re
from typing import Any

from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest

SWITCHES = ("enable_thinking", "thinking")  # the names that templates know it by
LEVELS = "reasoning_effort"


def switch_of(front: Front, tools: object = None) -> str | None:
    """The variable with which the chat template turns thinking on and off; None where it has none."""
    source = front.template.select(tools) if front.template and front.template.sources else ""
    found = (name for name in SWITCHES if re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", source))
    return next(found, None)


def effort_variables(effort: str | None, front: Front, tools: object = None) -> dict[str, Any]:
    """The template's variables for OpenAI's `reasoning_effort`: "none" turns thinking off, anything else on; how much
    of it, a template says that knows levels. Raises InvalidRequest where the template knows neither."""
    if effort is None:
        return {}
    switch, levels = switch_of(front, tools), front.template_mentions(LEVELS, tools)
    if effort == "none" and (switch or front.reader.format(tools).thinking is None):
        return {switch: False} if switch else {}
    if not (switch or levels):
        raise InvalidRequest("this model's chat template knows no effort of reasoning", "leave it out", param=LEVELS)
    return ({switch: True} if switch else {}) | ({LEVELS: effort} if levels else {})
