"""Converts llama.cpp's fields to SamplingParams, and back to the generation settings of a response.

A value is the request's, otherwise the model's recommendation, otherwise llama.cpp's default. Penalties consider the
last `repeat_last_n` ids, including the prompt's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.fields import SAMPLER, names_in
from kvasir.serve.conversation.sampling import NOTHING, asked_fields, described, recommended
from kvasir.serve.dialects.llamacpp.wire import Options
from kvasir.speculation import Speculation
from kvasir.types import ModelInfo, SamplingParams, StructuredOutputs

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
WINDOW = 64  # ids that penalties consider
RANDOM_SEEDS = (-1, 2**32 - 1)
INFILL = "infill"
_DRAFTERS = {
    **{"ngram": "ngram-simple", "suffix": "ngram-mod", "draft": "draft-simple"},
    **{"eagle3": "draft-eagle3", "dflash": "draft-dflash", "mtp": "draft-mtp"},
}

# The samplers in the order in which they act, each with the values that disable it; docs/sampling.md explains why
# temperature precedes the filters.
OFF: dict[str, dict[str, Any]] = {}
for row in SAMPLER:
    if row.sampler:
        OFF.setdefault(row.sampler.name, {})[row.name] = row.off
_SAMPLERS = {row.sampler for row in SAMPLER if row.sampler}
_ANYWHERE = {sampler.name for sampler in _SAMPLERS if sampler.anywhere}
_LETTERS = {sampler.letter: sampler.name for sampler in _SAMPLERS} | {"i": INFILL}
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "typ-p": "typ_p", "temp": "temperature"} | {
    name.replace("_", "-"): name for name in OFF
}


def to_params(wire: Options, info: ModelInfo, own: Mapping[str, Any] = NOTHING, infill: bool = False) -> SamplingParams:
    """own: values of the model's store entry, which the request overrides. infill: accept the sampler of that name,
    which has no effect. max_tokens is None for as many as the context leaves. Raises InvalidRequest."""
    wanted = asked_fields(wire, "llamacpp")
    last = wanted.pop("repetition_last_n", None)
    mirostat = bool(wanted.get("mirostat") or own.get("mirostat"))
    fields = recommended(info, mirostat, DEFAULTS) | dict(own) | wanted
    fields["temperature"] = max(0.0, fields["temperature"])
    fields["top_k"] = max(0, fields.get("top_k", 0))
    _window(last, "repetition_penalty" in wanted, fields)
    if wire.samplers is not None:
        chosen = _samplers(wire.samplers, infill)
        for name, off in OFF.items():
            if name not in chosen:
                fields |= off
    if wanted.get("seed") in RANDOM_SEEDS:
        fields["seed"] = None
    length = n_predict_of(wire, own)
    fields["max_tokens"] = None if length < 0 else max(1, length)  # computing a prompt samples at least one token
    n = 1 if wire.n_cmpl is None else wire.n_cmpl
    return SamplingParams(**fields, n=n, logprobs=wire.n_probs or None, structured_outputs=_structure(wire))


def n_predict_of(wire: Options, own: Mapping[str, Any]) -> int:
    """Maximum tokens of a choice; below 0 for as many as the context leaves."""
    return (own.get("max_tokens") or -1) if wire.n_predict is None else wire.n_predict


def _window(last: int | None, repetition: bool, fields: dict[str, Any]) -> None:
    """Sets which ids the penalties consider. last: repeat_last_n. repetition: the request sets repeat_penalty."""
    if last == 0:
        fields |= OFF["penalties"]
    elif last is not None:
        fields["repetition_last_n"] = last
    elif repetition:
        fields["repetition_last_n"] = WINDOW
    if fields.get("presence_penalty") or fields.get("frequency_penalty"):
        fields["occurrence_last_n"] = last if last is not None else fields.get("occurrence_last_n", WINDOW)


def _samplers(given: str | Sequence[str], infill: bool) -> list[str]:
    """The samplers that act. Raises InvalidRequest for unknown samplers and for an unsupported order."""
    names = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else list(given)
    names = [_OTHER_NAMES.get(name, name) for name in names]
    if infill:
        names = [name for name in names if name != INFILL]
    for name in names:
        if name not in OFF:
            expected = f"expected some of {', '.join(OFF)}"
            raise InvalidRequest(f"unknown sampler {name[:40]!r}", expected, param="samplers")
    order = [name for name in names if name not in _ANYWHERE]
    twice = any(names.count(name) > 1 for name in _ANYWHERE)
    if order != [name for name in OFF if name in order] or twice:
        message = "the order of samplers is fixed, and each runs once"
        raise InvalidRequest(message, f"leave some out of {', '.join(OFF)}", param="samplers")
    return names


def _structure(wire: Options) -> StructuredOutputs | None:
    if wire.grammar and wire.json_schema is not None:
        raise InvalidRequest("grammar and json_schema cannot be combined", "give one of them", param="json_schema")
    if wire.json_schema is not None:
        return StructuredOutputs(json=wire.json_schema)
    return StructuredOutputs(grammar=wire.grammar) if wire.grammar else None


def names_of(wire: Options) -> dict[str, str]:
    """Names of fields in errors: ours -> theirs."""
    return {
        "structured_outputs": "grammar" if wire.json_schema is None else "json_schema",
        **names_in("llamacpp"),
    }


def settings_object(
    wire: Options,
    params: SamplingParams,
    n_predict: int,
    info: ModelInfo,
    speculation: Speculation | None = None,
    lora: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """generation_settings: the settings in effect. speculation, lora: of the request."""
    acting = [name for name, off in OFF.items() if any(getattr(params, k) != v for k, v in off.items())]
    return {
        "n_predict": n_predict,
        "max_tokens": n_predict,
        **described(params, "llamacpp"),
        "repeat_last_n": params.occurrence_last_n or params.repetition_last_n,
        "n_keep": 0,
        "n_discard": 0,
        "n_probs": params.logprobs or 0,
        "min_keep": 0,
        "stream": bool(wire.stream),
        "grammar": wire.grammar or "",
        "json_schema": wire.json_schema,
        "samplers": acting,
        **_drafts(info, speculation or Speculation()),
        "timings_per_token": bool(wire.timings_per_token),
        "post_sampling_probs": False,
        "lora": lora,
    }


def _drafts(info: ModelInfo, speculation: Speculation) -> dict[str, Any]:
    """The settings of speculation, under llama.cpp's names."""
    methods = info.drafters if speculation.methods is None else speculation.methods
    most = info.draft_max if speculation.most is None else min(speculation.most, info.draft_max)
    return {
        "speculative.types": ",".join(_DRAFTERS[name] for name in methods) or "none",
        "speculative.n_max": most if methods else 0,
        "speculative.n_min": 0,
        "speculative.p_min": 0.0,
    }
