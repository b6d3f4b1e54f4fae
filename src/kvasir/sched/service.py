"""Service: who is served when, and how much of a prefill a step may take. Holds what the policies remember.

The policies themselves are pure (slo, fairness, budget); here their states live: what each tenant was served, how long
steps take, and for how long prefills have gone hungry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvasir.plan import StepPlan, Work
from kvasir.sched import fairness, slo
from kvasir.sched.budget import (
    BudgetFacts,
    StepLoad,
    StepTime,
    chunk_context,
    hunger,
    observe,
    prefill_seconds,
    step_budget,
)
from kvasir.sched.fairness import Fairness
from kvasir.sched.sequence import Sequence, Status
from kvasir.types import ServiceClass, Target

TARGETS = {
    ServiceClass.INTERACTIVE: Target(2.0, 0.1),
    ServiceClass.BATCH: Target(30.0, 0.5),
    ServiceClass.BACKGROUND: Target(600.0, 5.0),
}
MEASURE_EVERY = 8  # of steps that only decode, which are much alike, so many pass between two that are measured


class Served(NamedTuple):
    """What a sequence got in a step."""

    seq: Sequence
    prompt_tokens: int
    generated_tokens: int


class Service:
    """targets: of each class. whole: tokens a step can hold. block: tokens in a KV block. chunk: most tokens of one
    sequence in a step."""

    def __init__(self, targets: Mapping[ServiceClass, Target], whole: int, block: int, chunk: int):
        self.targets = targets
        self.step_time = StepTime()
        self._whole, self._block, self._chunk = whole, block, chunk
        self._shares = {c: Fairness() for c in ServiceClass}
        self._hungry = 0

    def present(self, living: Iterable[Sequence]) -> None:
        """Says who has requests. To be called before tenants are ordered or charged."""
        weights: dict[ServiceClass, dict[str, float]] = {c: {} for c in ServiceClass}
        for seq in living:
            weights[seq.request.slo][seq.request.tenant] = seq.request.weight
        for service_class, found in weights.items():
            self._shares[service_class] = fairness.present(self._shares[service_class], found)

    def order(self, candidates: list[Sequence], now: float, promoted: bool) -> list[Sequence]:
        """Those that want prompt tokens computed, in the order of service. promoted: somebody living is already."""
        facts = [self._facts(seq, now) for seq in candidates]
        chosen = slo.promote(facts, promoted)
        if chosen is not None:
            candidates[chosen].promoted = True
            facts[chosen] = self._facts(candidates[chosen], now)
        return [candidates[i] for i in slo.service_order(facts, self._shares)]

    def _facts(self, seq: Sequence, now: float) -> slo.ServiceFacts:
        request, start = seq.request, seq.computed or seq.expected
        prefill = seq.known - start
        return slo.ServiceFacts(
            order=seq.order,
            slo=request.slo,
            target=self.targets[request.slo],
            waited=now - seq.since,
            prefill=prefill,
            prefill_seconds=prefill_seconds(self.step_time, start, prefill, self._chunk),
            tenant=request.tenant,
            priority=request.priority,
            started=seq.known > seq.prompt_len,
            running=seq.status is Status.RUNNING,
            promoted=seq.promoted,
            prefix=seq.beginning,
        )

    def allowance(self, decodes: list[Sequence], first: Sequence | None) -> int:
        """Prompt tokens that a step with these decodes may compute; `first` goes first of those that want some."""
        if first is None:
            return self._whole
        return step_budget(
            BudgetFacts(
                model=self.step_time,
                whole=self._whole,
                block=self._block,
                decode_rows=len(decodes),
                decode_context=sum(s.known for s in decodes),
                tpot=min((self.targets[s.request.slo].tpot for s in decodes), default=0.0),
                prefill_start=first.computed,
                hungry=self._hungry,
            )
        )

    def prefill_seconds(self, start: int, tokens: int) -> float:
        """Time to compute so many tokens behind the first `start` of a sequence; 0 as long as it is not known."""
        return prefill_seconds(self.step_time, start, tokens, self._chunk)

    def fed(self, wanted: int, given: int) -> None:
        """Prefills wanted so many tokens of a step and were given so many."""
        self._hungry = hunger(self._hungry, wanted, given, self._block)

    def charge(self, served: Iterable[Served]) -> None:
        prompt: Counter[tuple[ServiceClass, str]] = Counter()
        generated: Counter[tuple[ServiceClass, str]] = Counter()
        for seq, prompt_tokens, generated_tokens in served:
            key = seq.request.slo, seq.request.tenant
            prompt[key] += prompt_tokens
            generated[key] += generated_tokens
        for key in prompt:
            service_class, tenant = key
            if tenant in self._shares[service_class].weights:
                share = fairness.charge(self._shares[service_class], tenant, prompt[key], generated[key])
                self._shares[service_class] = share

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        load = load_of(plan.work)
        if load.prefill_tokens or plan.step % MEASURE_EVERY == 0:
            self.step_time = observe(self.step_time, load, seconds)

    def standing(self, seq: Sequence) -> tuple[bool, int]:
        """How far a sequence stands above others, whoever they belong to: the beginning of its `victim_key`."""
        return not seq.promoted, seq.request.slo.rank

    def victim_key(self, seq: Sequence) -> tuple[bool, int, int, int]:
        """Who leaves when something runs out: the one with the greatest key."""
        request = seq.request
        share = self._shares[request.slo]
        lead = fairness.lead(share, request.tenant) if request.tenant in share.weights else 0
        return slo.victim_key(seq.promoted, request.slo, lead, seq.order)


def load_of(work: Iterable[Work]) -> StepLoad:
    decode_rows = prefill_tokens = context = 0
    for w in work:
        if w.count == 1:
            decode_rows += 1
            context += w.start + 1
        else:
            prefill_tokens += w.count
            context += chunk_context(w.start, w.count)
    return StepLoad(decode_rows, prefill_tokens, context)
