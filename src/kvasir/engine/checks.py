"""Checks of ids and lengths against what a model can do. Each raises InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.errors import InvalidRequest, PromptTooLong
from kvasir.speculation import Speculation
from kvasir.types import ModelInfo, SamplingParams, Task


def check_task(info: ModelInfo, task: Task) -> None:
    """Checks that the model supports the task."""
    if task not in info.tasks:
        can = ", ".join(t.value for t in info.tasks)
        raise InvalidRequest(f"this model does not {task.value}", f"it can: {can}", param="model")


def check_ids(info: ModelInfo, ids: Sequence[int], param: str) -> None:
    """Checks that there is at least one id and that all are in the vocabulary."""
    if not ids:
        raise InvalidRequest("the prompt is empty", "give at least one token", param=param)
    low, high = min(ids), max(ids)
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"token id {bad}", f"expected [0, {info.vocab_size})", param=param)


def check_vocabulary(info: ModelInfo, params: SamplingParams) -> None:
    """Checks that the ids and counts of the sampling parameters are within the vocabulary."""
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        bad = next((i for i in ids if i >= info.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"{name} names token {bad}", f"expected ids below {info.vocab_size}", param=name)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if (count or 0) > info.vocab_size:
            raise InvalidRequest(f"{name} is larger than the vocabulary", param=name)


def check_drafts(info: ModelInfo, speculation: Speculation | None, prediction: Sequence[int]) -> None:
    """Checks that the engine has the drafters that a request names, and that the answer it predicts can be one."""
    missing = [name for name in (speculation and speculation.methods) or () if name not in info.drafters]
    if missing:
        has = f"has {', '.join(info.drafters)}" if info.drafters else "has none"
        raise InvalidRequest(f"this engine has no drafter {missing[0]}", f"it {has}; or auto, off", "speculation")
    if len(prediction) > (context := info.max_model_len):
        message = f"the prediction has {len(prediction)} tokens; the context holds {context}"
        raise PromptTooLong(message, "shorten it", "prediction", tokens=len(prediction), context=context)
    if prediction:
        check_ids(info, prediction, "prediction")


def check_input_fits(info: ModelInfo, length: int, param: str) -> None:
    """Checks an input that gets no completion. length: in tokens."""
    if length > (context := info.max_model_len):
        message = f"the input has {length} tokens; the context holds {context}"
        raise PromptTooLong(message, "shorten it", param, tokens=length, context=context)


def room_for_answer(info: ModelInfo, length: int, max_tokens: int | None, param: str) -> int:
    """The tokens that a prompt of `length` tokens leaves for a choice. Raises if there is no room for one, or for
    `max_tokens`."""
    context = info.max_model_len
    room = context - length
    if room < 1:
        message = f"the prompt has {length} tokens; the context holds {context}, one of them for output"
        raise PromptTooLong(message, "shorten the prompt", param, tokens=length, context=context)
    if max_tokens is not None and max_tokens > room:
        message = f"the prompt has {length} tokens and max_tokens is {max_tokens}; the context holds {context}"
        if max_tokens >= context:
            raise InvalidRequest(message, f"lower max_tokens to {room}", param="max_tokens")
        hint = f"lower max_tokens to {room}, or shorten the prompt"
        raise PromptTooLong(message, hint, "max_tokens", tokens=length, context=context)
    return room
