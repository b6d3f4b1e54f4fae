"""Items, the elements of a conversation: as clients send them, as they are stored, and as messages of a chat.

    wire (Item) -> kept (a dict with an id, as the API shows it) -> messages of a chat

The output of one turn (reasoning, text, calls) is several items and one message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.custom import INPUT
from kvasir.serve.conversation.messages import CallMessage, TemplateMessage
from kvasir.serve.http.wire import MAX_PARTS, Name, Wire, refuse_fields
from kvasir.serve.records.responses import Kept

Status = Literal["in_progress", "completed", "incomplete"]
_SEALED = "kvasir1."
SUMMARY = "Summary of our conversation so far:\n\n"
_CALLER = (({"type": "direct"},), "only the model can make calls")


def check_type(value: Any, kinds: tuple[str, ...], what: str, hint: str) -> Any:
    """Returns the value. An object of an unsupported type raises an error that names the type."""
    kind = value.get("type") if isinstance(value, dict) else kinds[0]
    if kind not in kinds:
        facts = {"what": what, "kind": str(kind)[:80], "hint": hint}
        raise PydanticCustomError("kind", "{what} of type '{kind}' is not supported ({hint})", facts)
    return value


class TextPart(Wire):
    REFUSED: ClassVar = {"prompt_cache_breakpoint": ((), "leave it out")}
    IGNORED: ClassVar = ("annotations", "logprobs")  # clients send back the annotations of a response

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


def _check_part(value: Any) -> Any:
    kinds = ("input_text", "output_text", "refusal")
    return check_type(value, kinds, "a part", "this model reads text")


def _part_kind(value: Any) -> str:
    return "[refusal]" if _get(value, "type") == "refusal" else "[text]"


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


# Tags are in brackets, so that they are not mistaken for fields in an error's location.
Part = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")],
    Discriminator(_part_kind),
    BeforeValidator(_check_part),
]
Content = str | Annotated[list[Part], Field(max_length=MAX_PARTS)]


class MessageItem(Wire):
    IGNORED: ClassVar = ("status", "phase")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class AnyCall(Wire):
    """What calls of functions and of custom tools have in common."""

    REFUSED: ClassVar = {"async_": ((False,), "leave it out"), "caller": _CALLER, "namespace": ((), "leave it out")}
    IGNORED: ClassVar = ("status", "created_by")

    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    id: Name | None = None
    status: Status | None = None
    async_: Annotated[Any, Field(alias="async")] = None
    caller: Any = None
    namespace: Any = None
    created_by: str | None = None


class CallItem(AnyCall):
    type: Literal["function_call"]
    arguments: str


class CustomCallItem(AnyCall):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(Wire):
    """The result of a call of a function, or of a custom tool."""

    REFUSED: ClassVar = {"caller": _CALLER, "namespace": ((), "leave it out")}
    IGNORED: ClassVar = ("status", "created_by")

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    output: Content
    id: Name | None = None
    name: Name | None = None
    status: Status | None = None
    caller: Any = None
    namespace: Any = None
    created_by: str | None = None


class SummaryPart(Wire):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(Wire):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Wire):
    """The reasoning is the first present of content, encrypted_content and summary."""

    IGNORED: ClassVar = ("status",)

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], Field(default_factory=list, max_length=MAX_PARTS)]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    id: Name | None = None
    status: Status | None = None


class CompactionItem(Wire):
    """The summary of a conversation, from /v1/responses/compact."""

    IGNORED: ClassVar = ("created_by",)

    type: Literal["compaction"]
    encrypted_content: str
    id: Name | None = None
    created_by: str | None = None


class ReferenceItem(Wire):
    type: Literal["item_reference"] | None = None
    id: Name


CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = tuple(f"{kind}_output" for kind in CALLS)
_KINDS = ("message", *CALLS, *_OUTPUTS, "reasoning", "compaction", "item_reference")


def _item_kind(value: Any) -> str:
    kind = _get(value, "type") or ("message" if _get(value, "role") else "item_reference")
    return "[call_output]" if kind in _OUTPUTS else f"[{kind}]"


def _check_item(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") is None:
        if "role" not in value and "id" not in value:
            return check_type(value | {"type": None}, _KINDS, "an item", "give its type, or a role and content")
        return {k: v for k, v in value.items() if k != "type"}
    hint = "there are messages, calls of functions and custom tools, their outputs, reasoning, and compactions"
    return check_type(value, _KINDS, "an item", hint)


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[CallOutputItem, Tag("[call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[CompactionItem, Tag("[compaction]")]
    | Annotated[ReferenceItem, Tag("[item_reference]")],
    Discriminator(_item_kind),
    BeforeValidator(_check_item),
]

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


# -- kept ----------------------------------------------------------------------------------------------------


def to_kept(
    item: MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | CompactionItem, id: str, where: str
) -> Kept:
    """The item in its stored form. Raises InvalidRequest for unsupported or unreadable contents."""
    refuse_fields(item, where)
    kept: Kept = {"id": item.id or id, "type": item.type}
    match item:
        case MessageItem():
            own = "output_text" if item.role == "assistant" else "input_text"
            content = _parts(item.content, own, f"{where}.content")
            return kept | {"role": item.role, "status": "completed", "content": content}
        case CallItem():
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return kept | call | {"status": item.status or "completed"}
        case CustomCallItem():
            call = {"call_id": item.call_id, "name": item.name, "input": item.input}
            return kept | call | {"status": item.status or "completed"}
        case CallOutputItem():
            whole = isinstance(item.output, str)
            output = item.output if whole else _parts(item.output, "input_text", f"{where}.output")
            name = {"name": item.name} if item.name else {}
            return kept | {"call_id": item.call_id, **name, "output": output, "status": "completed"}
        case CompactionItem():
            unsealed(item.encrypted_content, f"{where}.encrypted_content")
            return kept | {"encrypted_content": item.encrypted_content}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary]
            kept |= {"summary": summary, "status": "completed"}
            if item.content:
                kept["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
            elif item.encrypted_content is not None:
                text = unsealed(item.encrypted_content, f"{where}.encrypted_content")
                kept["content"] = [{"type": "reasoning_text", "text": text}]
            return kept


def _parts(content: Any, own: str, where: str) -> list[dict[str, Any]]:
    """own: the part type for plain text, and the only type allowed besides refusals."""
    if isinstance(content, str):
        content = [TextPart(type=own, text=content)]  # type: ignore[arg-type]
    parts = []
    for i, part in enumerate(content):
        if part.type not in (own, *(("refusal",) if own == "output_text" else ())):
            message = f"a part of type {part.type} does not belong here"
            raise InvalidRequest(message, f"expected {own}", param=f"{where}.{i}.type")
        if isinstance(part, RefusalPart):
            parts.append({"type": "refusal", "refusal": part.refusal})
            continue
        if part.prompt_cache_breakpoint is not None:
            raise InvalidRequest("it is not supported", "leave it out", param=f"{where}.{i}.prompt_cache_breakpoint")
        extra = {"annotations": []} if own == "output_text" else {}
        parts.append({"type": own, "text": part.text, **extra})
    return parts


def sealed(text: str) -> str:
    """A text as encrypted_content, for clients that send back nothing else. It is not secret: the text is returned in
    plain form, too."""
    return _SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def unsealed(text: str, where: str) -> str:
    try:
        if not text.startswith(_SEALED):
            raise ValueError
        return base64.b64decode(text[len(_SEALED) :].encode(), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest("it was not created by this server", "give the item's content", param=where) from None


# -- messages ------------------------------------------------------------------------------------------------


def to_messages(items: Iterable[Mapping[str, Any]]) -> list[TemplateMessage]:
    """The chat messages of stored items."""
    messages: list[TemplateMessage] = []
    turn: TemplateMessage | None = None  # the model's turn, which may continue
    for item in items:
        kind = item["type"]
        if kind == "compaction":
            turn = None
            text = unsealed(item["encrypted_content"], "input")
            messages.append({"role": "assistant", "content": SUMMARY + text})
            continue
        if (kind == "message" and item["role"] != "assistant") or kind in _OUTPUTS:
            turn = None
            messages.append(_other(item))
            continue
        if turn is None or not _continues(turn, kind):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        if kind == "reasoning":
            turn["reasoning_content"] = thought(item)
        elif kind == "message":
            turn["content"] = _content(item["content"])
        else:
            arguments = item["arguments"] if kind == "function_call" else {INPUT: item["input"]}
            function = {"name": item["name"], "arguments": arguments}
            call: CallMessage = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    return messages


def _continues(turn: TemplateMessage, kind: str) -> bool:
    """Whether an item belongs to the same message: reasoning comes first, then text, then calls."""
    if kind in CALLS:
        return True
    complete = turn.get("content") is not None or "tool_calls" in turn
    return not complete and not (kind == "reasoning" and "reasoning_content" in turn)


def _other(item: Mapping[str, Any]) -> TemplateMessage:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    output = item["output"]
    content = output if isinstance(output, str) else _content(output)
    message: TemplateMessage = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    if "name" in item:
        message["name"] = item["name"]
    return message


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    texts = [part.get("text") or part.get("refusal") or "" for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def thought(item: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in item.get("content") or item["summary"])
