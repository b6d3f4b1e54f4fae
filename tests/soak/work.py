"""The soak's questions, what makes them vary without a change of the answer, and how an answer is read."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

MODEL = "kvasir-mini"
ADAPTERS = ("fox", "sea", "calm")  # of the model, by their names
SYSTEM = "You are a calm and careful assistant who answers in few words. " * 4
STORY = "Once upon a time there was a small fox who lived at the edge of a forest. " * 6
ASKS = ("What is 23 + 45?", "Name a colour.", "Who are you?", "Tell me of the sea.", "Why is the sky blue?")
ENDINGS = ("", "One day", "The fox was", "And then a bear", "It was winter and")


@dataclass(frozen=True)
class Question:
    """A body for a route, whole and complete; its answer depends on nothing else."""

    route: str
    body: dict[str, Any]


@dataclass
class Choice:
    """One answer as it was read, whole or put together from chunks."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list] = field(default_factory=dict)
    finish: str | None = None

    def add(self, wire: dict[str, Any]) -> None:
        """A choice of a body or of a chunk."""
        reply = wire.get("message") or wire.get("delta") or {}
        self.text += wire.get("text") or reply.get("content") or ""
        self.ids += wire.get("token_ids") or []
        for name, values in (wire.get("logprobs") or {}).items():
            if values:
                self.logprobs.setdefault(name, []).extend(values)
        self.finish = wire.get("finish_reason") or self.finish


class ErrorEvent(Exception):
    """A stream ended with an error event; its code."""


def questions(rng: random.Random, count: int) -> list[Question]:
    """Chats, completions and embeddings with shared prefixes, every sampler, n, logprobs and stop strings, of the model
    and of its adapters."""
    makers = (_chat, _completion, _completion, _embedding)
    return [_adapted(rng, i, makers[i % len(makers)](rng)) for i in range(count)]


def _adapted(rng: random.Random, i: int, question: Question) -> Question:
    """Every second with an adapter, some with a sum of two."""
    if i % 2:
        return question
    body = question.body | {"model": ADAPTERS[i // 2 % len(ADAPTERS)]}
    if i % 8 == 0:
        scales = ((name, rng.choice((-0.5, 0.3, 1.0))) for name in rng.sample(ADAPTERS, 2))
        body |= {"model": MODEL, "lora": [{"name": name, "scale": scale} for name, scale in scales]}
    return Question(question.route, body)


def _chat(rng: random.Random) -> Question:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rng.choice(ASKS)}]
    if rng.random() < 0.5:
        messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": rng.choice(ASKS)}]
    asked = {"logprobs": True, "top_logprobs": rng.randint(0, 4)} if rng.random() < 0.5 else {}
    return Question("/v1/chat/completions", _sampled(rng) | {"messages": messages} | asked)


def _completion(rng: random.Random) -> Question:
    prompt = STORY[: rng.randint(20, len(STORY))] + rng.choice(ENDINGS)
    asked = {"logprobs": rng.randint(0, 4)} if rng.random() < 0.5 else {}
    return Question("/v1/completions", _sampled(rng) | {"prompt": prompt} | asked)


def _embedding(rng: random.Random) -> Question:
    inputs = [STORY[: rng.randint(5, 200)] for _ in range(rng.randint(1, 3))]
    return Question("/v1/embeddings", {"model": MODEL, "input": inputs})


def _sampled(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 64)}
    body |= {
        "n": rng.choice((1, 1, 1, 2, 4)),
        "temperature": rng.choice((0.0, 0.7, 1.0, 1.3)),
        "return_token_ids": True,
    }
    extras = (
        {"top_p": 0.9},
        {"top_k": 20, "min_p": 0.05},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"stop": [" the", "."]},
        {"ignore_eos": True},
        {"logit_bias": {"300": 3.0, "301": -5.0}},
    )
    for extra in rng.sample(extras, rng.randint(0, 3)):
        body |= extra
    return body


def varied(rng: random.Random, question: Question) -> dict[str, Any]:
    """The body with what changes when and how it is computed, and never what is answered."""
    body = dict(question.body)
    if rng.random() < 0.6 and question.route != "/v1/embeddings":
        body |= {"stream": True}
    if rng.random() < 0.3:
        body |= {"cache_salt": rng.choice("abc")}
    if rng.random() < 0.2:
        body |= {"no_cache": True}
    if rng.random() < 0.2:
        body |= {"cache_ttl": rng.choice((0.2, 2.0))}
    if rng.random() < 0.3:
        body |= {"priority": rng.randint(-3, 3)}
    if rng.random() < 0.3 and question.route != "/v1/embeddings":
        body |= {"speculation": rng.choice(({"method": "off"}, {"method": "ngram"}, {"num_speculative_tokens": 2}))}
    if rng.random() < 0.3 and question.route == "/v1/chat/completions":
        body |= {"prediction": {"type": "content", "content": STORY[rng.randint(0, 60) :]}}
    return body


def whole(data: dict[str, Any]) -> Any:
    """The comparable part of a body: its choices, or its embeddings."""
    if data["object"] == "list":
        return [item["embedding"] for item in data["data"]]
    return _choices(data["choices"])


async def streamed(lines: AsyncIterator[str]) -> Any:
    """The same from a stream's lines. Raises ErrorEvent, and AssertionError for one without its end mark."""
    seen: list[dict[str, Any]] = []
    async for line in lines:
        if line == "data: [DONE]":
            return _choices(seen)
        if line.startswith("data: "):
            data = json.loads(line[6:])
            if "error" in data:
                raise ErrorEvent(data["error"]["code"])
            seen += data["choices"]
    raise AssertionError("a stream ended without its end mark")


def _choices(parts: Iterable[dict[str, Any]]) -> dict[int, Choice]:
    found: dict[int, Choice] = {}
    for part in parts:
        found.setdefault(part["index"], Choice()).add(part)
    return found
