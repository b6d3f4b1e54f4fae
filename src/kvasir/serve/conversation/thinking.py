"""Whether and how much a model thinks: request fields mapped to variables of its chat template."""

from __future__ import annotations

from typing import Any

from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest

LEVELS = "reasoning_effort"


def effort_variables(effort: str | None, front: Front, tools: object = None) -> dict[str, Any]:
    """The template's variables for OpenAI's `reasoning_effort`: "none" turns thinking off, any other value on; the
    level is passed to templates that have levels. Raises InvalidRequest if the template has neither a switch nor
    levels."""
    if effort is None:
        return dict(front.reader.default_variables(tools))
    switch, levels = front.reader.switch(tools), front.template_mentions(LEVELS, tools)
    if effort == "none" and (switch or front.reader.format(tools).thinking is None):
        return {switch: False} if switch else {}
    if not (switch or levels):
        raise InvalidRequest("this model's chat template has no reasoning effort", "leave it out", param=LEVELS)
    return ({switch: True} if switch else {}) | ({LEVELS: effort} if levels else {})
