"""The request bodies of llama.cpp's server, tools/server/README.md of https://github.com/ggml-org/llama.cpp

Every field of that page is declared: implemented, accepted without effect where it has no meaning for this server
(IGNORED), or refused by name (REFUSED). Any other field is refused as unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvasir.adapters import MAX_SCALE
from kvasir.fields import INT32, MAX_LOGIT_BIAS
from kvasir.serve.conversation.chat_format import ChatMessage, ChatTool
from kvasir.serve.conversation.drafting import Drafting
from kvasir.serve.conversation.sampling import wire_of
from kvasir.serve.conversation.scheduling import Scheduling
from kvasir.serve.http.wire import LEAVE_OUT, MAX_MESSAGES, MAX_TOOLS, Name, TemplateKwargs, Wire

MAX_PIECES = 1 << 20


# -- prompts -----------------------------------------------------------------------------------------------


def _check_prompt(value: Any) -> Any:
    if _is_one(value) or (isinstance(value, list) and value and all(map(_is_one, value))):
        return value
    raise PydanticCustomError(
        "prompt",
        "expected a string, a list of token ids and strings, an object with prompt_string, or a list of such prompts",
    )


def _is_one(value: Any) -> bool:
    """Whether it is a single prompt: a text, a text in an object, or a list of ids and texts with at least one id."""
    match value:
        case str():
            return True
        case dict():
            return value.keys() <= {"prompt_string", "multimodal_data"} and isinstance(value.get("prompt_string"), str)
        case list():
            kinds = set(map(type, value))
            return 0 < len(value) <= MAX_PIECES and kinds <= {int, str} and int in kinds
    return False


def one_by_one(prompt: Any) -> list[Any]:
    """The single prompts of a validated value."""
    return [prompt] if _is_one(prompt) else list(prompt)


_PIECES = {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "minItems": 1}
_OBJECT = {
    "type": "object",
    "required": ["prompt_string"],
    "properties": {"prompt_string": {"type": "string"}, "multimodal_data": {"type": "array", "maxItems": 0}},
    "additionalProperties": False,
}
_ONE = [{"type": "string"}, _PIECES, _OBJECT]
Prompt = Annotated[
    Any,
    BeforeValidator(_check_prompt),
    WithJsonSchema({"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}, "minItems": 1}]}),
]


# -- biases ------------------------------------------------------------------------------------------------


def _check_bias(value: Any) -> Any:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if isinstance(pairs, list) and len(pairs) <= MAX_LOGIT_BIAS and all(map(_is_bias, pairs)):
        return [tuple(pair) for pair in pairs]
    raise PydanticCustomError("logit_bias", "expected at most {n} pairs [token, bias]", {"n": MAX_LOGIT_BIAS})


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    token, bias = pair
    named = type(token) is int or (isinstance(token, str) and 0 < len(token) <= 256)
    return named and (bias is False or type(bias) in (int, float))


_NUMBER_OR_FALSE = {"anyOf": [{"type": "number"}, {"const": False}]}
Bias = Annotated[
    Any,
    BeforeValidator(_check_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _NUMBER_OR_FALSE},
                {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, _NUMBER_OR_FALSE],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                },
            ]
        }
    ),
]


# -- bodies ------------------------------------------------------------------------------------------------


class Samplers(wire_of("llamacpp")):
    """How tokens are sampled."""


class Options(Samplers, Drafting):
    """The fields shared by /completion and /infill.

    n_predict: -1 for as many tokens as the context leaves; 0 only computes the prompt. repeat_last_n: number of ids
    that the penalties consider, -1 for all; 0 disables them. seed: -1 draws a random one. speculative.n_max: drafted
    ids of a step, at most; 0 for no drafts.
    """

    model: Name | None = None
    n_predict: Annotated[
        int | None, Field(ge=-2, le=INT32, validation_alias=AliasChoices("n_predict", "max_tokens"))
    ] = None
    n_cmpl: Annotated[int | None, Field(validation_alias=AliasChoices("n_cmpl", "n"))] = None
    stream: bool | None = None
    samplers: str | Annotated[list[str], Field(max_length=32)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    logit_bias: Bias | None = None
    n_probs: Annotated[int, Field(ge=0, le=INT32)] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    response_fields: Annotated[list[Name], Field(max_length=64)] | None = None
    sse_ping_interval: Annotated[int, Field(ge=-1, le=86400)] | None = None
    cache_prompt: bool | None = None
    n_indent: Annotated[int, Field(ge=0, le=INT32)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=INT32)] | None = None

    speculative_n_max: Annotated[int | None, Field(alias="speculative.n_max", ge=0, le=INT32)] = None

    # No effect: the context is never shifted, the scheduler assigns rows and caches, and drafts that do not pay are not
    # made.
    id_slot: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    n_cache_reuse: int | None = None
    t_max_prompt_ms: int | None = None
    speculative_n_min: Annotated[int | None, Field(alias="speculative.n_min")] = None
    speculative_p_min: Annotated[float | None, Field(alias="speculative.p_min")] = None

    # Refused unless the value has no effect.
    grammar_lazy: Any = None
    grammar_triggers: Any = None
    min_keep: Any = None
    post_sampling_probs: Any = None
    preserved_tokens: Any = None

    REFUSED: ClassVar = {
        "grammar_lazy": ((False,), "use tools of /v1/chat/completions"),
        "grammar_triggers": (([],), "use tools of /v1/chat/completions"),
        "min_keep": ((0, 1), LEAVE_OUT),
        "post_sampling_probs": ((False,), "log-probabilities are of the raw logits"),
        "preserved_tokens": (([],), LEAVE_OUT),
    }
    IGNORED: ClassVar = (
        *("id_slot", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms"),
        *("speculative_n_min", "speculative_p_min"),
    )


class CompletionRequest(Options):
    """POST /completion and /completions"""

    prompt: Prompt


class ExtraFile(Wire):
    filename: Annotated[str, Field(max_length=4096)] = ""
    text: str


class InfillRequest(Options):
    """POST /infill

    prompt: the text between input_prefix and the cursor.
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=1024)] | None = None
    prompt: str | None = None


class AdapterScale(Wire):
    """An entry of POST /lora-adapters"""

    id: Annotated[int, Field(ge=0, le=INT32)]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE, allow_inf_nan=False)]


class TemplateRequest(Wire):
    """POST /apply-template"""

    model: Name | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class EmbeddingRequest(Scheduling):
    """POST /embedding and /embeddings

    embd_normalize: 2 for the Euclidean norm (the default), 0 for the greatest value, 1 for the sum of absolute values,
    p for the p-norm. pooling: "none" for an embedding of each token, which only embd_normalize normalizes.
    """

    model: Name | None = None
    content: Annotated[Prompt, Field(validation_alias=AliasChoices("content", "input"))]
    embd_normalize: Annotated[int, Field(ge=0, le=64)] | None = None
    encoding_format: Literal["float"] | None = None
    pooling: Literal["none"] | None = None
