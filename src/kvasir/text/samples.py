"""What a model says when it calls tools, as its chat template shows it: small conversations, rendered and cut.

prompt  what the template writes for the question
whole   what it writes for the question and an answer that calls
said    the end of `whole`: from where it leaves `prompt`, but never from the middle of a mark
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

Render = Callable[[list[Message], bool], str]  # of messages, with these tools; whether the answer is to begin
Arguments = dict[str, Any]

# Templates that have a call for themselves, or that write one kind of value in a way that no model does, show less.
_CALLS: tuple[Sequence[Arguments], ...] = (
    ({"word": "yggdrasil", "count": 4217}, {"count": 5903, "word": "ratatoskr"}),
    ({"word": "yggdrasil", "count": 4217},),
    ({"count": 4217},),
)
_WORD = "huginn"
# Mistral's templates demand the first kind, Kimi's write the second as the name.
_IDS = ("call0000{}", f"functions.{NAME}:{{}}")


class Sample(NamedTuple):
    """An answer that calls `NAME` with these arguments, in this order. turn_end: what stands after any answer."""

    prompt: str
    said: str
    turn_end: str
    calls: tuple[Arguments, ...]


def samples(render: Render, style: CallStyle) -> Iterator[Sample]:
    """What the template shows, the most telling first; nothing where it shows no calls. Raises TemplateLimit."""
    question: Message = {"role": "user", "content": "?"}
    if (prompt := _rendered(render, [question], True)) is None:
        return
    plain = _rendered(render, [question, {"role": "assistant", "content": _WORD}], False) or ""
    turn_end = plain.rpartition(_WORD)[2] if _WORD in plain else ""
    for id in _IDS:
        for calls in _CALLS:
            answer = {"role": "assistant", "content": "", "tool_calls": [_call(id, i, a) for i, a in enumerate(calls)]}
            whole = _rendered(render, normalize_messages([question, answer], calls=style), False)
            said = whole and whole[_beginning(prompt, plain, whole) :]
            if said and all(word in said for arguments in calls for word in map(_written, arguments.values())):
                yield Sample(prompt, said, turn_end, tuple(calls))


def _call(id: str, index: int, arguments: Arguments) -> dict[str, Any]:
    return {
        "id": id.format(index),
        "type": "function",
        "function": {"name": NAME, "arguments": json.dumps(arguments)},
    }


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _beginning(prompt: str, plain: str, whole: str) -> int:
    """Where the answer begins in `whole`: after the prompt, or, where that is written in another way before an answer
    that is to come, as late as in a plain answer."""
    parting = _parting(prompt, whole)
    return parting if parting == len(prompt) else max(parting, _parting(plain, whole))


def _parting(prompt: str, whole: str) -> int:
    """Where `whole` continues in another way than `prompt`; before the mark if that is within one."""
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
