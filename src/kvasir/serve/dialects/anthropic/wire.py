"""The request bodies of the Messages API, version 2026-10-21 and 2023-06-01.

https://platform.claude.com/docs/en/api/messages

Every field of the specification is declared, including those of its betas: implemented, accepted without effect where
it has no meaning for this server (IGNORED), or refused by name (REFUSED). Any other field is refused as unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvasir.fields import INT32, MAX_STOP_CHARS, MAX_STOP_STRINGS
from kvasir.serve.conversation.drafting import Drafting
from kvasir.serve.conversation.sampling import wire_of
from kvasir.serve.conversation.trust import Trust
from kvasir.serve.http.wire import LEAVE_OUT, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Name, Wire


def _of_type(allowed: tuple[str, ...], what: str, hint: str) -> BeforeValidator:
    """Refuses objects of other types, naming their type, before their fields are validated."""

    def check(value: Any) -> Any:
        kind = value.get("type", allowed[0]) if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in allowed:
            facts = {"what": what, "kind": kind[:40], "hint": hint}
            raise PydanticCustomError("unsupported", "{what} of type '{kind}' is not supported ({hint})", facts)
        return value

    return BeforeValidator(check)


# -- content -----------------------------------------------------------------------------------------------


class CacheControl(Wire):
    """Prefixes are cached wherever there is room, marked or not. scope: of a beta that Claude Code uses; the server
    decides with whom a prefix is shared."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Name | None = None

    IGNORED: ClassVar = ("type", "ttl", "scope")


class Cacheable(Wire):
    cache_control: CacheControl | None = None

    IGNORED: ClassVar = ("cache_control",)


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str
    citations: Any = None

    REFUSED: ClassVar = {"citations": (([],), "citations are not supported")}


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str


class DirectCaller(Wire):
    type: Literal["direct"]

    IGNORED: ClassVar = ("type",)


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: Any = None

    REFUSED: ClassVar = {"toolset_name": ((), "toolsets are not supported")}
    IGNORED: ClassVar = ("cache_control", "caller")


_READS_TEXT = "this model reads text"
ResultPart = Annotated[TextBlock, _of_type(("text",), "a result", _READS_TEXT)]
SystemPart = Annotated[TextBlock, _of_type(("text",), "a system block", _READS_TEXT)]


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: str | Annotated[list[ResultPart], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    toolset_name: Any = None

    REFUSED: ClassVar = {"toolset_name": ((), "toolsets are not supported")}


Block = Annotated[
    Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")],
    _of_type(("text", "thinking", "tool_use", "tool_result"), "a content block", _READS_TEXT),
]
System = str | Annotated[list[SystemPart], Field(max_length=MAX_PARTS)]


class InputMessage(Wire):
    """clear_at: when a system message is dropped: at the next user message, or never."""

    REFUSED: ClassVar = {"output_config": (({},), "set output_config of the whole request")}

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Any = None


# -- tools and thinking ------------------------------------------------------------------------------------


class CustomTool(Cacheable):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    REFUSED: ClassVar = {
        "defer_loading": ((False,), "tool search is not supported; send the tool directly"),
        "allowed_callers": ((["direct"], []), "only the model can call it"),
    }
    IGNORED: ClassVar = ("cache_control", "eager_input_streaming")


InputTool = Annotated[CustomTool, _of_type(("custom",), "a tool", "describe it with name and input_schema")]


class AutoChoice(Wire):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Wire):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Wire):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoChoice(Wire):
    type: Literal["none"]


Choice = Annotated[AutoChoice | AnyChoice | NamedTool | NoChoice, Field(discriminator="type")]
Display = Literal["summarized", "omitted"] | None


class ThinkingEnabled(Wire):
    """budget_tokens: maximum tokens of thinking."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32)]
    display: Display = None
    block_binding: Any = None

    REFUSED: ClassVar = {"block_binding": ((), LEAVE_OUT)}


class ThinkingAdaptive(Wire):
    type: Literal["adaptive"]
    display: Display = None
    block_binding: Any = None

    REFUSED: ClassVar = {"block_binding": ((), LEAVE_OUT)}


class ThinkingDisabled(Wire):
    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")],
    _of_type(("enabled", "adaptive", "disabled"), "thinking", "expected enabled, adaptive or disabled"),
]


class JsonFormat(Wire):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Wire):
    """effort: for models whose template supports it as reasoning_effort; others ignore it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: Any = None

    REFUSED: ClassVar = {"task_budget": ((), "give max_tokens")}


# -- bodies ------------------------------------------------------------------------------------------------


class Metadata(Wire):
    user_id: Name | None = None

    IGNORED: ClassVar = ("user_id",)


class MessagesBody(Trust):
    """The fields that become the prompt."""

    model: Name | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: System | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older place of output_config.format
    cache_control: CacheControl | None = None

    # Refused unless the value has no effect.
    billing_policy: Any = None
    compaction: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None

    REFUSED: ClassVar = {
        "billing_policy": ((), LEAVE_OUT),
        "compaction": ((), "shorten the conversation in the client"),
        "context_management": (
            (
                {},
                {"edits": []},
                {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
            ),
            "shorten the conversation in the client",
        ),
        "mcp_servers": (([],), "provide them as tools of the client"),
        "speed": (("standard",), "give service_class"),
    }
    IGNORED: ClassVar = ("cache_control",)


class CountRequest(MessagesBody):
    """POST /v1/messages/count_tokens"""


class Samplers(wire_of("anthropic")):
    """How tokens are sampled."""


class MessagesRequest(Samplers, Drafting, MessagesBody):
    """POST /v1/messages

    max_tokens: 0 computes the prompt and leaves it in the cache. seed: an extension of this server; the same seed
    reproduces the result.
    """

    max_tokens: Annotated[int, Field(ge=0, le=INT32)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOP_STRINGS)
        ]
        | None
    ) = None
    stream: bool | None = None

    # No effect: nothing is billed or routed by them.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # Refused unless the value has no effect.
    container: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    thread: Any = None

    REFUSED: ClassVar = {
        **MessagesBody.REFUSED,
        "container": ((), "containers are not supported"),
        "diagnostics": ((), LEAVE_OUT),
        "fallback_credit_token": ((), LEAVE_OUT),
        "fallbacks": (([],), "name one model"),
        "inference_geo": ((), "the model runs on this server"),
        "thread": ((), "give the whole conversation"),
    }
    IGNORED: ClassVar = ("cache_control", "metadata", "service_tier")
