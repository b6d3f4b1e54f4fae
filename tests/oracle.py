"""The oracle: requests alone and plainly, then together with anything on; tokens and logprob bits must be equal.

Every later feature joins here: give `together` an engine that has it on, and say by which counter it shows that it
was really used.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from kvasir.engine.core import EngineCore
from kvasir.types import Delta, FinishReason, Request, SamplingParams, Task

Bits = tuple  # of (token, logprob bits, rank, top ids and bits)


@dataclass
class Answer:
    """What one answer brought, with float32 log-probabilities as bits."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Bits] = field(default_factory=list)
    prompt_logprobs: list[Bits | None] | None = None
    embedding: bytes | None = None
    reason: FinishReason | None = None
    text: str = ""
    stop: str | int | None = None  # what ended the text, where it was asked for

    def take(self, delta: Delta) -> None:
        assert self.reason is None, "a delta behind the last one"
        assert delta.error is None, delta.error
        self.tokens += delta.token_ids
        self.logprobs += [bits(e) for e in delta.logprobs]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [e and bits(e) for e in delta.prompt_logprobs]
        if delta.embedding is not None:
            self.embedding = struct.pack(f"<{len(delta.embedding)}f", *delta.embedding)
        self.reason = delta.finish_reason


def bits(entry) -> Bits:
    top = tuple((t, struct.pack("<f", lp)) for t, lp in entry.top)
    return entry.token, struct.pack("<f", entry.logprob), entry.rank, top


Answers = dict[tuple[str, int], Answer]


def plain(core: EngineCore, requests: list[Request]) -> Answers:
    """Each answer of each request alone, one at a time: no neighbours, no siblings."""
    answers: Answers = {}
    for request in requests:
        for index in range(request.params.n):
            alone = replace(request, done=tuple(i for i in range(request.params.n) if i != index))
            answer = answers[request.id, index] = Answer()
            core.add(alone)
            while core.has_work():
                for delta in core.step():
                    answer.take(delta)
            assert answer.reason is not None
    core.check()
    return answers


def together(
    core: EngineCore,
    requests: list[Request],
    *,
    seed: int = 0,
    preempt: float = 0.0,
    cancel: tuple[str, ...] = (),
    stagger: int = 2,
    each_step: Callable[[EngineCore], None] | None = None,
) -> Answers:
    """All requests at once, arriving over some steps; `preempt` is the chance of a forced preemption a step;
    requests named in `cancel` are aborted half way and their answers left out."""
    rng = random.Random(seed)
    todo = list(requests)
    rng.shuffle(todo)
    answers: Answers = defaultdict(Answer)
    steps = 0
    while todo or core.has_work():
        for request in [todo.pop() for _ in range(rng.randint(0, stagger)) if todo] or (
            [todo.pop()] if todo and not core.has_work() else []
        ):
            core.add(request)
        if core.scheduler.running and rng.random() < preempt:
            core.scheduler.preempt(rng.choice(core.scheduler.running))
        if cancel and rng.random() < 0.2:
            core.abort(rng.choice(cancel))
        for delta in core.step():
            if delta.id not in cancel:
                answers[delta.id, delta.index].take(delta)
        if each_step:
            each_step(core)
        core.check()
        steps += 1
        assert steps < 20000, "no end"
    assert core.scheduler.kv.used == 0
    return dict(answers)


def same(expected: Answers, got: Answers, leave_out: tuple[str, ...] = ()) -> None:
    """Tokens and bits are equal; says where they first differ."""
    wanted = {k: v for k, v in expected.items() if k[0] not in leave_out}
    assert set(wanted) == set(got)
    for key, a in wanted.items():
        b = got[key]
        assert a.tokens == b.tokens, f"{key}: tokens differ from number {_first(a.tokens, b.tokens)}"
        assert a.reason == b.reason, key
        assert a.logprobs == b.logprobs, f"{key}: logprob bits differ from number {_first(a.logprobs, b.logprobs)}"
        assert a.prompt_logprobs == b.prompt_logprobs, f"{key}: prompt logprob bits differ"
        assert a.embedding == b.embedding, f"{key}: embedding bits differ"
        assert (a.text, a.stop) == (b.text, b.stop), f"{key}: texts differ"


def free_blocks(core: EngineCore) -> list[frozenset[int]]:
    """Per cache group, the blocks without a holder."""
    return [pool.free_ids for pool in core.scheduler.kv.pools]


NANS = {"uint8": 255, "uint16": 0x7FC0}  # of caches that hold numbers as bits: int8 with its scales, bfloat16
NANS |= {"torch.uint8": 255, "torch.int8": -1}  # codes, whose scales are other tensors


def poison(core: EngineCore, blocks: Sequence[Set[int]]) -> int:
    """Fills blocks of each cache group with NaN; how many. No step under way may read them."""
    cache = core.runner.cache  # type: ignore[attr-defined]
    for group, ids in enumerate(blocks):
        for _, tensors in cache.of_group(group):
            for tensor in tensors:
                tensor[:, :, sorted(ids)] = NANS.get(str(tensor.dtype), float("nan"))
    return sum(map(len, blocks))


def _first(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def mixed_requests(vocab_size: int, max_len: int, seed: int = 1, count: int = 10, longest: int = 150) -> list[Request]:
    """A set of requests with every sampler, `n`, logprobs and prompt lengths from one token to several blocks."""
    rng = random.Random(seed)
    kinds = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0, "logprobs": 0, "n": 3},
        {"temperature": 0.8, "top_k": 20, "logprobs": 3},
        {"temperature": 1.3, "top_p": 0.9, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.05, "n": 2, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
        {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 1.0, "logit_bias": {3: 4.0, 7: -50.0}, "min_tokens": 5, "logprobs": 0},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, vocab_size, 37)), "logprobs": 0},
    ]
    requests = []
    for i in range(count):
        length = rng.choice([1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 70, 100, longest])
        params = dict(kinds[i % len(kinds)])
        params["max_tokens"] = min(rng.randint(3, 24), max_len - length)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        prompt = tuple(rng.randrange(vocab_size) for _ in range(min(length, max_len - 30)))
        requests.append(
            Request(f"r{i}", prompt, SamplingParams(**params, seed=rng.randrange(2**60), ignore_eos=i % 2 == 0))
        )
    return requests


def embed_requests(vocab_size: int, seed: int = 1, count: int = 8, longest: int = 120) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"e{i}",
            tuple(rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 31, 32, 33, 64, longest]))),
            SamplingParams(seed=0, max_tokens=1),
            Task.EMBED,
        )
        for i in range(count)
    ]
