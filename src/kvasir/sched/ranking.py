"""Ranking: the order of service of waiting sequences, kept from step to step.

The rank of a waiting sequence changes by itself only when its target can no longer be met. So a sequence is ranked
again only if it has just arrived, if pending steps or grammars still change it, if sequences with its prefix came or
left, or if its target may just have been missed. That time is known in advance, as long as the costs of a step stay
near those of the ranking:

    target - prefill - margin      certainly in time before; from then on checked in every step
    target - prefill + margin      certainly late afterwards

The margin exceeds any change of the longest prefill's time since the costs were taken.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple

from kvasir.sched import fairness, slo
from kvasir.sched.budget import StepTime
from kvasir.sched.fairness import Fairness
from kvasir.sched.sequence import Sequence, Status
from kvasir.sched.slo import ServiceFacts
from kvasir.types import ServiceClass

MARGIN = 0.02  # seconds, at least
SHARE = 0.1  # of the longest prefill's time, at least
Stream = tuple[ServiceClass, str]  # a class and a tenant


class RankedPlace(NamedTuple):
    """The place of a sequence among those of its class and tenant. prefill: see ServiceFacts."""

    key: tuple  # slo.service_key; no two are equal
    prefill: int
    seq: Sequence


class Ranking:
    """facts(seq, now): inputs of the policy. seconds(model, tokens): time to prefill `tokens` tokens."""

    def __init__(self, facts: Callable[[Sequence, float], ServiceFacts], seconds: Callable[[StepTime, int], float]):
        self._facts, self._seconds = facts, seconds
        self._longest = 0  # tokens of the longest sequence ranked so far
        self._margin = MARGIN
        self._model = StepTime()  # the margin is based on its costs
        self._places: dict[Sequence, RankedPlace] = {}
        self._streams: dict[Stream, list[RankedPlace]] = {}
        self._groups: dict[Hashable, dict[Sequence, None]] = {}  # sequences by prefix key
        self._firsts: dict[Hashable, int] = {}  # lowest order in each group, running sequences included
        self._running: dict[Hashable, int] = {}  # lowest order in each group among running sequences only
        self._unsettled: dict[Sequence, tuple[int, float]] = {}  # still changed by pending steps or grammars
        self._marks: dict[Sequence, tuple[float, float]] = {}  # (since, due) of its valid entries in the two heaps
        self._count = itertools.count()  # makes heap entries distinct
        self._due: list[tuple[float, int, Sequence]] = []  # heap: when a target becomes doubtful; some entries stale
        self._doubtful: dict[Sequence, float] = {}  # sequences whose target is in doubt, and until when
        self._oldest: dict[ServiceClass, list[tuple[float, int, int, Sequence]]] = {c: [] for c in ServiceClass}

    # -- what changed ------------------------------------------------------------------------------------------

    def update(self, moved: set[Sequence], running: Iterable[ServiceFacts], model: StepTime, now: float) -> None:
        """Brings the ranking up to date. moved: sequences that began or stopped waiting since the last update. running:
        the running sequences that are ranked together with the waiting ones."""
        if self._strays(model, moved):
            moved = moved | set(self._places)
        firsts = _firsts(running)
        touched = {p for p in (*firsts, *self._running) if firsts.get(p) != self._running.get(p)}
        self._running = firsts
        moved = moved | self._settle()
        for seq in moved:
            self._leave(seq)
            touched.add(seq.content.prefix_key)
        entering = [seq for seq in moved if seq.status is Status.WAITING]
        for seq in entering:
            self._groups.setdefault(seq.content.prefix_key, {})[seq] = None
        entering += self._regroup(touched, set(entering))
        for seq in entering:
            self._enter(seq, now)
        self._watch(now)

    def _strays(self, model: StepTime, moved: Iterable[Sequence]) -> bool:
        """Whether the margin has become too small; sets a new one if so."""
        longest = max((s.counts.known for s in (*moved, *self._unsettled)), default=0)
        change = tuple(abs(a - b) for a, b in zip(model.costs, self._model.costs, strict=True))
        self._longest = max(self._longest, longest)
        if self._seconds(StepTime(change), self._longest) < self._margin / 2:  # type: ignore[arg-type]
            return False
        self._model = model
        self._margin = max(MARGIN, SHARE * self._seconds(model, self._longest))
        return True

    def _settle(self) -> set[Sequence]:
        """Removes and returns the unsettled sequences that have changed since they were ranked, or have settled."""
        found = {s for s, then in self._unsettled.items() if then != _state(s) or not _unsettled(s)}
        for seq in found:
            del self._unsettled[seq]
        return found

    def _regroup(self, prefixes: set[Hashable], entering: set[Sequence]) -> list[Sequence]:
        """Takes out and returns the sequences whose group has a new first sequence."""
        found: list[Sequence] = []
        for prefix in prefixes:
            members = self._groups.get(prefix)
            if not members:
                self._firsts.pop(prefix, None)
                continue
            first = min(*(s.order for s in members), self._running.get(prefix, 1 << 62), 1 << 62)
            if self._firsts.get(prefix) != first:
                self._firsts[prefix] = first
                rest = [s for s in members if s not in entering]
                for seq in rest:
                    self._remove(seq)
                found += rest
        return found

    def _enter(self, seq: Sequence, now: float) -> None:
        facts = self._facts(seq, now)
        place = RankedPlace(slo.service_key(facts, self._firsts[seq.content.prefix_key]), facts.prefill, seq)
        self._places[seq] = place
        insort(self._streams.setdefault((facts.slo, facts.tenant), []), place)
        if _unsettled(seq):
            self._unsettled[seq] = _state(seq)
        target = seq.counts.since + facts.target.ttft
        due, until = (target - facts.prefill_seconds + m for m in (-self._margin, self._margin))
        if due <= now <= until:
            self._doubtful[seq] = until
        self._mark(seq, facts.slo, due)

    def _mark(self, seq: Sequence, service_class: ServiceClass, due: float) -> None:
        since, before = self._marks.get(seq, (None, None))
        self._marks[seq] = seq.counts.since, due
        if due != before:
            heapq.heappush(self._due, (due, next(self._count), seq))
        if since != seq.counts.since:
            heapq.heappush(self._oldest[service_class], (seq.counts.since, seq.order, next(self._count), seq))

    def _leave(self, seq: Sequence) -> None:
        if seq in self._places:
            self._remove(seq)
            del self._marks[seq]
            self._unsettled.pop(seq, None)
            members = self._groups[seq.content.prefix_key]
            del members[seq]
            if not members:
                del self._groups[seq.content.prefix_key]

    def _remove(self, seq: Sequence) -> None:
        place = self._places.pop(seq)
        self._doubtful.pop(seq, None)
        stream = seq.request.slo, seq.request.tenant
        places = self._streams[stream]
        del places[bisect_left(places, place)]
        if not places:
            del self._streams[stream]

    def _watch(self, now: float) -> None:
        """Ranks again the sequences whose target has just been missed, or can be met after all."""
        looked = list(self._doubtful)
        while self._due and self._due[0][0] <= now:
            due, _, seq = heapq.heappop(self._due)
            if self._marks.get(seq, (0.0, None))[1] == due and seq not in self._doubtful:
                looked.append(seq)
        for seq in looked:
            place = self._places[seq]
            if slo.service_key(self._facts(seq, now), self._firsts[seq.content.prefix_key]) != place.key or (
                now > self._doubtful.get(seq, -inf)
            ):
                self._remove(seq)
                self._enter(seq, now)

    def again(self, seq: Sequence, now: float) -> None:
        """Ranks a sequence again after its promotion."""
        if seq in self._places:
            self._remove(seq)
            self._enter(seq, now)

    # -- the order ---------------------------------------------------------------------------------------------

    def oldest(self) -> list[Sequence]:
        """The sequence of each class that has waited longest."""
        found = []
        for heap in self._oldest.values():
            while heap and self._marks.get(heap[0][3], (None, 0.0))[0] != heap[0][0]:
                heapq.heappop(heap)
            if heap:
                found.append(heap[0][3])
        return found

    def order(
        self, running: Iterable[tuple[ServiceFacts, Sequence]], shares: Mapping[ServiceClass, Fairness]
    ) -> Iterator[Sequence]:
        """All waiting sequences merged with `running`, in the order of `slo.service_order`. Lazy; valid until the next
        update."""
        beside: dict[Stream, list[RankedPlace]] = {}
        for facts, seq in running:
            key = slo.service_key(
                facts, self._firsts.get(seq.content.prefix_key, self._running[seq.content.prefix_key])
            )
            insort(beside.setdefault((facts.slo, facts.tenant), []), RankedPlace(key, facts.prefill, seq))
        tagged = [
            _tagged(shares[stream[0]], stream[1], heapq.merge(self._streams.get(stream, ()), beside.get(stream, ())))
            for stream in {**self._streams, **beside}
        ]
        return (place.seq for _, _, place in heapq.merge(*tagged))


def _tagged(share: Fairness, tenant: str, places: Iterable[RankedPlace]) -> Iterator[tuple[tuple, float, RankedPlace]]:
    """The places of one tenant with their class keys and turns (see `fairness.tags`)."""
    turn = share.counters[tenant]
    for place in places:
        yield place.key[: slo.CLASS_KEY], turn, place
        turn += fairness.PROMPT_COST * place.prefill / share.weights[tenant]


def _firsts(facts: Iterable[ServiceFacts]) -> dict[Hashable, int]:
    firsts: dict[Hashable, int] = {}
    for f in facts:
        firsts[f.prefix] = min(firsts.get(f.prefix, f.order), f.order)
    return firsts


def _unsettled(seq: Sequence) -> bool:
    return seq.counts.in_flight > 0 or seq.guidance.compiling is not None


def _state(seq: Sequence) -> tuple[int, float]:
    return seq.counts.known, seq.counts.since
