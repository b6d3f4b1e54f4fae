"""From a row of data to a request, its key, and the columns of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np

from kvasir.adapters import Lora, chosen_adapters
from kvasir.data.checkpoint import content_key
from kvasir.engine.answer import Answer
from kvasir.engine.front import Front
from kvasir.engine.thinking import may_think
from kvasir.errors import InvalidRequest
from kvasir.types import Request, SamplingParams, ServiceClass, StructuredOutputs

MAX_DEPTH = 16  # of the lists and objects in a row
SEED_BITS = 53  # of a derived seed: JSON numbers carry as many


class RowAnswer(msgspec.Struct):
    """The columns of an answer. With several choices, texts, tokens and reasons are lists. error: "" without one."""

    generated_text: str | list[str] = ""
    generated_tokens: list[int | list[int]] = []
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    finish_reason: str | list[str] = ""
    error: str = ""

    @property
    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A value of a dataset as plain Python objects. Raises InvalidRequest if it is nested too deeply."""
    if depth < 0:
        raise InvalidRequest("the row is nested too deeply", f"at most {MAX_DEPTH} levels")
    match value:
        case np.ndarray():
            return plain(value.tolist(), depth)
        case np.generic():
            return value.item()
        case Mapping():
            return {key: plain(one, depth - 1) for key, one in value.items() if one is not None}
        case list() | tuple():
            return [plain(one, depth - 1) for one in value]
    return value


def params_of(params: SamplingParams, own: Any) -> SamplingParams:
    """The job's sampling parameters with those of a row. Raises InvalidRequest."""
    if own is None:
        return params
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"sampling parameters of type {type(own).__name__}", "expected an object of fields")
    known = {field.name for field in fields(params)}
    if unknown := next((str(name) for name in own if name not in known), None):
        raise InvalidRequest(f"{unknown!r:.80} is no sampling parameter", "see kvasir.SamplingParams")
    if own.get("n", params.n) != params.n:  # otherwise a column would have texts and lists of texts
        raise InvalidRequest(f"n is {own['n']!r:.80}, and {params.n} for the job", "give the same n to all rows")
    given = dict(own)
    try:
        if isinstance(structure := given.get("structured_outputs"), Mapping):
            given["structured_outputs"] = StructuredOutputs(**structure)
        return replace(params, **given)
    except TypeError as error:
        raise InvalidRequest(f"a sampling parameter is malformed: {error}", "see kvasir.SamplingParams") from None


async def request_of(
    front: Front, prompt: Any, params: SamplingParams, chat: bool, lora: Lora | None
) -> tuple[Request, dict[str, Any]]:
    """The request for a prompt (text, token ids, or messages), and what its answer depends on besides the model. Its
    seed, unless given, is derived from these, so that an answer depends on nothing else. Raises KvasirError."""
    await front.learn(params)
    more: dict[str, Any] = {"slo": ServiceClass.BATCH, "adapters": chosen_adapters(lora)}
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    match prompt:
        case str():
            request = front.resolve(await front.encode(prompt), params, **more)
        case [Mapping(), *_]:
            ids = await front.encode_chat(prompt)
            thinks = params.structured_outputs is None or await may_think(front, prompt)
            request = await front.resolve_chat(ids, params, thinks, **more)
        case [*ids] if all(type(i) is int for i in ids):
            request = front.resolve(ids, params, **more)
        case _:
            raise InvalidRequest(f"a prompt of type {type(prompt).__name__}", "expected text, token ids or messages")
    content = {
        "ids": request.prompt_ids,
        "params": replace(request.params, seed=params.seed),
        "eos_ids": request.eos_ids,
        "grammar": request.grammar,
        "bad_words": request.bad_word_ids,
        "adapters": [(front.adapters.need(a.name).content, a.scale, a.start) for a in request.adapters],
    }
    if params.seed is None:
        seed = int.from_bytes(content_key(content)) % (1 << SEED_BITS)
        request = replace(request, params=replace(request.params, seed=seed))
    return request, content


def answer_of(request: Request, answers: Sequence[Answer]) -> RowAnswer:
    texts = [answer.text for answer in answers]
    tokens: list[Any] = [list(answer.token_ids) for answer in answers]
    reasons = [answer.finish_reason.value if answer.finish_reason else "" for answer in answers]
    one = request.params.n == 1
    return RowAnswer(
        generated_text=texts[0] if one else texts,
        generated_tokens=tokens[0] if one else tokens,
        num_input_tokens=len(request.prompt_ids),
        num_generated_tokens=sum(map(len, tokens)),
        finish_reason=reasons[0] if one else reasons,
    )


def failed(error: object, several: bool) -> RowAnswer:
    """The columns of a row that has no answer, of the same types as others."""
    return RowAnswer([], [], 0, 0, [], str(error)) if several else RowAnswer(error=str(error))
