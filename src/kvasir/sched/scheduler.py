"""Scheduler: decides what every step computes. Works on integers only; no other package changes a request's state.

The life of a request: `add` makes a waiting sequence for each of its `n` choices. `plan` gives running sequences some
of their pending tokens under one budget and lets waiting ones join. `commit` takes the step's result: values become
known, sequences end, deltas are returned. `abort` ends sequences at any time. A preempted sequence gives up its row and
blocks and joins again later; its sampled ids are kept. `pause` preempts the sequences of a request and keeps them from
joining until `resume`.

A sequence that leaves its row, or has computed a chunk of its prompt, adds its blocks to the prefix tree; a sequence
that joins takes the blocks of its prefix from there. So the sequences of a request share its prompt, and resuming is an
ordinary hit. If there is a tier, evicted blocks are saved to it and loaded back where that is faster than computing
them.

Prefill, chunk, decode, resume and prefill-only requests are one case: `known` and `computed` counts that differ.
Counts advance when a step is planned and values arrive when it is committed, so step N + 1 can be planned while
step N runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from kvasir.errors import ConfigError, InvalidRequest, KvasirError, QueueFull
from kvasir.kv.manager import KVManager
from kvasir.kv.store import BlockStore
from kvasir.kv.tiers.connector import KVConnector
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.memory import QUEUE_BYTES
from kvasir.plan import Ahead, Capacity, Decodes, RowResult, StepPlan, StepResult, Work
from kvasir.sched import answer, drafts, guidance
from kvasir.sched.adapters import AdapterPool
from kvasir.sched.admission import make_sequence, refuse_impossible
from kvasir.sched.drafts import Drafter, StepTime
from kvasir.sched.encoders import Outputs
from kvasir.sched.guidance import Compiling
from kvasir.sched.guide import Guides
from kvasir.sched.lane import Members, share_of, tokens_of
from kvasir.sched.planner import Planner
from kvasir.sched.prefixes import Prefixes
from kvasir.sched.request_table import RequestTable
from kvasir.sched.sequence import Sequence, Status
from kvasir.sched.service import TARGETS, Served, Service
from kvasir.sched.step import Step, UnderWay
from kvasir.sched.tiering import Tiering
from kvasir.statistics import ClassStats
from kvasir.types import Delta, FinishReason, Request, ServiceClass, Target, Tokens


class Scheduler:
    """Owns the status and counts of all sequences, the rows, and (through KVManager) their blocks."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        eos_ids: Iterable[int] = (),
        suppressed: Iterable[int] = (),
        bidirectional: bool = False,
        max_chunk: int = 2**31,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        eviction: str = "lru",
        targets: Mapping[ServiceClass, Target] = TARGETS,
        clock: Callable[[], float] = time.monotonic,
        tier: KVConnector | None = None,
        tier_bytes: int = QUEUE_BYTES,
        guides: Guides | None = None,
        jump_ahead: bool = True,
        service: Service | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterPool | None = None,
        exchange: BlockExchange | None = None,
    ):
        """suppressed: ids that are never sampled.
        bidirectional: the model attends in both directions, so prompts are indivisible.
        max_chunk: most tokens of one sequence in a step. max_waiting: sequences that may wait before QueueFull.
        prefix_cache: whether requests share prefixes; the sequences of one request always do.
        eviction: a name of kv.policy.POLICIES. targets: of each class. clock: monotonic, in seconds.
        tier: keeps evicted blocks; at most `tier_bytes` bytes are loaded from it at a time.
        guides: for sequences that follow a grammar. jump_ahead: whether forced ids are taken unsampled.
        service: replaces the default order of service. drafter: proposes drafts. adapters: those in memory; None: no
        request may have one. exchange: with other engines; the tier contains its inbox.

        Raises ConfigError for a drafter if the runner takes no drafts."""
        if drafter and not capacity.max_drafted:
            raise ConfigError(
                "this runner does not support drafts", "leave out speculation, or choose another executor"
            )
        self.capacity = capacity
        self.clock, self.drafter = clock, drafter
        self.guides = guides
        store = BlockStore(tier, capacity.groups, capacity.block_size, tier_bytes) if tier else None
        seconds = lambda *tokens: self.service.prefill_seconds(*tokens)  # noqa: E731
        self.tiering = Tiering(store, capacity.block_size, seconds, exchange)
        self.kv = KVManager.of(capacity, eviction, self.tiering.evicted if tier else None)
        self.tiering.send_from(self.kv.tree, capacity)
        self.prefixes = Prefixes(self.kv.tree, capacity.block_size, prefix_cache)
        self.eos_ids, self._suppressed = frozenset(eos_ids), tuple((i,) for i in suppressed)
        self.bidirectional = bidirectional
        self.max_chunk = min(max_chunk, capacity.max_tokens_per_step)
        self.max_waiting = max_waiting
        usual = Service(targets, capacity.max_tokens_per_step, capacity.block_size, self.max_chunk)
        self.service = service or usual
        self.table, self.outputs = RequestTable(capacity.max_rows), Outputs(capacity.encoders)
        self.adapters = adapters or AdapterPool()
        parts = self.table, self.kv, self.prefixes, self.tiering, self.service
        self.planner = Planner(capacity, *parts, self.max_chunk, bidirectional, self.outputs, self.adapters, drafter)
        self.under_way: dict[int, UnderWay] = {}
        self._compiling = Compiling(guides, jump_ahead)
        self._step = 0
        self._order = 0
        self.pauses = 0  # of sequences
        self.finished = self.aborted = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.masked_rows = self.forced_tokens = self.accepted_tokens = 0
        self.accepted_at: Counter[int] = Counter()  # drafted ids that were right, by position in the draft, from 1

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request. Raises InvalidRequest if it can never be computed, QueueFull if too many sequences wait."""
        if request.id in self.table.requests:
            raise InvalidRequest(f"request id {request.id!r} is already in use", param="request_id")
        if self._suppressed:
            request = replace(request, bad_word_ids=(*request.bad_word_ids, *self._suppressed))
        refuse_impossible(request, self.capacity, self.kv, self.max_chunk, self.bidirectional)
        self.adapters.refuse_impossible(request.adapters)
        self.tiering.refuse_impossible(request)
        if not request.resume_ids and len(self.waiting) + request.params.n > self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} choices are waiting; the queue is full", "try again later")
        sequences = [self._sequence(request, i) for i in range(request.params.n) if i not in request.done]
        self._compiling.begin(request, sequences)
        now, found = self.clock(), self.prefixes.find(sequences[0])
        for seq in sequences:
            seq.arrived = now - request.waited
            seq.counts.since = now if request.resume_ids else seq.arrived
            seq.expected = found.tokens if found else 0
            self.adapters.enter(seq)
        self.table.enter(request.id, sequences)
        self.tiering.enter(sequences[0])

    def _sequence(self, request: Request, index: int) -> Sequence:
        self._order += 1
        parts = self.eos_ids, self.kv.new(), self.prefixes.private(request), self.prefixes.numbers
        return make_sequence(request, index, self._order, self.capacity.max_model_len, *parts)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one or all sequences of a request at once, without a delta. Unknown ids are ignored."""
        for seq in list(self.table.requests.get(request_id, ())):
            if index is None or seq.index == index:
                self._end(seq, FinishReason.ABORT)
                self.aborted += 1

    def pause(self, request_id: str) -> None:
        """Stops computing the request's sequences until `resume`, because its client does not read. They give up their
        rows; their blocks go to the prefix tree, from which they may be evicted. Tokens of pending steps still arrive,
        and deadlines still apply. Unknown ids are ignored."""
        for seq in list(self.table.requests.get(request_id, ())):
            if seq.status is Status.RUNNING:
                self.preempt(seq)
            if seq.status is Status.WAITING:
                self.tiering.end(seq)
                seq.shares_with = None
                self.service.demote(seq)
                self.table.pause(seq)
                self.adapters.leave(seq)
                self.pauses += 1

    def resume(self, request_id: str) -> None:
        """Lets the paused sequences of the request wait to join again, as if their last token had just arrived."""
        now = self.clock()
        for seq in self.table.requests.get(request_id, ()):
            if seq.status is Status.PAUSED:
                self.table.resume(seq)
                self.adapters.enter(seq)
                seq.counts.since = now

    def expires(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        return self.table.expires(self.clock())

    def expire(self) -> list[Delta]:
        """Ends the sequences whose deadline has passed; returns their last deltas."""
        expired = self.table.expired(self.clock())
        for seq in expired:
            self._end(seq, FinishReason.TIMEOUT)
        return [Delta(seq.request.id, seq.index, finish_reason=FinishReason.TIMEOUT) for seq in expired]

    def enter_grammars(self) -> list[Delta]:
        """Gives guides to waiting sequences whose grammar is compiled. Ends those whose grammar cannot be followed, and
        returns their last deltas."""
        ended = []
        for seq in self._compiling.ready():
            try:
                self.forced_tokens += self._compiling.enter(seq)
            except KvasirError as error:
                ended.append(self._fail(seq, error))
        return ended

    def take_adapters(self) -> list[Delta]:
        """Takes adapters that have been loaded. Ends the sequences whose adapters cannot be used, and returns their
        last deltas."""
        return [self._fail(seq, error) for seq, error in (self.adapters.begin_turn() if self._adapting else ())]

    @property
    def _adapting(self) -> bool:
        """Whether there are adapters in memory, or wanted there."""
        return bool(self.adapters.entries or self.adapters.changes)

    def masks(self, plan: StepPlan) -> dict[int, bytes]:
        """The masks of a step's guided rows, by row. All earlier steps must be committed."""
        vocab, guided = self.capacity.vocab_size, self._guided(plan)
        masks = {work.row: mask for seq, work in guided if (mask := guidance.mask(seq, work, vocab)) is not None}
        self.masked_rows += len(masks)
        return masks

    def ahead(self, plan: StepPlan) -> Ahead | None:
        """The masks of the ids that the step's guided rows guess; None if there are none. As for `masks`."""
        guided = {work.row: seq for seq, work in self._guided(plan) if work.propose}
        return guidance.MasksAhead(guided) if guided else None

    def _guided(self, plan: StepPlan) -> Iterator[tuple[Sequence, Work]]:
        """The sequences that follow a grammar and sample in a step, each with its work."""
        for (seq, _), work in zip(self.under_way[plan.step].sequences, plan.work, strict=True):
            if seq.guidance.guide and work.sample and seq.status is not Status.FINISHED:
                yield seq, work

    def preempt(self, seq: Sequence) -> None:
        """Takes the row and the blocks of a running sequence; it waits to join again."""
        self.planner.preempt(seq)

    # -- planning ----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a sequence waits or runs, a row is to be freed, or an adapter or blocks are to move."""
        busy = self.waiting or self.running or self.table.left or self.tiering.sending
        return bool(busy or (self._adapting and self.adapters.due))

    def plan(self) -> StepPlan | None:
        """Plans the next step; None if there is nothing to compute or export, no row to free, no adapter to install."""
        self.kv.tree.expire(self.clock())
        self.tiering.poll(self.clock())
        step = self.planner.plan(self.clock())
        if self._adapting:
            self.adapters.prefetch()
        due = step.computes or self.table.left or self.adapters.changes or self.tiering.has_saves()
        return self._complete(step) if due else None

    def _complete(self, step: Step) -> StepPlan:
        saves, adapters = self.tiering.saves(self._step), self.adapters.take_changes() if self.adapters.changes else ()
        step.work = self.tiering.grow(self._step, step.sequences, step.work)
        plan = step.plan(self._step, self.table.take_left(), saves, adapters)
        self.under_way[self._step] = UnderWay(tuple((s, s.preemptions) for s in step.sequences), step.members)
        self._step += 1
        return plan

    def linger(self, seconds: float) -> None:
        """Call it when there was nothing to plan: waits at most `seconds` for a grammar, an adapter or blocks."""
        if not self._compiling.wait(seconds) and not self.adapters.wait(seconds):
            self.tiering.poll(self.clock(), seconds)

    def last_plans(self) -> Iterator[StepPlan]:
        """Steps that compute nothing and save blocks of the prefix tree to the tier, most recently used first. Run and
        commit them one by one, with no other step pending and none afterwards."""
        if self.store:
            self.store.tier.ending()
        for block, index, ids in list(self.kv.tree.named()) if self.store else ():
            self.tiering.evicted(block, index, ids)
            if self.tiering.has_saves():
                yield self._complete(Step(0, self.max_chunk, self.bidirectional, self.clock(), self.outputs))

    # -- results -----------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, time: StepTime) -> None:
        """Records how long the plan's step took."""
        self.service.observe(plan, time.seconds)
        if self.drafter:
            drafts.observe(self.drafter, plan, time)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta | Tokens]:
        """Takes the result of a planned step; returns what it adds to each sequence, either in a Delta or in Tokens."""
        sequences, members = self.under_way.pop(plan.step)
        self.tiering.saved(plan, result)
        served: list[Served] = []
        now = self.clock()
        added = self._commit_decodes(members, plan, result, served, now) if members else []
        for (seq, epoch), work, row in zip(sequences, plan.work, result.rows, strict=True):
            added += self._commit_row(seq, work, row, seq.preemptions == epoch, served, now)
        self.service.charge(served)
        return added

    def _commit_decodes(
        self, members: Members, plan: StepPlan, result: StepResult, served: list[Served], now: float
    ) -> list[Delta | Tokens]:
        """Commits the members still in the lane together, the others one by one."""
        lane, tokens = self.table.lane, tokens_of(result.decoded)
        odd = lane.odd(members, tokens)
        plain = members if not odd else members.without(odd)
        kept = np.delete(tokens, odd) if odd else tokens
        lane.take(plain.rows, now)
        for append, token in zip(plain.appends, kept.tolist(), strict=True):
            append(token)
        self.generated_tokens += len(kept)
        served += [Served(share, 0, count) for share, count in plain.shares.items()]
        added: list[Delta | Tokens] = [Tokens(plain.ids, plain.indexes, kept.tobytes(), now)] if len(kept) else []
        failed, starts = {row.row: row for row in result.failed}, tokens_of(plan.decodes.starts)
        for place in odd:
            seq, row = members.sequences[place], int(members.rows[place])
            work = Work(row, int(starts[place]), 1, sample=True)
            found = failed[row] if row in failed else RowResult(row, (int(tokens[place]),))
            added += self._commit_row(seq, work, found, seq.row == row, served, now)
        return added

    def _commit_row(
        self, seq: Sequence, work: Work, row: RowResult, current: bool, served: list[Served], now: float
    ) -> list[Delta]:
        """current: the sequence has kept its row and blocks since the step was planned."""
        self.table.lane.leave(seq)
        seq.counts.in_flight -= work.sample
        kept = drafts.settle(seq, work, row.accepted, current) if work.drafted else work.count
        end = work.start + kept
        prompt_tokens = max(0, min(work.start + work.count, seq.prompt_len) - work.start)
        served.append(Served(share_of(seq), prompt_tokens, len(row.tokens)))
        if row.tokens:
            seq.counts.since = now
        if seq.status is Status.FINISHED:
            return []
        if row.error:
            return [self._fail(seq, seq.guidance.astray or row.error)]
        if row.accepted:
            self.masked_rows += row.accepted * work.masked
            self.accepted_tokens += row.accepted
            self.accepted_at.update(range(1, row.accepted + 1))
        if self.drafter and work.sample:
            self.drafter.settle(seq, work.drafted, row.accepted)
        delta = self._take(seq, work, row, end, current)
        if delta is None:
            return []
        if self.drafter and row.proposed and not delta.finish_reason:
            self.drafter.proposed(seq, row.proposed, work.end - work.drafted + len(row.tokens))
        self.table.lane.offer(seq)
        return [delta]

    def _take(self, seq: Sequence, work: Work, row: RowResult, end: int, current: bool) -> Delta | None:
        """Applies the result of a row that did not fail. end: number of computed tokens. Returns None if there is
        nothing to emit."""
        self.prompt_tokens += max(0, min(end, seq.prompt_len) - work.start)
        if seq.suspect and end >= seq.suspect:
            seq.suspect = 0
        if row.read:
            answer.take_read(seq, work, row)
        if current:
            before, seq.counts.stored = seq.counts.stored, end
            if work.start < seq.prompt_len:
                self.prefixes.remember(seq, self.clock())
            elif before < seq.prompt_len:
                self.prefixes.stop(seq)
            seq.blocks.trim(end)
        if row.pooled:
            delta = answer.take_pooled(seq, row.pooled)
        elif row.tokens:
            known = seq.counts.known
            try:
                delta = answer.take_tokens(seq, row, work.drafted)
            except KvasirError as error:
                return self._fail(seq, error)
            # Fewer tokens remain if an accepted id ends the sequence.
            seq.counts.stored = min(seq.counts.stored, len(seq.tokens))
            self.generated_tokens += len(delta.token_ids)
            self.forced_tokens += seq.counts.known - known
        else:
            return None
        if delta.finish_reason:
            self._end(seq, delta.finish_reason)
        return delta

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """Handles a step that raised: its only sequence ends with an error; several are computed one by one from now
        on."""
        pairs = self.under_way.pop(plan.step).pairs(plan)
        self.tiering.forget(plan.step)
        self.outputs.forget(plan)
        for seq, work in pairs:
            self._take_back(seq, work)
            guidance.take_back(seq)
            seq.emission.reread(len(seq.tokens))
        sequences = [seq for seq, _ in pairs]
        alive = [s for s in sequences if s.status is not Status.FINISHED]
        if len(sequences) == 1:
            failed = [self._fail(seq, message) for seq in alive]
        else:
            failed = []
            self.planner.suspect(alive)
            for seq in alive:
                if seq.status is Status.RUNNING:
                    self.preempt(seq)
        self.adapters.lost(plan.adapters)
        return failed

    def retract(self, plan: StepPlan) -> StepPlan:
        """Takes back a planned step that builds on a failed one: its sequences are preempted. Returns what is left of
        the plan: the joins and the freed rows, which the runner must still apply."""
        for seq, work in self.under_way[plan.step].pairs(plan):
            self._take_back(seq, work)
            seq.emission.reread(len(seq.tokens))
            if seq.status is Status.RUNNING:
                self.preempt(seq)
        self.under_way[plan.step] = UnderWay()
        self.tiering.forget(plan.step)
        self.outputs.forget(plan)
        return replace(plan, work=(), decodes=Decodes(), copies=(), saves=(), loads=(), encodes=(), dropped=())

    def _take_back(self, seq: Sequence, work: Work) -> None:
        """Takes back the counts of a step that was not completed: nothing was sampled."""
        self.table.lane.leave(seq)
        seq.counts.in_flight -= work.sample
        seq.counts.known -= work.sample
        seq.counts.drafted = 0

    def _fail(self, seq: Sequence, why: KvasirError | str) -> Delta:
        self._end(seq, FinishReason.ERROR)
        refused = isinstance(why, InvalidRequest)
        return Delta(seq.request.id, seq.index, finish_reason=FinishReason.ERROR, error=str(why), refused=refused)

    # -- leaving -----------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self.tiering.end(seq)
        last = self.table.end(seq)
        seq.finish = reason
        self.prefixes.leave(seq, keeps=reason is not FinishReason.ERROR)
        self.outputs.leave(seq)
        self.adapters.leave(seq)
        if self.drafter:
            self.drafter.leave(seq)
        self.finished += 1
        if last:
            self.prefixes.drop(seq)

    # -- inspection --------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Sequence]:
        return self.table.waiting

    @property
    def running(self) -> list[Sequence]:
        return self.table.running

    @property
    def preemptions(self) -> int:
        return self.planner.preemptions

    @property
    def cached_tokens(self) -> int:
        return self.planner.cached_tokens

    @property
    def drafted_tokens(self) -> int:
        return self.planner.drafted_tokens

    @property
    def draft_seconds_saved(self) -> float:
        return self.drafter.saved if self.drafter else 0.0

    @property
    def loaded_tokens(self) -> int:
        return self.planner.loaded_tokens

    @property
    def store(self) -> BlockStore | None:
        return self.tiering.store

    def class_stats(self) -> dict[ServiceClass, ClassStats]:
        """Statistics of each service class."""
        runs, waits = self.table.runs, self.table.waits
        return {
            c: ClassStats(runs[c], waits[c], self.planner.displaced[c], self.planner.queue_seconds[c].copy())
            for c in ServiceClass
        }

    def check(self) -> None:
        """Raises AssertionError unless rows, blocks and counts are consistent."""
        self.table.check()
        living = self.table.all()
        self.kv.check(s.blocks for s in living)
        self.prefixes.check(self.running)
        self.tiering.check(self.waiting, self.running)
        self.outputs.check(self.running)
        self.adapters.check(self.waiting, self.running)
        if not living:
            lost = self.kv.used - self.kv.tree.stats().pinned
            assert lost == 0, f"{lost} blocks have no owner"
