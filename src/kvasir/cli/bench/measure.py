"""The measurements: one run of a mode is a dict of figures, whose names contain their unit.

Requests are random token ids, sampled greedily to full length, so that a run needs no tokenizer and does the same work
each time. Times are taken where ids are received, without HTTP.

Answers to random ids repeat themselves, so drafts would be right more often than in real text: drafters are off unless
options name them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from kvasir.config import EngineOptions
from kvasir.engine.front import Front
from kvasir.errors import KvasirError
from kvasir.statistics import EngineStats
from kvasir.types import ModelInfo, Request, SamplingParams

SEED = 0
WARM_UP_TOKENS = 8
PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "e2e")
_LOADS = 64  # most loads of a run, whose requests all differ

AT = "at_"  # begins the figures of a number of requests at once

Figures = dict[str, float]
Samples = dict[str, list[float]]  # seconds of each request, by the name of a time: ttft, tpot, e2e
T = TypeVar("T")


def without_drafters(options: EngineOptions) -> EngineOptions:
    """The options of a measurement."""
    return replace(options, speculate="off") if options.speculate == "auto" else options


@dataclass(frozen=True, slots=True)
class Shape:
    """The work of a run. request_rate: per second in the serve mode, 0 for all at once."""

    input_len: int
    output_len: int
    num_prompts: int = 1
    request_rate: float = 0.0

    @property
    def middle(self) -> float:
        """The context length at the middle of the output."""
        return self.input_len + self.output_len / 2


@dataclass(slots=True)
class Timing:
    """One request, in seconds of time.perf_counter. `begun`: when it was due, not when it was started."""

    begun: float
    first: float = 0.0
    last: float = 0.0
    first_tokens: int = 0
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.begun

    @property
    def e2e(self) -> float:
        return self.last - self.begun

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first step's tokens; None if there are none."""
        later = self.tokens - self.first_tokens
        return (self.last - self.first) / later if later else None


def make_requests(front: Front, shape: Shape, count: int, run: int) -> list[Request]:
    """The same requests for the same run; no two runs share a prompt. Raises InvalidRequest if they exceed the
    context."""
    random = np.random.default_rng((SEED, run))
    ids = random.integers(0, front.info.vocab_size, (count, shape.input_len))
    params = SamplingParams(temperature=0.0, max_tokens=shape.output_len, ignore_eos=True, seed=SEED)
    return [front.resolve(tuple(row), params) for row in ids.tolist()]


async def time_request(
    front: Front, request: Request, begun: float | None = None, at_first: Callable[[], Awaitable[None]] | None = None
) -> Timing:
    """at_first: awaited after the first token.

    Raises KvasirError if the request failed or returned too few tokens: such a run is not measured.
    """
    timing = Timing(time.perf_counter() if begun is None else begun)
    async with aclosing(front.engine.submit(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            timing.last = time.perf_counter()
            if not timing.tokens:
                timing.first, timing.first_tokens = timing.last, len(delta.token_ids)
                if at_first:
                    await at_first()
            timing.tokens += len(delta.token_ids)
            if delta.error:
                raise KvasirError(f"a request failed: {delta.error}", "see the engine's log above")
    if timing.tokens != request.params.max_tokens:
        raise KvasirError(f"a request produced {timing.tokens} tokens, expected {request.params.max_tokens}")
    return timing


async def warm_up(front: Front) -> None:
    shape = Shape(WARM_UP_TOKENS, WARM_UP_TOKENS)
    await time_request(front, make_requests(front, shape, 1, run=2**32)[0])


async def latency(front: Front, shape: Shape, run: int, samples: Samples | None = None) -> Figures:
    """One request alone. Step figures cover the steps after the prompt, of one token each. samples: gets the times of
    each request, as in all modes."""
    counts: list[EngineStats] = []

    async def count() -> None:
        counts.append(await front.stats())

    timing = await time_request(front, make_requests(front, shape, 1, run)[0], at_first=count)
    await count()
    _sample(samples, [timing])
    figures = {"ttft_s": timing.ttft, "e2e_s": timing.e2e}
    figures["prompt_tokens_per_s"] = shape.input_len / timing.ttft
    if timing.tpot:
        figures |= {"tpot_s": timing.tpot, "output_tokens_per_s": 1 / timing.tpot}
        before, after = counts
        figures |= of_steps(before, after, timing.tpot * (after.steps - before.steps))
        if weights := front.info.weight_bytes_read:
            read = weights + kv_bytes(front.info, shape.middle)
            figures |= {"read_mb_per_step": read / 1e6, "read_gb_per_s": read / timing.tpot / 1e9}
    return figures


async def throughput(front: Front, shape: Shape, run: int, samples: Samples | None = None) -> Figures:
    """All requests at once; rates over the whole run, prefill and decode together."""
    requests, before = make_requests(front, shape, shape.num_prompts, run), await front.stats()
    begun = time.perf_counter()
    timings = await all_of([time_request(front, request) for request in requests])
    seconds = time.perf_counter() - begun
    _sample(samples, timings)
    return _rates(shape, seconds) | of_steps(before, await front.stats(), seconds)


async def serve(front: Front, shape: Shape, run: int, samples: Samples | None = None) -> Figures:
    """Poisson arrivals. A request's time counts from when it was due, so that late starts are included."""
    requests, before = make_requests(front, shape, shape.num_prompts, run), await front.stats()
    begun = time.perf_counter()
    due = (begun + arrivals(shape, run)).tolist()
    timings = await all_of([_at(front, request, when) for request, when in zip(requests, due, strict=True)])
    figures = _rates(shape, time.perf_counter() - begun)
    _sample(samples, timings)
    for name in TIMES:
        values = [value for timing in timings if (value := getattr(timing, name)) is not None]
        figures |= percentiles(name, values) if values else {}
    after = await front.stats()
    return figures | of_steps(before, after, after.step_seconds - before.step_seconds)  # without idle time


async def load(front: Front, shape: Shape, run: int, samples: Samples | None = None) -> Figures:
    """Throughput with 1, 2, 4 ... requests at once, up to the shape's number."""
    figures: Figures = {}
    for number, count in enumerate(loads(shape.num_prompts)):
        part = await throughput(front, replace(shape, num_prompts=count), run * _LOADS + number, samples)
        figures |= {f"{AT}{count}_{name}": part[name] for name in ("prompt_tokens_per_s", "output_tokens_per_s")}
    return figures


def loads(most: int) -> list[int]:
    """Numbers of requests at once: the powers of two below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _sample(samples: Samples | None, timings: Sequence[Timing]) -> None:
    for name in TIMES if samples is not None else ():
        samples.setdefault(name, []).extend(v for t in timings if (v := getattr(t, name)) is not None)  # type: ignore[union-attr]


def arrivals(shape: Shape, run: int) -> np.ndarray:
    """When each request is due, in seconds from the start: shape [num_prompts]."""
    if not shape.request_rate:
        return np.zeros(shape.num_prompts)
    random = np.random.default_rng((SEED, run, 1))
    return np.cumsum(random.exponential(1 / shape.request_rate, shape.num_prompts))


async def _at(front: Front, request: Request, when: float) -> Timing:
    await asyncio.sleep(when - time.perf_counter())
    return await time_request(front, request, when)


async def all_of(work: Sequence[Awaitable[T]]) -> list[T]:
    """Like gather, but the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]  # type: ignore[arg-type]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _rates(shape: Shape, seconds: float) -> Figures:
    count = shape.num_prompts
    return {
        "duration_s": seconds,
        "requests_per_s": count / seconds,
        "prompt_tokens_per_s": count * shape.input_len / seconds,
        "output_tokens_per_s": count * shape.output_len / seconds,
    }


def of_steps(before: EngineStats, after: EngineStats, seconds: float) -> Figures:
    """Figures of an average step between two counts: its time in kernels, and the gap, which is the rest of `seconds`.
    Empty if no kernels were counted."""
    steps, kernels = after.steps - before.steps, after.kernel_seconds - before.kernel_seconds
    if not steps or not kernels:
        return {}
    gap = seconds - kernels
    return {"step_kernel_ms": 1e3 * kernels / steps, "step_gap_ms": 1e3 * gap / steps, "step_gap_share": gap / seconds}


def kv_bytes(info: ModelInfo, context: float) -> float:
    """Bytes of keys and values that a token attends to after `context` tokens."""
    return sum(size * min(context, window or context) for window, size in info.kv_bytes_per_token)


def percentiles(name: str, values: Sequence[float]) -> Figures:
    found = np.percentile(values, PERCENTILES)
    return {f"{name}_p{p}_s": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


MODES: dict[str, Callable[[Front, Shape, int, Samples | None], Awaitable[Figures]]] = {
    "latency": latency,
    "throughput": throughput,
    "serve": serve,
    "load": load,
}
