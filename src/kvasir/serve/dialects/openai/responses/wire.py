"""The request bodies of the Responses API, and the queries of its routes.

https://platform.openai.com/docs/api-reference/responses. Every field of it is declared: implemented, or listed in
REFUSED or IGNORED. A request also has the samplers and the scheduling fields of chats.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from kvasir.serve.conversation.custom import Syntax
from kvasir.serve.conversation.drafting import Drafting
from kvasir.serve.conversation.trust import Trust
from kvasir.serve.dialects.openai.responses.items import Item, check_type
from kvasir.serve.dialects.openai.structured import Schema
from kvasir.serve.dialects.openai.wire import Samplers, ServiceTier, StreamOptions
from kvasir.serve.http.wire import MAX_MESSAGES, MAX_TOOLS, Metadata, Name, TemplateKwargs, Wire

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

# The other values request details of OpenAI's own tools, which never occur here.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_LATER = "leave it out"
ResponseId = Annotated[str, Field(max_length=64)]


class FunctionTool(Wire):
    REFUSED: ClassVar = {
        "allowed_callers": ((["direct"],), "only the model can make calls"),
        "async_": ((False,), _LATER),
        "defer_loading": ((False,), "all tools are sent to the model at once"),
        "output_schema": ((), _LATER),
    }

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    async_: Annotated[Any, Field(alias="async")] = None
    defer_loading: Any = None
    output_schema: Any = None


class CustomTextFormat(Wire):
    type: Literal["text", "grammar"]
    syntax: Syntax | None = None
    definition: Annotated[str, Field(min_length=1)] | None = None


class CustomTool(Wire):
    """A tool whose calls have a text instead of arguments."""

    REFUSED: ClassVar = {
        "allowed_callers": ((["direct"],), "only the model can make calls"),
        "async_": ((False,), _LATER),
        "defer_loading": ((False,), "all tools are sent to the model at once"),
    }

    type: Literal["custom"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    format: CustomTextFormat | None = None
    allowed_callers: Any = None
    async_: Annotated[Any, Field(alias="async")] = None
    defer_loading: Any = None


class NamedTool(Wire):
    """A function or a custom tool."""

    type: Literal["function", "custom"]
    name: Name


class AllowedToolsChoice(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Wire):
    """lenient: schema keywords that cannot be enforced are ignored instead of refused."""

    IGNORED: ClassVar = ("name", "description", "strict")  # a schema is always enforced, regardless of `strict`

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None
    lenient: bool | None = None


class TextConfig(Wire):
    REFUSED: ClassVar = {"verbosity": (("medium",), _LATER)}

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningConfig(Wire):
    REFUSED: ClassVar = {
        "context": (("auto",), "the chat template decides which earlier reasoning it includes"),
        "generate_summary": (("auto",), "the full reasoning is returned as reasoning_text"),
        "mode": (("standard",), _LATER),
        "summary": (("auto",), "the full reasoning is returned as reasoning_text"),
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    context: Any = None
    generate_summary: Any = None
    mode: Any = None
    summary: Any = None


def _check_tools(value: Any) -> Any:
    """Reports tools of other kinds by name; otherwise the error would be about a missing field of a function."""
    for tool in value if isinstance(value, list) else ():
        check_type(tool, ("function", "custom"), "a tool", "this server runs no tools: give functions and custom tools")
    return value


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "[custom]" if kind == "custom" else "[function]"


Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")], Discriminator(_tool_kind)
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), BeforeValidator(_check_tools)]


def _check_choice(value: Any) -> Any:
    return check_type(value, ("function", "custom", "allowed_tools"), "a tool_choice", "this server runs no tools")


Choice = Annotated[Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice, BeforeValidator(_check_choice)]
Input = str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)]


class Prompt(Trust):
    """The fields that make the prompt: shared by responses and token counts."""

    model: Name | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    conversation: Any = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None


_CONVERSATION = ((), "use previous_response_id")


class ResponseRequest(Prompt, Samplers, Drafting):
    """POST /v1/responses"""

    REFUSED: ClassVar = {
        "access_programs": ((), _LATER),
        "background_options": (({"completion_window": "soonest"},), _LATER),
        "context_management": (([],), _LATER),
        "conversation": _CONVERSATION,
        "image": ((), "this server reads text"),
        "moderation": ((), _LATER),
        "prompt": ((), "stored prompts are not supported: give input and instructions"),
        "prompt_cache_options": ((), "use cache_ttl"),
        "prompt_cache_retention": (("in_memory",), "use cache_ttl"),
    }
    IGNORED: ClassVar = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")

    background: bool | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None  # of server-side tools: there are none
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    service_tier: ServiceTier = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: int | None = None
    user: Name | None = None

    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    chat_template_kwargs: TemplateKwargs | None = None  # vLLM's


class CompactRequest(Prompt, Samplers, Drafting):
    """POST /v1/responses/compact"""

    REFUSED: ClassVar = {
        "conversation": _CONVERSATION,
        "prompt_cache_retention": (("in_memory",), "use cache_ttl"),
        "prompt_cache_options": ((), "use cache_ttl"),
    }
    IGNORED: ClassVar = ("prompt_cache_key",)

    max_output_tokens: int | None = None
    service_tier: ServiceTier = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class TokenCountRequest(Prompt):
    """POST /v1/responses/input_tokens"""

    REFUSED: ClassVar = {"conversation": _CONVERSATION, "personality": ((), "put it in instructions")}
    IGNORED: ClassVar = ("parallel_tool_calls", "truncation")

    personality: Any = None


class ResponseQuery(BaseModel):
    """The query parameters of a URL, which are all text."""

    model_config = ConfigDict(extra="forbid", loc_by_alias=False)

    # No effect: the contents of an item were chosen when it was created.
    include: Annotated[
        list[Include] | None, Field(max_length=16, validation_alias=AliasChoices("include[]", "include"))
    ] = None


class RetrieveQuery(ResponseQuery):
    """GET /v1/responses/{id}"""

    stream: bool | None = None
    starting_after: Annotated[int, Field(ge=0, le=2**53)] | None = None
    include_obfuscation: Literal["false"] | None = None


class ItemsQuery(ResponseQuery):
    """GET /v1/responses/{id}/input_items"""

    after: Annotated[str, Field(max_length=256)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
