"""Comparisons of two texts: how pairs become requests of a model, and its results scores.

    a cross-encoder      one request per pair; its logit, through the function that the model names, is the score
    an embedding model   one request per text; the score of a pair is the cosine of its embeddings

A cross-encoder reads a pair as its tokenizer joins two texts, or as its chat template renders the messages of a `query`
and a `document`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.engine.front import Front
from kvasir.engine.lengths import Bound
from kvasir.errors import InvalidRequest
from kvasir.inputs import Inputs
from kvasir.types import ModelInfo, Request, Task

Pair = tuple[str, str]
Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """How pairs are read. instruction: for a template that has a place for one; "" for the model's own. tokens: most
    tokens of a pair, further ones of its second text are cut off; 0 if a longer pair is refused. second_tokens: the
    same for the second text alone. raw: scores are logits."""

    instruction: str = ""
    tokens: int = 0
    second_tokens: int = 0
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """requests: to be computed, in this order. scores: makes scores of the pairs, in order, from their results. cut:
    the numbers of the pairs whose second text was cut off."""

    requests: tuple[Request, ...]
    scores: Callable[[Sequence[Vector]], list[float]]
    cut: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(len(request.prompt_ids) for request in self.requests)


async def compare(front: Front, pairs: Sequence[Pair], reading: Reading, **fields: Any) -> Comparison:
    """The comparison of pairs of texts. fields: of the requests. Raises InvalidRequest for a model that cannot compare,
    and what `Front.encode` raises."""
    info = front.info
    if Task.CLASSIFY in info.tasks:
        if len(info.labels) != 1:
            names = ", ".join(info.labels[:4])
            raise InvalidRequest(f"this model has {len(info.labels)} labels ({names}) and no score of a pair",
                                 "use /classify, or a cross-encoder", param="model")  # fmt: skip
        return await _judged(front, pairs, reading, fields)
    if Task.EMBED in info.tasks:
        return await _alike(front, pairs, reading, fields)
    can = ", ".join(task.value for task in info.tasks)
    raise InvalidRequest("this model does not compare texts", f"it can: {can}", param="model")


def pairs_of(one: str | Sequence[str], other: str | Sequence[str]) -> list[Pair]:
    """The pairs of one text with each of several, or of as many with as many. Raises InvalidRequest."""
    if isinstance(other, str):
        other = [other]
    ones = [one] * len(other) if isinstance(one, str) else one
    ones = [ones[0]] * len(other) if len(ones) == 1 else ones
    if len(ones) != len(other) or not other:
        raise InvalidRequest(f"{len(ones)} first texts and {len(other)} second texts",
                             "give one first text, or as many as second texts")  # fmt: skip
    return list(zip(ones, other, strict=True))


def ranked(scores: Sequence[float]) -> list[tuple[int, float]]:
    """(index, score), the highest score first; equal scores in order of their indexes."""
    return sorted(enumerate(scores), key=lambda item: (-item[1], item[0]))


# --- cross-encoders -----------------------------------------------------------------------------------


async def _judged(front: Front, pairs: Sequence[Pair], reading: Reading, fields: Mapping[str, Any]) -> Comparison:
    template, raw = front.pair_template, reading.raw
    if template is None and reading.instruction:
        raise InvalidRequest("this model takes no instruction", "leave it out", param="instruction")
    limits = Limits(min(reading.tokens or front.info.max_model_len, front.info.max_model_len), reading)
    if template is None:
        found = await _joined(front, pairs, limits)
    else:
        found = [await _rendered(front, pair, template, limits, reading.instruction) for pair in pairs]
    requests = tuple(
        front.resolve_pooled(ids, Task.CLASSIFY, param="documents", inputs=inputs, **fields) for ids, inputs, _ in found
    )
    cut = tuple(i for i, (*_, is_cut) in enumerate(found) if is_cut)
    return Comparison(requests, lambda vectors: [scores_of(front.info, v, raw)[0] for v in vectors], cut)


@dataclass(frozen=True, slots=True)
class Limits:
    """most: tokens of a pair."""

    most: int
    reading: Reading

    def second(self, ids: tuple[int, ...], rest: int) -> tuple[int, ...]:
        """The ids of a second text, cut to the limits that the request has set. rest: the pair's other tokens."""
        if self.reading.second_tokens:
            ids = ids[: self.reading.second_tokens]
        return ids[: max(0, self.most - rest)] if self.reading.tokens else ids


_Found = tuple[tuple[int, ...], Inputs, bool]  # ids, further inputs, whether the second text was cut off


async def _joined(front: Front, pairs: Sequence[Pair], limits: Limits) -> list[_Found]:
    """The pairs as the tokenizer joins two texts."""
    join = front.pair_join
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    longest = limits.most + 1 if limits.reading.tokens or limits.reading.second_tokens else 0
    ids = dict(zip(texts, await front.encode_parts(texts, first=longest, param="documents"), strict=True))
    found = []
    for one, other in pairs:
        head = (*join.before, *ids[one], *join.between)
        tail = limits.second(ids[other], len(head) + len(join.after))
        inputs = Inputs(second=len(head)) if front.info.pair_types and len(tail) + len(join.after) else Inputs()
        found.append(((*head, *tail, *join.after), inputs, len(tail) < len(ids[other])))
    return found


async def _rendered(front: Front, pair: Pair, template: str, limits: Limits, instruction: str) -> _Found:
    """A pair as the template renders it; a text that is cut off is rendered again from its first tokens."""
    instruction = instruction or front.prompts.of(None)

    async def ids_of(other: str) -> tuple[int, ...]:
        return await front.encode_pair(template, pair[0], other, instruction, bound=bound)

    may_cut = limits.reading.tokens or limits.reading.second_tokens
    bound: Bound = None if may_cut else "context"
    ids = await ids_of(pair[1])
    if not may_cut:
        return ids, Inputs(), False
    [whole] = await front.encode_parts([pair[1]], first=limits.most + 1, param="documents")
    kept = limits.second(whole, max(0, len(ids) - len(whole)))
    if len(kept) == len(whole):
        return ids, Inputs(), False
    return await ids_of(await front.decode(kept)), Inputs(), True


# --- embedding models ---------------------------------------------------------------------------------


async def _alike(front: Front, pairs: Sequence[Pair], reading: Reading, fields: Mapping[str, Any]) -> Comparison:
    if reading.instruction:
        raise InvalidRequest("this model takes no instruction", "leave it out", param="instruction")
    if reading.raw:
        raise InvalidRequest("a cosine has no logit", "leave use_activation out", param="use_activation")
    if reading.tokens or reading.second_tokens:
        raise InvalidRequest(
            "an embedding model compares whole texts", "leave the truncation out", param="truncate_prompt_tokens"
        )
    prompts = front.prompts.first("query"), front.prompts.first("document", "passage")
    sides = [tuple(prompt + text for prompt, text in zip(prompts, pair, strict=True)) for pair in pairs]
    texts = list(dict.fromkeys(text for side in sides for text in side))
    many = await front.encode_all(texts, param="documents")
    place = {text: i for i, text in enumerate(texts)}
    requests = tuple(front.resolve_pooled(ids, Task.EMBED, param="documents", **fields) for ids in many)

    def scores(vectors: Sequence[Vector]) -> list[float]:
        return [cosine(vectors[place[one]], vectors[place[other]]) for one, other in sides]

    return Comparison(requests, scores)


def first_dimensions(vector: Vector, count: int) -> Vector:
    """The first `count` dimensions, normalised to length 1, for models trained with nested dimensions (Matryoshka)."""
    length = math.sqrt(math.fsum(x * x for x in vector[:count]))
    if not length or (count == len(vector) and abs(length - 1) < 1e-5):
        return vector[:count]
    return [x / length for x in vector[:count]]


def cosine(a: Vector, b: Vector) -> float:
    """The cosine of the angle between two vectors, 0 if one of them is zero."""
    product, squares = math.fsum(map(float.__mul__, a, b)), [math.fsum(x * x for x in v) for v in (a, b)]
    lengths = math.sqrt(squares[0]) * math.sqrt(squares[1])
    return product / lengths if lengths else 0.0


# --- tokens -------------------------------------------------------------------------------------------


def rows_of(values: Vector, size: int) -> list[Vector]:
    """The values in rows."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def token_embeddings(front: Front, ids: Sequence[int], values: Vector) -> list[Vector]:
    """The embeddings of a text's tokens; a model with weights of tokens has none of the token before the text."""
    rows = rows_of(values, front.info.token_embedding_size)
    begins = front.info.token_weights and _begins(front, ids)
    return rows[1:] if begins else rows


def token_weights(front: Front, ids: Sequence[int], values: Vector) -> list[tuple[int, float]]:
    """(id, weight) of a text's tokens, without those before and after the text."""
    first, end = int(_begins(front, ids)), len(ids) - int(_ends(front, ids))
    return list(zip(ids[first:end], values[first:end], strict=True))


def lexical_weights(front: Front, ids: Sequence[int], values: Vector) -> dict[int, float]:
    """The greatest weight of each id of a text, without control tokens and ids of no weight."""
    special = front.tokenizer.special_ids if front.tokenizer is not None else ()
    found: dict[int, float] = {}
    for token, weight in token_weights(front, ids, values):
        if weight > 0 and token not in special:
            found[token] = max(weight, found.get(token, 0.0))
    return found


def _begins(front: Front, ids: Sequence[int]) -> bool:
    """Whether a control token precedes the text."""
    return front.tokenizer is not None and bool(ids) and ids[0] in front.tokenizer.special_ids


def _ends(front: Front, ids: Sequence[int]) -> bool:
    """Whether a control token follows the text."""
    return front.tokenizer is not None and len(ids) > 1 and ids[-1] in front.tokenizer.special_ids


# --- classifiers --------------------------------------------------------------------------------------


def scores_of(info: ModelInfo, logits: Vector, raw: bool = False) -> list[float]:
    """The scores that a classifier's logits stand for, or the logits themselves."""
    if raw or info.activation == "identity":
        return list(logits)
    if info.activation == "softmax":
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        return [w / math.fsum(weights) for w in weights]
    return [math.tanh(x) if info.activation == "tanh" else _sigmoid(x) for x in logits]


def _sigmoid(x: float) -> float:
    e = math.exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)
