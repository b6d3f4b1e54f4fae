"""The request bodies of the OpenAI API, with the extension fields that vLLM's clients use.

Every field of the public specification is declared: implemented, accepted without effect where it has no meaning for
this server (IGNORED), or refused by name (REFUSED). Any other field is refused as unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvasir.serve.conversation.chat_format import (
    ChatMessage,
    ChatTool,
    Choice,
    FunctionDefinition,
    NamedFunction,
)
from kvasir.serve.conversation.drafting import Drafting, Prediction
from kvasir.serve.conversation.sampling import wire_of
from kvasir.serve.conversation.scheduling import Scheduling
from kvasir.serve.conversation.trust import Trust
from kvasir.serve.dialects.openai.extensions import ChatExtensions, Effort, PromptExtensions
from kvasir.serve.dialects.openai.structured import Structured
from kvasir.serve.dialects.openai.transfer import TransferParams
from kvasir.serve.http.wire import (
    LEAVE_OUT,
    MAX_MESSAGES,
    MAX_TOOLS,
    Name,
    Prompts,
    TemplateKwargs,
    Wire,
)

# The name of an adapter for all prompts, or one or null for each.
LoraPath = Name | list[Name | None]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None


class StreamOptions(Wire):
    REFUSED: ClassVar = {"include_obfuscation": ((False,), LEAVE_OUT)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # pads chunks against traffic analysis; refused if true


class Samplers(wire_of("openai")):
    """How tokens are sampled, with the fields of vLLM and llama.cpp besides those of OpenAI."""


class Sampling(Samplers, Drafting, Structured, PromptExtensions):
    """The fields shared by completions and chats. lora_path: the name of an adapter."""

    model: Name | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None

    # vLLM's extensions
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: TransferParams | None = None

    # SGLang's
    lora_path: Name | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions. lora_path: the name of an adapter, or a list of one or null for each prompt."""

    REFUSED: ClassVar = PromptExtensions.REFUSED
    IGNORED: ClassVar = ("user",)

    prompt: Prompts
    lora_path: LoraPath | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Sampling, ChatExtensions, Trust):
    """POST /v1/chat/completions. functions, function_call: the names of tools and of their choice in the API's first
    version, whose responses have one call in `function_call`."""

    REFUSED: ClassVar = {
        **PromptExtensions.REFUSED,
        "audio": ((), "this server writes text"),
        "modalities": ((["text"],), "this server writes text"),
        "echo": ((False,), "it exists for completions"),
        "moderation": ((), LEAVE_OUT),
        "prompt_cache_options": ((), LEAVE_OUT),
        "prompt_cache_retention": (("in_memory", "in-memory"), LEAVE_OUT),
        "web_search_options": ((), LEAVE_OUT),
    }
    # Nothing is stored or billed.
    IGNORED: ClassVar = ("user", "metadata", "safety_identifier", "prompt_cache_key", "store")

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier = None
    reasoning_effort: Effort | None = None
    prediction: Prediction | None = None

    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    store: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None

    audio: Any = None
    echo: Any = None
    modalities: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    web_search_options: Any = None

    # vLLM's extensions
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class EmbeddingRequest(Scheduling):
    """POST /v1/embeddings. prompt_name: of the model's own prompts, put before the texts. lora_path: the name of an
    adapter, or a list of one or null for each input, as in SGLang. task: that of a model with adapters for tasks, and
    its prompt, as in Jina's API. pooling: "none" for an embedding of each token instead of one of the text."""

    IGNORED: ClassVar = ("user",)

    model: Name | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Name | None = None
    prompt_name: Name | None = None
    add_special_tokens: bool | None = None
    lora_path: LoraPath | None = None
    task: Name | None = None
    pooling: Literal["none"] | None = None
