"""What the front half counts while it serves: plain numbers, exported by whoever wants them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter

from kvasir.engine.answer import TextDelta

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = tuple(float(1 << i) for i in range(0, 21, 2))


class Histogram:
    """Counts per bucket; `bounds` are the buckets' inclusive upper ends, in ascending order."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper end, how many are at most so large), the last with an infinite end."""
        total, result = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append((bound, total))
        return result


class Meter:
    """Totals over all requests of a front half; `watch` follows one of them."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # answers by finish reason
        self.open_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.request = Histogram(SECONDS)
        self.prompt_length = Histogram(TOKENS)
        self.answer_length = Histogram(TOKENS)

    def watch(self, prompt_tokens: int, answers: int) -> Watch:
        return Watch(self, prompt_tokens, answers)


class Watch:
    """One request, from its submission to its end: `with meter.watch(...) as watch: watch.saw(delta)`."""

    def __init__(self, meter: Meter, prompt_tokens: int, answers: int):
        self._meter = meter
        self._prompt_tokens = prompt_tokens
        self._answers = answers
        self._last: dict[int, float] = {}
        self._cached = 0

    def __enter__(self) -> Watch:
        self._begun = time.perf_counter()
        self._meter.open_requests += 1
        return self

    def saw(self, delta: TextDelta) -> None:
        now, meter = time.perf_counter(), self._meter
        if not self._last:
            meter.prompt_tokens += self._prompt_tokens
            meter.prompt_length.add(self._prompt_tokens)
        if delta.token_ids:
            before = self._last.get(delta.index)
            if before is None:
                meter.first_token.add(now - self._begun)
            else:
                meter.per_token.add((now - before) / len(delta.token_ids))
            meter.generated_tokens += len(delta.token_ids)
        self._last[delta.index] = now
        if delta.usage.cached_tokens > self._cached:
            meter.cached_tokens += delta.usage.cached_tokens - self._cached
            self._cached = delta.usage.cached_tokens
        if delta.finish_reason:
            self._answers -= 1
            meter.finished[delta.finish_reason.value] += 1
            meter.answer_length.add(delta.usage.completion_tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        meter = self._meter
        meter.open_requests -= 1
        meter.request.add(time.perf_counter() - self._begun)
        if self._answers:
            reason = "error" if isinstance(error, Exception) else "abort"
            meter.finished[reason] += self._answers
