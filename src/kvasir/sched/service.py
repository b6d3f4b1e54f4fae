"""Service: the order of service, and how many prefill tokens a step may take. Holds the state of the policies.

The policies themselves are pure (slo, fairness, budget). Their state is here: what each tenant was served, how long
steps take, and for how many steps prefills have been starved.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvasir.plan import StepPlan, unpack_ids
from kvasir.sched import fairness, slo
from kvasir.sched.budget import (
    BudgetFacts,
    StepLoad,
    StepTime,
    chunk_context,
    count_starved,
    observe,
    prefill_seconds,
    prefill_share,
    read_budget,
    step_budget,
)
from kvasir.sched.fairness import Fairness
from kvasir.sched.ranking import Ranking
from kvasir.sched.request_table import RequestTable
from kvasir.sched.sequence import Sequence, Status
from kvasir.types import ServiceClass, Target

TARGETS = {
    ServiceClass.INTERACTIVE: Target(2.0, 0.1),
    ServiceClass.BATCH: Target(30.0, 0.5),
    ServiceClass.BACKGROUND: Target(600.0, 5.0),
}
MEASURE_EVERY = 8  # decode-only steps are measured only if their number is a multiple of this: they are all alike


class Drawn:
    """A lazy list of sequences: can be iterated repeatedly, and draws from its source only as far as it is read."""

    def __init__(self, source: Iterable[Sequence]):
        self._source, self._drawn = iter(source), list[Sequence]()

    def __iter__(self) -> Iterator[Sequence]:
        for i in itertools.count():
            if i == len(self._drawn):
                more = next(self._source, None)
                if more is None:
                    return
                self._drawn.append(more)
            yield self._drawn[i]


class Served(NamedTuple):
    """Tokens that a step computed for a class and tenant (`share`)."""

    share: tuple[ServiceClass, str]
    prompt_tokens: int
    generated_tokens: int


class Decoding(NamedTuple):
    """The decodes of a step. context: sum of the known tokens of their sequences. classes: of their requests."""

    rows: int
    context: int
    classes: frozenset[ServiceClass]


class Service:
    """targets: of each class. whole: tokens that a step can hold. block: tokens in a KV block. chunk: most tokens of
    one sequence in a step."""

    def __init__(self, targets: Mapping[ServiceClass, Target], whole: int, block: int, chunk: int):
        self.targets = targets
        self.step_time = StepTime()
        self._whole, self._block, self._chunk = whole, block, chunk
        self.shares = {c: Fairness() for c in ServiceClass}  # what the tenants of each class were served
        self._leads: dict[tuple[ServiceClass, str], int] = {}  # cache of `fairness.lead`
        self._promoted: Sequence | None = None  # the last promoted sequence
        self._starved_steps = 0
        self._ranking = Ranking(self.facts, lambda model, tokens: prefill_seconds(model, 0, tokens, chunk))

    def present(self, weights: Mapping[ServiceClass, Mapping[str, float]]) -> None:
        """Sets the tenants that have requests, per class, with their weights. Call it before tenants are ordered or
        charged."""
        for service_class, found in weights.items():
            self.shares[service_class] = fairness.present(self.shares[service_class], found)
        self._leads.clear()

    def order(self, running: list[Sequence], table: RequestTable | None, now: float) -> Iterable[Sequence]:
        """The sequences that want prefill, in the order of service: `running`, and with a `table` all waiting ones.
        Valid until the next call with a table."""
        facts = [self.facts(seq, now) for seq in running]
        if table:
            self._ranking.update(table.moved, facts, self.step_time, now)
            table.moved.clear()
        candidates = [*running, *(self._ranking.oldest() if table else ())]
        self._promote(candidates, now)
        facts = [self.facts(seq, now) for seq in running]
        if table:
            return self._ranking.order(list(zip(facts, running, strict=True)), self.shares)
        return [running[i] for i in slo.service_order(facts, self.shares)]

    def _promote(self, candidates: list[Sequence], now: float) -> None:
        taken = self._promoted is not None and self._promoted.status is not Status.FINISHED
        chosen = slo.promote([self.facts(seq, now) for seq in candidates], taken)
        if chosen is not None:
            self._promoted = candidates[chosen]
            self._promoted.promoted = True
            self._ranking.again(self._promoted, now)

    def demote(self, seq: Sequence) -> None:
        """Ends the promotion of a sequence that is paused; another may be promoted."""
        seq.promoted = False
        if self._promoted is seq:
            self._promoted = None

    def facts(self, seq: Sequence, now: float) -> slo.ServiceFacts:
        """The inputs of the policies at the time `now`."""
        request, start = seq.request, seq.counts.computed or seq.expected
        prefill = seq.counts.known - start
        return slo.ServiceFacts(
            seq.order,
            request.slo,
            self.targets[request.slo],
            now - seq.counts.since,
            prefill,
            prefill_seconds(self.step_time, start, prefill, self._chunk),
            request.tenant,
            request.priority,
            started=seq.counts.known > seq.prompt_len,
            running=seq.status is Status.RUNNING,
            promoted=seq.promoted,
            prefix=seq.content.prefix_key,
            prefill_only=seq.embeds,
        )

    def wanted(self, candidates: Iterable[Sequence]) -> int:
        """Tokens that the candidates have to compute, at most a block: more makes no difference to `record_prefill`."""
        total = 0
        for seq in candidates:
            total += seq.counts.known - (seq.counts.computed or seq.expected)
            if total >= self._block:
                return self._block
        return total

    def allowance(self, decodes: Decoding, wanting: Iterable[Sequence]) -> int:
        """Prompt tokens that a step with these decodes may compute. wanting: in the order of service."""
        return step_budget(
            BudgetFacts(
                model=self.step_time,
                whole=self._whole,
                block=self._block,
                decode_rows=decodes.rows,
                decode_context=decodes.context,
                tpot=min((self.targets[c].tpot for c in decodes.classes), default=0.0),
                prefills=self._prefills(wanting) if decodes.rows else (),
                starved_steps=self._starved_steps,
            )
        )

    def readable(self, decodes: Decoding) -> int:
        """Prompt positions whose log-probabilities a step with these decodes may read."""
        return read_budget(self.step_time, decodes.rows, decodes.context)

    def _prefills(self, wanting: Iterable[Sequence]) -> tuple[tuple[int, int], ...]:
        """(computed tokens, tokens to compute) of the first sequences, as many as a step can hold."""
        found, room = [], self._whole
        for seq in wanting:
            start = seq.counts.computed or seq.expected
            found.append((start, seq.counts.known - start))
            room -= seq.counts.known - start
            if room <= 0:
                break
        return tuple(found)

    def prefill_seconds(self, start: int, tokens: int) -> float:
        """Seconds to compute `tokens` tokens after the first `start` of a sequence; 0 before any step was measured."""
        return prefill_seconds(self.step_time, start, tokens, self._chunk)

    def share(self) -> int:
        """Tokens of the next step that decodes must leave to prefills, if any prefill wants them."""
        return prefill_share(self._starved_steps, self._block, self._whole)

    def record_prefill(self, wanted: int, given: int) -> None:
        """Records how many tokens of a step prefills wanted and were given."""
        self._starved_steps = count_starved(self._starved_steps, wanted, given, min(self._block, self._whole))

    def charge(self, served: Iterable[Served]) -> None:
        """Charges tenants for the tokens that a step computed for them."""
        prompt: Counter[tuple[ServiceClass, str]] = Counter()
        generated: Counter[tuple[ServiceClass, str]] = Counter()
        for key, prompt_tokens, generated_tokens in served:
            prompt[key] += prompt_tokens
            generated[key] += generated_tokens
        for service_class in {c for c, _ in prompt}:
            share = self.shares[service_class]
            tokens = {
                t: (n, generated[c, t]) for (c, t), n in prompt.items() if c is service_class and t in share.weights
            }
            self.shares[service_class] = fairness.charge(share, tokens)
        self._leads.clear()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Records that the plan's step took `seconds`."""
        load = load_of(plan)
        if load.prefill_tokens or plan.step % MEASURE_EVERY == 0:
            self.step_time = observe(self.step_time, load, seconds)

    def stands_higher(
        self,
        waiting: Mapping[ServiceClass, int],
        running: Mapping[ServiceClass, int],
        unready: Collection[Sequence] = (),
    ) -> bool:
        """Whether the highest class that waits, of any tenant, is above the lowest class that runs. waiting, running:
        number of sequences per class. unready: waiting ones that could not use a row. A promoted sequence is above all
        classes."""
        waiting = Counter(waiting) - Counter(seq.request.slo for seq in unready) if unready else waiting
        first = min((c.rank for c, n in waiting.items() if n), default=len(ServiceClass))
        held = self._promoted if self._promoted and self._promoted.status is not Status.FINISHED else None
        if held and held.status is Status.RUNNING:
            running = {**running, held.request.slo: running[held.request.slo] - 1}
        last = max((c.rank for c, n in running.items() if n), default=-1)
        goes_first = held is not None and held.status is Status.WAITING and held not in unready
        return last >= 0 if goes_first else first < last

    def victim_key(self, seq: Sequence) -> tuple[bool, int, int, int]:
        """Sort key of preemption: the sequence with the greatest key is preempted first."""
        request = seq.request
        key = request.slo, request.tenant
        lead = self._leads.get(key)
        if lead is None:
            share = self.shares[request.slo]
            lead = self._leads[key] = fairness.lead(share, request.tenant) if request.tenant in share.weights else 0
        return slo.victim_key(seq.promoted, request.slo, lead, seq.order)


def load_of(plan: StepPlan) -> StepLoad:
    """The load of a plan's step."""
    decode_rows, prefill_tokens = len(plan.decodes), 0
    context = decode_rows + sum(unpack_ids(plan.decodes.starts))
    for w in plan.work:
        if w.count == 1 + w.drafted:
            decode_rows += w.count
            context += w.start + w.count
        else:
            prefill_tokens += w.count
            decode_rows += w.read[1] - w.read[0]
            context += chunk_context(w.start, w.count)
    return StepLoad(decode_rows, prefill_tokens, context)
