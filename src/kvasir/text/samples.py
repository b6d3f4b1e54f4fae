"""Tool calls as a model writes them, shown by its chat template: small conversations, rendered and cut.

prompt  the text that the template writes for the question
whole   the text that it writes for the question and an assistant message with calls
turn    the end of `whole`: from where it differs from `prompt`, but never from the middle of a mark
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvasir.errors import TemplateError, TemplateLimit
from kvasir.text.messages import CallStyle, Message, normalize_messages

NAME = "look_up"
PARAMETERS = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "description": "What to look up"},
        "count": {"type": "integer", "description": "How many to find"},
    },
    "required": ["count"],
}
TOOLS = [{"type": "function", "function": {"name": NAME, "description": "Looks up", "parameters": PARAMETERS}}]

Render = Callable[[list[Message], bool], str]  # (messages, add_generation_prompt) -> text; the tools are TOOLS
Arguments = dict[str, Any]

# Some templates accept only one call per message, or write one kind of value unlike any model: they show less.
_CALLS: tuple[Sequence[Arguments], ...] = (
    ({"word": "yggdrasil", "count": 4217}, {"count": 5903, "word": "ratatoskr"}),
    ({"word": "yggdrasil", "count": 4217},),
    ({"count": 4217},),
)
_WORD = "huginn"
# Mistral's templates require the first form; Kimi's write the second as the name.
_IDS = ("call0000{}", f"functions.{NAME}:{{}}")


class SampleCall(NamedTuple):
    """An assistant message that calls `NAME` with these arguments, in this order. turn_end: the text after any
    assistant message."""

    prompt: str
    turn: str
    turn_end: str
    calls: tuple[Arguments, ...]


def samples(render: Render, style: CallStyle) -> Iterator[SampleCall]:
    """The template's samples, the most informative first; empty if it shows no calls. Raises TemplateLimit."""
    question: Message = {"role": "user", "content": "?"}
    if (prompt := _rendered(render, [question], True)) is None:
        return
    plain = _rendered(render, [question, {"role": "assistant", "content": _WORD}], False) or ""
    turn_end = plain.rpartition(_WORD)[2] if _WORD in plain else ""
    for id in _IDS:
        for calls in _CALLS:
            answer = {"role": "assistant", "content": "", "tool_calls": [_call(id, i, a) for i, a in enumerate(calls)]}
            whole = _rendered(render, normalize_messages([question, answer], calls=style), False)
            turn = whole and whole[_beginning(prompt, plain, whole) :]
            if turn and all(word in turn for arguments in calls for word in map(_written, arguments.values())):
                yield SampleCall(prompt, turn, turn_end, tuple(calls))


def _call(id: str, index: int, arguments: Arguments) -> dict[str, Any]:
    return {
        "id": id.format(index),
        "type": "function",
        "function": {"name": NAME, "arguments": json.dumps(arguments)},
    }


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _beginning(prompt: str, plain: str, whole: str) -> int:
    """Where the assistant message begins in `whole`: after the prompt or, if the template writes the prompt differently
    when the message is already there, at least as late as in `plain`."""
    parting = _parting(prompt, whole)
    return parting if parting == len(prompt) else max(parting, _parting(plain, whole))


def _parting(prompt: str, whole: str) -> int:
    """Where `whole` first differs from `prompt`; the start of the mark if that position is within a mark."""
    pairs = enumerate(zip(prompt, whole, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    if same == len(prompt):
        return same
    opened = [whole.rfind(a, 0, same) for a, b in ("<>", "[]") if whole.rfind(a, 0, same) > whole.rfind(b, 0, same)]
    return max(opened, default=same)


def _rendered(render: Render, messages: list[Message], begins: bool) -> str | None:
    try:
        return render(messages, begins)
    except TemplateLimit:
        raise
    except TemplateError:
        return None
