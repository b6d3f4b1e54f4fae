"""What the front counts while it serves: plain numbers, exported elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.engine.answer import TextDelta
from kvasir.engine.pace import Pace, moment
from kvasir.inputs import Adapter
from kvasir.statistics import MOST_ADAPTERS, OTHER_ADAPTERS, AdapterStats, FrontStats
from kvasir.types import FinishReason, Note, Request, Target


@dataclass
class Meter(FrontStats):
    """Totals over all requests of a front; `watch` follows one request. Times to tokens use the engine's clock, since
    this process may read tokens late, and many at once. on_end: called with each request that ends."""

    on_end: Callable[[RequestWatch], None] = lambda watch: None

    def watch(self, request: Request, target: Target | None) -> RequestWatch:
        """target: of the request's class, if known."""
        return RequestWatch(self, request, target)

    def of_adapters(self, adapters: Sequence[Adapter]) -> list[AdapterStats]:
        """Where requests with these adapters are counted; the first ones that are used have numbers of their own."""
        found = []
        for name in dict.fromkeys(adapter.name for adapter in adapters):
            known = name in self.adapters or len(self.adapters) < MOST_ADAPTERS
            found.append(self.adapters.setdefault(name if known else OTHER_ADAPTERS, AdapterStats()))
        return list({id(stats): stats for stats in found}.values())

    def forget(self, adapter: str) -> None:
        """Ends the numbers of an adapter that is unloaded; requests under way with it count for nothing."""
        self.adapters.pop(adapter, None)


class RequestWatch:
    """One request, from its submission to its end: `with meter.watch(...) as watch: watch.saw(delta)`.

    prompt_tokens, cached_tokens, answer_tokens, reasons: of this request; reasons counts choices by finish reason.
    begun: in seconds of time.monotonic. notes: of a traced request, whose traceparent is `trace`."""

    def __init__(self, meter: Meter, request: Request, target: Target | None):
        self._meter = meter
        self._class = meter.classes[request.slo]
        self._adapters = meter.of_adapters(request.adapters)
        self._target = target
        self.prompt_tokens = len(request.prompt_ids)
        self.cached_tokens = 0
        self.answer_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.begun = 0.0
        self.trace = request.trace
        self.notes: list[Note] = []
        self._answers = request.params.n
        self._paces: dict[int, Pace] = {}  # of each choice that has a delta

    def __enter__(self) -> RequestWatch:
        self.begun = time.monotonic()
        self._meter.open_requests += 1
        for adapter in self._adapters:
            adapter.requests += 1
            adapter.open_requests += 1
        return self

    def saw(self, delta: TextDelta) -> None:
        """Counts a delta of the request."""
        meter = self._meter
        if not self._paces:
            meter.prompt_tokens += self.prompt_tokens
            meter.prompt_length.add(self.prompt_tokens)
            for adapter in self._adapters:
                adapter.prompt_tokens += self.prompt_tokens
        pace = self._paces.get(delta.index)
        if pace is None:
            pace = self._paces[delta.index] = Pace(self.begun)
        if delta.token_ids:
            self._measure(pace, delta)
        if delta.usage.cached_tokens > self.cached_tokens:
            meter.cached_tokens += delta.usage.cached_tokens - self.cached_tokens
            self.cached_tokens = delta.usage.cached_tokens
        if delta.finish_reason:
            self._answers -= 1
            self._finish(delta.finish_reason.value, 1)
            meter.answer_length.add(delta.usage.completion_tokens)
            if pace.per_token is not None:
                meter.recent_paces.append(pace.per_token)
            self._judge(delta, pace)

    def _measure(self, pace: Pace, delta: TextDelta) -> None:
        meter, count, before = self._meter, len(delta.token_ids), pace.last
        pace.saw(delta)
        assert pace.last is not None
        if before is None:
            self._class.first_token.add(pace.last - self.begun)
            meter.recent_first.append(pace.last - self.begun)
        else:
            self._class.per_token.add((pace.last - before) / count)
        meter.generated_tokens += count
        for adapter in self._adapters:
            adapter.generated_tokens += count
        self.answer_tokens += count

    def _judge(self, delta: TextDelta, pace: Pace) -> None:
        """Counts a choice as in time, late or expired. An embedding is its own first token."""
        if delta.finish_reason is FinishReason.TIMEOUT:
            self._class.expired += 1
        if self._target is None or delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        first = moment(delta.at, self.begun) if pace.first is None else pace.first
        if first - self.begun <= self._target.ttft and (pace.per_token or 0.0) <= self._target.tpot:
            self._class.in_time += 1
        else:
            self._class.late += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        meter = self._meter
        meter.open_requests -= 1
        for adapter in self._adapters:
            adapter.open_requests -= 1
        meter.request.add(time.monotonic() - self.begun)
        if self._answers:
            reason = "error" if isinstance(error, Exception) else "abort"
            self._finish(reason, self._answers)
        meter.on_end(self)

    def _finish(self, reason: str, count: int) -> None:
        self._meter.finished[reason] += count
        self.reasons[reason] += count
