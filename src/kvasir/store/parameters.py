"""Parameters of a model under Ollama's names: their types, and the options they map to here.

Source: https://docs.ollama.com/modelfile#parameter and the options of its API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.fields import FieldKind, fields_of
from kvasir.store.entry import Value
from kvasir.types import SamplingParams

_ROWS = fields_of("modelfile")
# Ollama's name -> the name in SamplingParams.
SAMPLING = {name: row.name for name, row in _ROWS.items()}
# Ollama's name -> the engine's option.
ENGINE = {"num_ctx": "max_model_len", "num_thread": "threads"}
# Memory and execution settings of another engine, which have no counterpart here.
IGNORED = (
    *("num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
    *("numa", "embedding_only"),
)
# Of requests by Ollama's own routes only: others need not know it, since drafts change no token.
REQUESTS = ("draft_num_predict",)
# Name -> (values without effect, hint).
REFUSED: dict[str, tuple[tuple[Value, ...], str]] = {
    "num_keep": ((0, -1), "generation always stops at a full context; leave it out"),
    "tfs_z": ((1, 1.0), "leave it out, or use min_p"),
    "penalize_newline": ((True,), "newlines are penalized like any token; leave it out"),
}
_INTEGERS = {name for name, row in _ROWS.items() if row.kind in (FieldKind.INTEGER, FieldKind.CHOICE)}
_INTEGERS |= {"num_keep", "draft_num_predict", "num_batch", "num_gpu", "main_gpu", *ENGINE}
_BOOLEANS = {"penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "numa"}
_BOOLEANS |= {"embedding_only"}
_KNOWN = (*SAMPLING, *ENGINE, *REQUESTS, *IGNORED, *REFUSED)
_UNLIMITED = (-1, -2)  # for num_predict: until the model stops, until the context is full
_MOST_STOPS = 64
_LARGEST = 2**53
WINDOW = 64  # default number of tokens that penalties look back at


def parse_parameter(name: str, text: str) -> Value:
    """The typed value of a text. Raises InvalidRequest that names the parameter."""
    _check_known(name)
    try:
        if name == "stop":
            value: Value = [text]
        elif name in _BOOLEANS:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        else:
            value = int(text) if name in _INTEGERS else float(text)
    except (ValueError, KeyError):
        kind = "true or false" if name in _BOOLEANS else "a whole number" if name in _INTEGERS else "a number"
        raise InvalidRequest(f"{name} is {text[:40]!r}", f"expected {kind}", param=name) from None
    return check_parameters({name: value})[name]


def check_parameters(parameters: Mapping[str, Any]) -> dict[str, Value]:
    """The parameters, each with its type, in range, and supported. Raises InvalidRequest that names the parameter."""
    checked = {name: _typed(name, value) for name, value in parameters.items() if value is not None}
    for name, (harmless, hint) in REFUSED.items():
        if name in checked and checked[name] not in harmless:
            raise InvalidRequest(f"{name} is not supported with this value", hint, param=name)
    for name in ENGINE:
        if int(checked.get(name, 1)) < 1:  # type: ignore[arg-type]
            raise InvalidRequest(f"{name} is {checked[name]}", "expected at least 1", param=name)
    sampling_of(checked)
    return checked


def sampling_of(parameters: Mapping[str, Value]) -> dict[str, Any]:
    """The fields of SamplingParams that the parameters set. Raises InvalidRequest for values out of range."""
    fields: dict[str, Any] = {ours: parameters[name] for name, ours in SAMPLING.items() if name in parameters}
    if parameters.get("repeat_last_n") == 0:
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif "repeat_penalty" in parameters:
        fields.setdefault("repetition_last_n", WINDOW)
    if fields.get("presence_penalty") or fields.get("frequency_penalty"):
        fields["occurrence_last_n"] = fields.get("repetition_last_n", WINDOW)
    if fields.get("max_tokens") in _UNLIMITED:
        fields["max_tokens"] = None
    if fields.get("seed") == -1:
        fields["seed"] = None  # drawn at random
    if "stop" in fields:
        fields["stop"] = tuple(fields["stop"])
    try:
        SamplingParams(**fields)
    except InvalidRequest as error:
        ours = error.param or ""
        name = next((name for name, own in SAMPLING.items() if own == ours), ours)
        raise InvalidRequest(error.message.replace(ours, name), error.hint, param=name) from None
    return fields


def engine_options_of(parameters: Mapping[str, Value]) -> dict[str, int]:
    """The fields of EngineOptions that the parameters set."""
    return {ours: int(parameters[name]) for name, ours in ENGINE.items() if name in parameters}  # type: ignore[arg-type]


def _check_known(name: str) -> None:
    if name not in _KNOWN:
        raise InvalidRequest(
            f"unknown parameter {name[:40]!r}", f"expected one of {', '.join(_KNOWN)}", param=name[:40]
        )


def _typed(name: str, value: Any) -> Value:
    _check_known(name)
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        if isinstance(stops, list | tuple) and len(stops) <= _MOST_STOPS and all(isinstance(s, str) for s in stops):
            return list(stops)
        raise InvalidRequest("stop is neither a text nor a list of texts", f"at most {_MOST_STOPS}", param=name)
    if name in _BOOLEANS:
        if isinstance(value, bool):
            return value
        raise InvalidRequest(f"{name} is not true or false", param=name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise InvalidRequest(f"{name} is not a number in range", param=name)
    if name in _INTEGERS:
        if value != int(value):
            raise InvalidRequest(f"{name} is not a whole number", param=name)
        return int(value)
    return float(value)
