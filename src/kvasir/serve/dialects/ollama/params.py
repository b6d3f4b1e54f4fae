"""Converts a request's options to SamplingParams: names, defaults, and the context limit.

A value is the request's, otherwise the Modelfile's, otherwise the recommendation of the model's generation_config.json,
otherwise Ollama's default. One default differs: `repeat_penalty` is 1, which has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvasir.errors import InvalidRequest, PromptTooLong
from kvasir.fields import names_in
from kvasir.serve.conversation.sampling import asked_fields, recommended
from kvasir.serve.dialects.ollama.wire import Asking, Options
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import ModelInfo, SamplingParams, StructuredOutputs

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
WINDOW = 64  # ids that penalties consider

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


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


def drafted_of(options: Options) -> int | None:
    """Most drafted ids of a step; None if the engine decides."""
    given = options.draft_num_predict
    return None if given is None or given < 0 else given


def room_for_answer(options: Options, context: int) -> int:
    """Tokens to leave for the choice when a prompt is truncated: the requested number, otherwise an eighth of the
    context."""
    limit = limit_of(options)
    return max(1, min(limit or context // 8, context - 1))


def check_fits(length: int, context: int, param: str) -> None:
    """Raises PromptTooLong for a prompt that leaves no room in the context."""
    if length >= context:
        message = f"the prompt has {length} tokens; the context holds {context}, one of them for output"
        hint = "shorten it, raise num_ctx, or send truncate: true"
        raise PromptTooLong(message, hint, param, tokens=length, context=context)


def to_params(wire: Asking, options: Options, info: ModelInfo, room: int) -> SamplingParams:
    """room: tokens that the context leaves for the choice. Raises InvalidRequest."""
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    wanted = _windowed(asked_fields(options, "ollama"), info)
    if wanted.get("seed") == -1:
        wanted["seed"] = None  # drawn at random
    fields = recommended(info, bool(wanted.get("mirostat")), DEFAULTS)
    fields.pop("repetition_penalty", None)  # depends on the window
    return SamplingParams(
        **(fields | wanted),
        n=1 if wire.n is None else wire.n,
        max_tokens=min(limit_of(options) or room, room),
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        structured_outputs=structure_of(wire.format),
    )


def _windowed(wanted: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The same fields, with the number of ids of prompt and choice that the penalties consider."""
    window = wanted.pop("repetition_last_n", None)
    if window == 0:
        return {name: value for name, value in wanted.items() if name not in _PENALTIES}
    if wanted.get("presence_penalty") or wanted.get("frequency_penalty"):
        wanted["occurrence_last_n"] = WINDOW if window is None else window
    if "repetition_penalty" in wanted:
        wanted["repetition_last_n"] = WINDOW
    elif (value := info.default_sampling.get("repetition_penalty")) is not None:
        wanted["repetition_penalty"] = value
    return wanted if window is None else {**wanted, "repetition_last_n": window}


def structure_of(format: Any) -> StructuredOutputs | None:
    """The structure that a choice must follow. Raises InvalidRequest."""
    if format in (None, ""):
        return None
    return StructuredOutputs(json_object=True) if format == "json" else StructuredOutputs(json=format)


NAMES = {"structured_outputs": "format", "response_format": "format", **names_in("ollama")}  # ours -> theirs
