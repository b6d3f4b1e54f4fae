"""The response objects of /completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvasir.engine.answer import TextDelta, TokenInfo, prompt_text
from kvasir.engine.pace import Pace
from kvasir.serve.conversation.logprobs import finite
from kvasir.serve.conversation.timings import timings_object
from kvasir.serve.dialects.llamacpp.lines import Lines
from kvasir.serve.dialects.llamacpp.params import n_predict_of, settings_object
from kvasir.serve.dialects.llamacpp.wire import Options
from kvasir.serve.hosting.serving import Serving
from kvasir.types import FinishReason, Request, Usage


@dataclass(slots=True)
class ChoiceState:
    """One choice, as far as it was sent. stop_type is empty until it has ended."""

    number: int
    core: Request
    lines: Lines
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    stop_type: str = ""
    stopping_word: str = ""
    pace: Pace = field(default_factory=Pace)

    def add(self, delta: TextDelta, only_prompt: bool) -> str:
        """Adds a delta; returns the part of its text that belongs to the choice."""
        self.pace.saw(delta)
        if only_prompt:
            self.usage = Usage(delta.usage.prompt_tokens, 0, delta.usage.cached_tokens)
            self.stop_type = "limit" if delta.finish_reason else ""
            return ""
        text = self.lines.push(delta.text)
        self.pieces.append(text)
        self.tokens += delta.token_ids
        self.infos += delta.logprobs
        self.usage = delta.usage
        if self.lines.ended:
            self.stop_type = "limit"
        elif isinstance(delta.stop_reason, str):
            self.stop_type, self.stopping_word = "word", delta.stop_reason
        elif delta.finish_reason:
            self.stop_type = "eos" if delta.finish_reason is FinishReason.STOP else "limit"
        return text

    @property
    def timings(self) -> dict[str, float]:
        return timings_object(self.pace, self.usage)


def partial_object(wire: Options, choice: ChoiceState, text: str, delta: TextDelta) -> dict[str, Any]:
    """The stream object of one delta."""
    found = {
        "index": choice.number,
        "content": text,
        "tokens": delta.token_ids,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": choice.usage.completion_tokens,
        "tokens_evaluated": choice.usage.prompt_tokens,
    }
    if wire.timings_per_token:
        found["timings"] = choice.timings
    if wire.n_probs:
        found["completion_probabilities"] = list(map(_probability, delta.logprobs))
    return found


def final_object(wire: Options, serving: Serving, choice: ChoiceState, whole: bool) -> dict[str, Any]:
    """The final object of a choice, without its text if that was streamed. response_fields may select fields of it."""
    params, usage = choice.core.params, choice.usage
    context, wanted = serving.front.info.max_model_len, n_predict_of(wire, serving.own)
    found = {
        "index": choice.number,
        "content": "".join(choice.pieces) if whole else "",
        "tokens": choice.tokens if whole and wire.return_tokens else [],
        "id_slot": -1,
        "stop": True,
        "model": serving.names[0],
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "generation_settings": settings_object(
            wire, params, wanted, serving.front.info, choice.core.speculation, lora_of(choice.core, serving)
        ),
        "prompt": prompt_text(serving.front.tokenizer, choice.core.prompt_ids, skip_special_tokens=False),
        "has_new_line": choice.lines.broken,
        "truncated": _cut(choice, context, wanted),
        "stop_type": choice.stop_type,
        "stopping_word": choice.stopping_word,
        "tokens_cached": usage.cached_tokens,
        "timings": choice.timings,
    }
    if whole and wire.n_probs:
        found["completion_probabilities"] = list(map(_probability, choice.infos))
    return found if not wire.response_fields else _chosen(found, wire.response_fields)


def _cut(choice: ChoiceState, context: int, wanted: int) -> bool:
    """Whether the context's end, not the requested length, ended the choice."""
    full = choice.usage.prompt_tokens + choice.usage.completion_tokens >= context
    return choice.stop_type == "limit" and full and not 0 <= wanted <= choice.usage.completion_tokens


def _chosen(found: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The fields at these paths, each under its path; missing ones are left out."""
    chosen = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            chosen[path] = value
    return chosen


def _probability(info: TokenInfo) -> dict[str, Any]:
    top = [_entry(c.token, c.text, c.bytes, c.logprob) for c in info.top]
    return {**_entry(info.token, info.text, info.bytes, info.logprob), "top_logprobs": top}


def _entry(token: int, text: str, data: bytes, logprob: float | None) -> dict[str, Any]:
    number = finite(logprob)
    return {"id": token, "token": text, "bytes": list(data), "logprob": number}


def lora_of(core: Request, serving: Serving) -> list[dict[str, Any]]:
    """The adapters of a request, by their numbers."""
    numbers = {info.name: i for i, info in enumerate(serving.front.adapters.known)} if core.adapters else {}
    return [{"id": numbers.get(one.name, -1), "scale": one.scale} for one in core.adapters]
