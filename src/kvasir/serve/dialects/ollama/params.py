"""Converts a request's options to SamplingParams: names, defaults, and the context limit.

A value is the request's, otherwise the Modelfile's, otherwise the recommendation of the model's generation_config.json,
otherwise Ollama's default. One default differs: `repeat_penalty` is 1, which has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvasir.errors import InvalidRequest, PromptTooLong
from kvasir.serve.conversation.sampling import to_bias
from kvasir.serve.dialects.ollama.wire import Asking, Options
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import ModelInfo, SamplingParams, StructuredOutputs

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p")
_FILTERS = ("top_p", "top_k", "min_p")  # mirostat replaces them, unless they are requested
WINDOW = 64  # ids that penalties consider

# Options that have the same name in SamplingParams.
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "bad_words", "min_tokens", "ignore_eos", "top_n_sigma"),
    "thinking_token_budget",
    *("xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
)


def options_of(given: Options | None, parameters: Mapping[str, Any]) -> Options:
    """The request's options merged over the Modelfile's parameters, without its num_ctx, which applies to loading.
    Raises InvalidRequest."""
    own = given.model_dump(exclude_none=True) if given else {}
    below = {name: value for name, value in parameters.items() if name != "num_ctx"}
    try:
        options = Options.model_validate(below | own)
    except ValidationError as error:
        names = ", ".join(sorted({str(e["loc"][0]) for e in error.errors() if e["loc"]}))
        raise InvalidRequest(f"the model's Modelfile has parameters that cannot be used: {names}") from error
    refuse_fields(options)
    return options


def context_of(options: Options, info: ModelInfo) -> int:
    """Maximum tokens of prompt and choice together. Raises InvalidRequest."""
    if options.num_ctx is None:
        return info.max_model_len
    if not 1 <= options.num_ctx <= info.max_model_len:
        message = f"num_ctx is {options.num_ctx}; this server's context holds {info.max_model_len} tokens"
        raise InvalidRequest(message, "lower it, or start the server with a larger --max-model-len", "num_ctx")
    return options.num_ctx


def limit_of(options: Options) -> int | None:
    """Maximum tokens of a choice; None for as many as the context leaves. Raises InvalidRequest."""
    if options.num_predict in (None, -1, -2):
        return None
    if options.num_predict < 1:
        raise InvalidRequest(f"num_predict is {options.num_predict}", "expected at least 1, or -1", "num_predict")
    return options.num_predict


def room_for_answer(options: Options, context: int) -> int:
    """Tokens to leave for the choice when a prompt is truncated: the requested number, otherwise an eighth of the
    context."""
    limit = limit_of(options)
    return max(1, min(limit or context // 8, context - 1))


def check_fits(length: int, context: int, param: str) -> None:
    """Raises PromptTooLong for a prompt that leaves no room in the context."""
    if length >= context:
        message = f"the prompt has {length} tokens; the context holds {context}, one of them for the answer"
        hint = "shorten it, raise num_ctx, or send truncate: true"
        raise PromptTooLong(message, hint, param, tokens=length, context=context)


def to_params(wire: Asking, options: Options, info: ModelInfo, room: int) -> SamplingParams:
    """room: tokens that the context leaves for the choice. Raises InvalidRequest."""
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    asked: dict[str, Any] = {name: value for name in _SAME if (value := getattr(options, name)) is not None}
    recommended = {name: value for name, value in info.default_sampling.items() if name in _RECOMMENDED}
    defaults = DEFAULTS | recommended
    if options.mirostat:
        defaults = {name: value for name, value in defaults.items() if name not in _FILTERS}
    fields: dict[str, Any] = defaults | asked | _penalties(options, info)
    if options.stop is not None:
        fields["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    if options.logit_bias:
        fields["logit_bias"] = to_bias(options.logit_bias)
    return SamplingParams(
        **fields,
        n=1 if wire.n is None else wire.n,
        seed=None if options.seed == -1 else options.seed,
        max_tokens=min(limit_of(options) or room, room),
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        structured_outputs=structure_of(wire.format),
    )


def _penalties(options: Options, info: ModelInfo) -> dict[str, float]:
    """The penalties, with the number of ids of prompt and choice that they consider."""
    window = options.repeat_last_n
    if window == 0:
        return {}
    others = {"presence_penalty": options.presence_penalty, "frequency_penalty": options.frequency_penalty}
    found = {name: value for name, value in others.items() if value is not None}
    if any(found.values()):
        found["occurrence_last_n"] = WINDOW if window is None else window
    if options.repeat_penalty is not None:
        found |= {"repetition_penalty": options.repeat_penalty, "repetition_last_n": WINDOW}
    elif (recommended := info.default_sampling.get("repetition_penalty")) is not None:
        found["repetition_penalty"] = recommended
    return found if window is None else {**found, "repetition_last_n": window}


def structure_of(format: Any) -> StructuredOutputs | None:
    """The structure that a choice must follow. Raises InvalidRequest."""
    if format in (None, ""):
        return None
    return StructuredOutputs(json_object=True) if format == "json" else StructuredOutputs(json=format)


NAMES = {  # ours -> theirs
    **{"structured_outputs": "format", "response_format": "format"},
    **{"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "repetition_last_n": "repeat_last_n"},
    "occurrence_last_n": "repeat_last_n",
}
