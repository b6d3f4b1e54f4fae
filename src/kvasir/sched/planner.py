"""Planner: which sequences the next step computes, which waiting sequences join, and which running ones are preempted.

Decodes are planned first. The rest of the step goes to prefills, in the order of service: those of running sequences
and of waiting ones that can join. See policy for the gates, service for the order and the allowance. If the budget is
smaller than the number of decodes, they take turns, and every few steps prefills come before them (`Service.share`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from math import inf

from kvasir.kv.manager import KVManager
from kvasir.kv.radix import Hit
from kvasir.metrics import Histogram
from kvasir.plan import Capacity
from kvasir.sched import drafts, policy
from kvasir.sched.adapters import AdapterPool
from kvasir.sched.drafts import Asked, Drafter
from kvasir.sched.encoders import Outputs
from kvasir.sched.prefixes import Prefixes
from kvasir.sched.request_table import RequestTable
from kvasir.sched.sequence import Sequence, Status
from kvasir.sched.service import Drawn, Service
from kvasir.sched.step import Step
from kvasir.sched.tiering import Tiering
from kvasir.types import ServiceClass


class Planner:
    """Assigns and takes back rows, blocks and prefixes, which other objects own. Owns the list of sequences suspected
    of having broken a step, and its counters."""

    def __init__(
        self,
        capacity: Capacity,
        table: RequestTable,
        kv: KVManager,
        prefixes: Prefixes,
        tiering: Tiering,
        service: Service,
        max_chunk: int,
        indivisible: bool,
        outputs: Outputs,
        adapters: AdapterPool,
        drafter: Drafter | None = None,
    ):
        """max_chunk: most tokens of one sequence in a step. indivisible: whether a prompt is computed in a single step.
        outputs: those of the encoders. adapters: those in memory. drafter: proposes drafts."""
        self._capacity = capacity
        self._table, self._kv, self._prefixes, self._tiering = table, kv, prefixes, tiering
        self._service = service
        self._max_chunk, self._indivisible = max_chunk, indivisible
        self._outputs, self._adapters, self._drafter = outputs, adapters, drafter
        self._suspects: list[Sequence] = []
        self._drafting = False  # whether the step being planned may have drafts
        self._turn = 0  # number of the step being planned
        self._missed = 0  # tokens of an indivisible span that did not fit into the previous step
        self.preemptions = 0
        self.cached_tokens = self.looked_up_tokens = self.loaded_tokens = self.drafted_tokens = 0
        self.drafted_at: Counter[int] = Counter()  # by position in the draft, from 1
        self.displaced: Counter[ServiceClass] = Counter()
        self.queue_seconds = {service_class: Histogram() for service_class in ServiceClass}

    def plan(self, now: float) -> Step:
        """The next step, which may be empty."""
        step = Step(self._capacity.max_tokens_per_step, self._max_chunk, self._indivisible, now, self._outputs)
        self._turn += 1
        self._suspects = [s for s in self._suspects if s.suspect and s.status is not Status.FINISHED]
        suspects = [s for s in self._suspects if s.status is not Status.PAUSED]
        if suspects:
            self._alone(min(suspects, key=_order), step)
        else:
            self._service.present(self._table.weights)
            self.displace()
            kept = max(self._service.share(), self._missed) if self._wants_prefill() else 0
            self._decodes(step, kept)
            self._prefills(step)
            if kept:
                self._decodes(step)  # with what prefills left of their share
            self._missed = step.missed
        return step

    def suspect(self, sequences: list[Sequence]) -> None:
        """Marks sequences as suspects: each is computed alone until it has passed the position at which a step
        failed."""
        self._suspects += sequences
        for seq in sequences:
            seq.suspect = max(seq.suspect, seq.counts.computed, 1)

    def preempt(self, seq: Sequence) -> None:
        """Takes the row and the blocks of a running sequence; it waits to join again."""
        self._table.wait(seq)
        self._prefixes.leave(seq, keeps=True)
        self._outputs.leave(seq)
        self._adapters.stop(seq)
        seq.preemptions += 1
        self.preemptions += 1

    def displace(self) -> None:
        """If all rows are taken and a sequence of a higher class waits, preempts one of a lower class."""
        if self._table.free_rows or not self._table.waiting:
            return
        unready = self._adapters.loading() if self._adapters.entries else ()
        if self._service.stands_higher(self._table.waits, self._table.runs, unready):
            last = max(self._table.running, key=self._service.victim_key)
            self.preempt(last)
            self.displaced[last.request.slo] += 1

    def _wants_prefill(self) -> bool:
        """Whether this step could compute anything other than decodes."""
        joins = bool(self._table.waiting and self._table.free_rows)
        return joins or any(s.pending > 1 for s in self._table.outside())

    def _decodes(self, step: Step, kept: int = 0) -> None:
        """Plans one token for each decoding sequence. kept: tokens of the budget to leave for prefills."""
        decodes = self._wanting_one(step, step.budget - kept)
        room = step.budget - kept
        if self._drafting and self._wait(decodes):
            return
        proposed = self._propose(decodes, room - len(decodes))
        for i, seq in enumerate(sorted(decodes, key=self._turn_key) if len(decodes) > room else decodes):
            if seq.content.sources and not step.chunk(seq, seq.counts.computed):
                continue
            if (
                step.budget > kept
                and seq.status is Status.RUNNING
                and self._make_room(seq, seq.counts.computed + 1, step)
            ):
                most = step.budget - kept - (len(decodes) - i)
                draft = proposed.get(id(seq), array("i"))[: max(0, most)]
                self._compute(seq, 1, step, draft=self._fitting(seq, 1, draft))

    def _wait(self, decodes: list[Sequence]) -> bool:
        """Whether decoding sequences wait for the pending step: all or none, or they would be computed in turns, each
        time with all weights."""
        if any(s.counts.drafted for s in self._table.running):
            return True
        sampled = [s for s in decodes if s.counts.in_flight]
        return bool(sampled) and self._drafter is not None and self._drafter.waits(sampled)

    def _wanting_one(self, step: Step, room: int) -> list[Sequence]:
        """Decoding sequences outside the lane that are not yet part of the step. Plans the lane if it has enough
        sequences and the step has tokens and blocks for all of them. Otherwise dissolves it, so that order and
        preemption are decided sequence by sequence. room: tokens."""
        lane = self._table.lane
        if step.members:
            return self._outside(step)
        lane.part()
        found = self._outside(step)
        enough = lane.least <= len(lane) + len(found) <= room
        # None decodes where the only sequence has forced ids to compute, or its prompt.
        if self._drafter:
            predicted = lane.members.predicted or any(s.request.prediction for s in found)
            self._drafting = self._drafter.pays(max(1, len(lane) + len(found)), predicted)
        lane.open = enough and not self._drafting and self._has_blocks(len(found))
        if lane and lane.open:
            step.decode(lane.members, lane.advance(self._kv, self._turn))
        elif lane:
            lane.dissolve()
            return self._outside(step)
        return found

    def _has_blocks(self, outside: int) -> bool:
        """Whether there are blocks for all sequences of the lane that need one, and for `outside` others."""
        return self._table.lane.short + outside <= min(pool.available for pool in self._kv.pools)

    def _outside(self, step: Step) -> list[Sequence]:
        return [s for s in self._table.outside() if s.pending == 1 and id(s) not in step.planned]

    def _propose(self, sequences: list[Sequence], budget: int) -> dict[int, array[int]]:
        """Ids drafted to follow the sequences' last tokens, by the identity of the sequence. budget: tokens that the
        step has for drafts."""
        if self._drafter is None or not self._drafting or budget <= 0:
            return {}
        most = self._capacity.max_drafted
        rooms = [Asked(seq, drafts.room(seq, budget + seq.pending, most)) for seq in sequences]
        asked = [found for found in rooms if found.most]
        found = drafts.propose(self._drafter, asked, budget, self._capacity.vocab_size)
        return {id(seq): draft for (seq, _), draft in zip(asked, found, strict=True)}

    def _after_forced(self, seq: Sequence, count: int, step: Step) -> array[int]:
        """The draft of a sequence whose grammar has forced ids, which are computed like those of a prompt. None if
        their log-probabilities are read."""
        if not seq.guidance.guide or count != seq.pending or seq.counts.known <= seq.prompt_len or seq.to_read:
            return array("i")
        return self._fitting(seq, count, self._propose([seq], step.budget - count).get(id(seq), array("i")))

    def _fitting(self, seq: Sequence, count: int, draft: array[int]) -> array[int]:
        """What of a draft after the next `count` tokens there are blocks for: drafts never preempt other sequences."""
        while draft and not self._kv.grows(seq.blocks, seq.counts.computed + count + len(draft)):
            draft.pop()
        self.drafted_tokens += len(draft)
        self.drafted_at.update(range(1, len(draft) + 1))
        return draft

    def _turn_key(self, seq: Sequence) -> tuple:
        """Sorts the least recently computed sequence first."""
        return seq.counts.turn, self._service.victim_key(seq)

    def _prefills(self, step: Step) -> None:
        """Plans chunks of prompts, and of preempted sequences that are computed again, within the step's allowance."""
        running = [s for s in self._table.outside() if s.pending > 1]
        joins = bool(self._table.free_rows and self._table.waiting)
        if not running and not joins:
            return
        decodes, budget = step.decoding(self._table.lane), step.budget
        wanting = Drawn(self._service.order(running, self._table if joins else None, step.now))
        step.prefill, step.reads = self._service.allowance(decodes, wanting), self._service.readable(decodes)
        wanted = self._service.wanted(wanting)
        admitting, left = joins, set(map(id, running))
        for seq in wanting:
            left.discard(id(seq))
            if seq.status is Status.WAITING:
                admitting = admitting and self._admit(seq, step)
            elif id(seq) not in step.planned:
                count = step.chunk(seq, seq.counts.computed)
                if count and self._make_room(seq, seq.counts.computed + count, step):
                    alone = not joins and len(running) == 1  # else a draft might take tokens from others
                    self._compute(seq, count, step, draft=self._after_forced(seq, count, step) if alone else ())
            if not left and not admitting:
                break
        self._service.record_prefill(wanted, budget - step.budget)

    def _admit(self, seq: Sequence, step: Step) -> bool:
        """Lets a waiting sequence join if it can. False if no later one may join, because this one would starve."""
        own = policy.OwnFacts(
            values_known=seq.counts.in_flight == 0,
            compiling=seq.guidance.compiling is not None,
            loading=seq.fetch is not None and seq.fetch.open,
        )
        if not all(gate(own) for gate in policy.OWN_GATES) or self._prefixes.waits_for_shared(seq):
            return True
        if not self._adapters.ready(seq):
            return True
        hit = self._prefixes.find(seq)
        loaded = self._tiering.arrived(seq, hit)
        if hit and loaded:
            hit = hit.whole(self._capacity.block_size)
        found = loaded or (hit.tokens if hit else 0)
        if not step.room(seq, found):  # other sequences use up the positions that this step may read
            return True
        if self._prefixes.wait_for_shared_prefix(seq, found) or self._tiering.coming(seq, found):
            return True
        if self._tiering.begin(seq, hit, step.now):
            return True
        facts = self._facts(seq, hit, found, step)
        if not facts.blocks_fit and not self._table.running:  # alone it fits once all pins have ended
            self._kv.tree.expire(inf)
            hit, loaded, facts = None, 0, self._facts(seq, None, 0, step)
        if not all(gate(facts) for gate in policy.SHARED_GATES):
            return False
        self._join(seq, hit, loaded, step)
        self._compute(seq, facts.first_chunk, step, joined=True)
        return True

    def _facts(self, seq: Sequence, hit: Hit | None, found: int, step: Step) -> policy.AdmitFacts:
        pending, chunk = seq.counts.known - found, step.chunk(seq, found)
        makes = (
            not self._indivisible
            or self._outputs.reach(seq, found, seq.counts.known, step.encodable) == seq.counts.known
        )
        return policy.AdmitFacts(
            free_rows=len(self._table.free_rows),
            budget=step.budget if pending == 1 else min(step.budget, step.prefill),
            first_chunk=chunk if chunk or not self._indivisible else pending,
            indivisible=self._indivisible,
            blocks_fit=self._kv.fits(hit, min(seq.counts.known + 1, seq.max_known), self._max_chunk),
            outputs_fit=makes and self._outputs.fits(seq, found),
        )

    def _alone(self, seq: Sequence, step: Step) -> None:
        """Plans a step for a single sequence that is suspected of having broken an earlier step."""
        if seq.counts.in_flight:
            return
        others = [s for s in self._table.running if s is not seq]
        for other in others:
            self.preempt(other)
        joined = seq.status is Status.WAITING
        if joined:
            if not self._adapters.ready(seq):
                return
            self._kv.tree.expire(inf)  # alone it fits once all pins have ended
            self._join(seq, None, 0, step)
        count = step.chunk(seq, seq.counts.computed)
        if self._make_room(seq, seq.counts.computed + count, step):
            self._compute(seq, count, step, joined)

    def _join(self, seq: Sequence, hit: Hit | None, loaded: int, step: Step) -> None:
        self._table.join(seq)
        self._prefixes.begin(seq)
        copies, loads = [], []
        if hit is not None:
            copies = self._kv.adopt(seq.blocks, hit)
            seq.counts.computed = hit.tokens  # stored only after a step has run: until then a copy may be pending
        if loaded:
            loads = self._tiering.loads(seq, self._kv.receive(seq.blocks, loaded))
            self.loaded_tokens += loaded - seq.counts.computed
            seq.counts.computed = loaded
        self._tiering.end(seq)
        self._outputs.join(seq)
        seq.content.adapted = self._adapters.join(seq)
        if not seq.preemptions:
            # Tokens shared with sequences of the same request do not count as a hit: no earlier request computed them.
            first = seq is self._table.requests[seq.request.id][0]
            found = seq.counts.computed if first else min(seq.counts.computed, seq.expected)
            seq.cached = min(found, seq.prompt_len)  # forced and resumed ids are not part of the prompt
            self.looked_up_tokens += seq.counts.known
            self.cached_tokens += found
            self.queue_seconds[seq.request.slo].add(step.now - seq.arrived)
        step.join(seq, copies, loads)

    def _compute(self, seq: Sequence, count: int, step: Step, joined: bool = False, draft: Seq[int] = ()) -> None:
        seq.counts.turn = self._turn
        end = seq.counts.computed + count + len(draft)
        asked = self._asked(seq, count, len(draft), end) if self._capacity.proposes else 0
        added = self._kv.extend(seq.blocks, end + asked)
        step.compute(seq, count, seq.blocks.whole() if joined else added, draft, asked)

    def _asked(self, seq: Sequence, count: int, drafted: int, end: int) -> int:
        """How many ids the runner is asked to propose after the step: as many as there are blocks for."""
        limits = self._capacity.max_drafted, self._capacity.proposes
        most = drafts.unplanned(seq, count, drafted, *limits) if self._drafter else 0
        asked = self._drafter.asks(seq, most) if self._drafter and most and self._drafting else 0
        while asked and not self._kv.grows(seq.blocks, end + asked):
            asked -= 1
        return asked

    def _make_room(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Preempts sequences until `seq` can grow to `num_tokens`. False if `seq` itself is preempted, or has to wait
        for a pending step to release its blocks outside the window. Sequences that are already in the step are not
        preempted."""
        while not self._kv.grows(seq.blocks, num_tokens):
            others = [s for s in self._table.outside() if id(s) not in step.planned]
            last = max(others, key=self._service.victim_key)
            if self._service.victim_key(last) < self._service.victim_key(seq):
                last = seq
            if last is seq and seq.under_way:
                return False
            if len(self._table.running) == 1 and self._kv.tree.expire(inf):  # alone it fits once all pins have ended
                continue
            self.preempt(last)
            if last is seq:
                return False
        return True


def _order(seq: Sequence) -> int:
    return seq.order
