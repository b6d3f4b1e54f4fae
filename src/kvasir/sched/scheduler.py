"""Scheduler: decides what every step computes. Integers only; the only place where a request changes.

The life of a request: `add` makes a waiting sequence for each of its `n` answers. `plan` gives running sequences some
of their pending tokens under one budget and lets waiting ones join. `commit` takes the step's result: values become
known, answers end, deltas go out. `abort` ends answers at any moment. A preempted sequence leaves its row and blocks
and joins again later; what it had sampled is kept.

Whoever leaves, and whoever has computed a piece of its prompt, leaves its blocks to the prefix tree; whoever joins
takes from there what it finds. So the answers of a request share its prompt, and resuming is a hit like any other.
Where there is a tier, evicted blocks go there and come back, as long as that is faster than computing them.

Prefill, chunk, decode, resume and prefill-only requests are one case: `known` and `computed` counts that differ.
Counts advance when a step is planned and values arrive when it is committed, so step N + 1 can be planned while
step N runs.
"""

from __future__ import annotations

import concurrent.futures
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf

from kvasir.errors import InvalidRequest, KvasirError, QueueFull
from kvasir.kv.manager import KVManager
from kvasir.kv.node import common
from kvasir.kv.radix import Hit
from kvasir.kv.store import Save, Store
from kvasir.kv.tiers.block import Block
from kvasir.kv.tiers.connector import KVConnector
from kvasir.kv.tiers.transfers import QUEUE_BYTES
from kvasir.metrics import Histogram
from kvasir.plan import Bytes, Capacity, Join, RowResult, StepPlan, StepResult, Work, pack_ids
from kvasir.sched import guidance, policy, slo
from kvasir.sched.admission import SHARED, make_sequence, refuse_impossible
from kvasir.sched.sequence import Sequence, Status
from kvasir.sched.service import TARGETS, Served, Service
from kvasir.types import ClassStats, Delta, FinishReason, Request, ServiceClass, Target, Task, TokenLogprob


class Scheduler:
    """Owns the status and counts of all sequences, the rows, and (through KVManager) their blocks."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        eos_ids: Iterable[int] = (),
        bidirectional: bool = False,
        max_chunk: int = 2**31,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        eviction: str = "lru",
        targets: Mapping[ServiceClass, Target] = TARGETS,
        clock: Callable[[], float] = time.monotonic,
        tier: KVConnector | None = None,
        tier_bytes: int = QUEUE_BYTES,
        guides: guidance.Guides | None = None,
        jump_ahead: bool = True,
    ):
        """bidirectional: the model attends in both directions, so prompts are indivisible.
        max_chunk: most tokens of one sequence in a step. max_waiting: sequences that may wait before QueueFull.
        prefix_cache: whether requests share what they begin with; the answers of one request always do.
        eviction: a name of kv.policy.POLICIES. targets: what each class aims at. clock: seconds, never going back.
        tier: where evicted blocks go; `tier_bytes` of it may be on their way back at a time.
        guides: for answers that follow a grammar. jump_ahead: whether what one forces is taken at once."""
        self.capacity = capacity
        self.clock = clock
        self.guides, self.jump_ahead = guides, jump_ahead
        self.prefix_cache = prefix_cache
        self.store = Store(tier, capacity.groups, capacity.block_size, tier_bytes) if tier else None
        self.kv = KVManager.of(capacity, eviction, self._evicted if tier else None)
        self.eos_ids = frozenset(eos_ids)
        self.bidirectional = bidirectional
        self.max_chunk = min(max_chunk, capacity.max_tokens_per_step)
        self.max_waiting = max_waiting
        self.service = Service(targets, capacity.max_tokens_per_step, capacity.block_size, self.max_chunk)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._free_rows = list(range(capacity.max_rows - 1, -1, -1))
        self._left: list[int] = []
        self._under_way: dict[int, tuple[tuple[Sequence, int], ...]] = {}  # with the count of preemptions then
        self._saving: dict[int, list[Save]] = {}  # by the steps that save it
        self._deadlines: list[Sequence] = []  # those that must end in time
        self._step = 0
        self._order = 0
        self._displaced: Counter[ServiceClass] = Counter()
        self._queue_seconds = {service_class: Histogram() for service_class in ServiceClass}
        self.preemptions = self.finished = self.aborted = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.cached_tokens = self.looked_up_tokens = self.loaded_tokens = 0
        self.masked_rows = self.forced_tokens = 0

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request. Raises InvalidRequest when it can never fit, QueueFull at the queue's bound."""
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is in use", param="request_id")
        refuse_impossible(request, self.capacity, self.kv, self.max_chunk, self.bidirectional)
        if not request.resume_ids and len(self.waiting) + request.params.n > self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} answers are waiting already", "try again later")
        sequences = [self._sequence(request, i) for i in range(request.params.n) if i not in request.done]
        if request.grammar:
            if self.guides is None or request.task is Task.EMBED:
                raise InvalidRequest("no grammar can be followed here", "leave it out", param="structured_outputs")
            if request.params.min_tokens:
                message = "min_tokens goes against a grammar, which says where the answer ends"
                raise InvalidRequest(message, "leave it out", param="min_tokens")
            for seq in sequences:
                seq.compiling = self.guides.begin(request.grammar)
                seq.jumps = self.jump_ahead and guidance.jumps(seq.spec)
        now, found = self.clock(), self._find(sequences[0])
        for seq in sequences:
            seq.arrived = now - request.waited
            seq.since = now if request.resume_ids else seq.arrived
            seq.expected = found.tokens if found else 0
        self._deadlines += [s for s in sequences if request.deadline is not None]
        self._requests[request.id] = sequences
        self.waiting += sequences

    def _sequence(self, request: Request, index: int) -> Sequence:
        self._order += 1
        return make_sequence(
            request,
            index,
            self._order,
            self.capacity.max_model_len,
            self.eos_ids,
            self.kv.new(),
            self._private(request),
            self.store.tier.facts.model if self.store else "",
        )

    def _private(self, request: Request) -> bool:
        return request.no_cache or not self.prefix_cache

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one answer or all of a request at once; no delta is owed. Unknown ids are no error."""
        for seq in list(self._requests.get(request_id, ())):
            if index is None or seq.index == index:
                self._end(seq, FinishReason.ABORT)
                self.aborted += 1

    def expire(self) -> list[Delta]:
        """Ends what has not come to its end in time."""
        now, ended = self.clock(), []
        for seq in self._deadlines:
            if seq.status is not Status.FINISHED and slo.expired(now - seq.arrived, seq.request.deadline):
                self._end(seq, FinishReason.TIMEOUT)
                ended.append(Delta(seq.request.id, seq.index, finish_reason=FinishReason.TIMEOUT))
        self._deadlines = [s for s in self._deadlines if s.status is not Status.FINISHED]
        return ended

    def enter_grammars(self) -> list[Delta]:
        """Gives guides to those whose grammar is compiled by now; ends those of which it cannot be followed."""
        ended = []
        for seq in [s for s in self.waiting if guidance.ready(s)]:
            assert self.guides is not None
            try:
                guidance.enter(seq, self.guides)
                self.forced_tokens += seq.unsent
            except KvasirError as error:
                ended.append(self._fail(seq, str(error)))
        return ended

    def masks(self, plan: StepPlan) -> dict[int, bytes]:
        """By row, what may be sampled where a grammar says so. Steps before this one must be committed."""
        pairs = zip(self._under_way[plan.step], plan.work, strict=True)
        guided = ((seq, work) for (seq, _), work in pairs if seq.guide and work.sample)
        masks = {w.row: guidance.mask(seq) for seq, w in guided if seq.status is not Status.FINISHED}
        self.masked_rows += len(masks)
        return masks

    def preempt(self, seq: Sequence) -> None:
        """The running sequence leaves its row and gives back its blocks; it waits to join again."""
        self.running.remove(seq)
        self._leave_row(seq)
        self._leave_blocks(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.append(seq)

    # -- planning ----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._left)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and no row to free."""
        self.kv.tree.expire(self.clock())
        self._poll()
        step = _Step(self.capacity.max_tokens_per_step)
        living = self.waiting + self.running
        suspect = min((s for s in living if s.suspect), key=_order, default=None)
        if suspect is not None:
            self._plan_alone(suspect, step)
        else:
            self.service.present(living)
            self._displace()
            self._plan_decodes(step)
            self._plan_prefills(step)
        if not (step.work or self._left):
            return None
        return self._complete(step)

    def _complete(self, step: _Step) -> StepPlan:
        saves = self.store.take_saves() if self.store else []
        plan = StepPlan(
            self._step,
            tuple(step.joined),
            tuple(step.work),
            tuple(self._left),
            tuple(step.copies),
            tuple((group, id) for _, group, id in saves),
            tuple(step.loads),
        )
        self._left = []
        self._under_way[self._step] = tuple((s, s.preemptions) for s in step.sequences)
        if saves:
            self._saving[self._step] = saves
        self._step += 1
        return plan

    def _displace(self) -> None:
        """When all rows are taken, somebody of a lower class leaves his to the first of a higher one."""
        if self._free_rows or not self.waiting:
            return
        if min(map(self.service.standing, self.waiting)) < max(map(self.service.standing, self.running)):
            last = max(self.running, key=self.service.victim_key)
            self.preempt(last)
            self._displaced[last.request.slo] += 1

    def _plan_decodes(self, step: _Step) -> None:
        """One token each for those that want no more."""
        decodes = [s for s in self.running if s.pending == 1]
        for seq in sorted(decodes, key=self.service.victim_key) if len(decodes) > step.budget else decodes:
            if step.budget and seq.status is Status.RUNNING and self._make_room(seq, seq.computed + 1, step):
                self._compute(seq, 1, step)

    def _plan_prefills(self, step: _Step) -> None:
        """Pieces of prompts, and of what a preempted sequence computes anew, within the step's allowance."""
        wanting = [s for s in self.running if s.pending > 1] + (self.waiting if self._free_rows else [])
        if not wanting:
            return
        decodes = list(step.sequences)
        promoted = any(s.promoted for s in self.waiting) or any(s.promoted for s in self.running)
        wanting = self.service.order(wanting, self.clock(), promoted)
        step.prefill = allowance = self.service.allowance(decodes, wanting[0])
        wanted = sum(s.known - (s.computed or s.expected) for s in wanting)
        admitting = True
        for seq in wanting:
            if seq.status is Status.WAITING:
                admitting = admitting and self._admit(seq, step)
            elif id(seq) not in step.planned:
                count = self._chunk(seq.pending, step)
                if count and self._make_room(seq, seq.computed + count, step):
                    self._compute(seq, count, step)
        self.service.fed(wanted, allowance - step.prefill)

    def _admit(self, seq: Sequence, step: _Step) -> bool:
        """Lets a waiting sequence join if it can; False when nobody behind it may, or it would starve."""
        hit, loaded = self._start(seq)
        facts = self._facts(seq, hit, loaded, step)
        if not all(gate(facts) for gate in policy.OWN_GATES) or self._begin_fetch(seq, hit):
            return True
        if not facts.blocks_fit and not self.running:  # alone it fits, if nothing is held on to
            self.kv.tree.expire(inf)
            hit, loaded, facts = None, 0, self._facts(seq, None, 0, step)
        if not all(gate(facts) for gate in policy.SHARED_GATES):
            return False
        self._join(seq, hit, loaded, step)
        self._compute(seq, facts.first_chunk, step, joined=True)
        return True

    def _plan_alone(self, seq: Sequence, step: _Step) -> None:
        """A step for one sequence alone, as long as it is suspected to have broken an earlier one."""
        if seq.in_flight:
            return
        others = [s for s in self.running if s is not seq]
        for other in others:
            self.preempt(other)
        joined = seq.status is Status.WAITING
        if joined:
            self.kv.tree.expire(inf)  # alone it fits, if nothing is held on to
            self._join(seq, None, 0, step)
        count = self._chunk(seq.pending, step)
        if self._make_room(seq, seq.computed + count, step):
            self._compute(seq, count, step, joined)

    def _chunk(self, pending: int, step: _Step) -> int:
        return policy.chunk_tokens(pending, step.budget, 0, self.max_chunk, self.bidirectional, step.prefill)

    def _find(self, seq: Sequence) -> Hit | None:
        """What the prefix tree holds of a waiting sequence. One token at least is left to compute, for its logits."""
        limit = seq.known - 1
        if limit < 1 or seq.in_flight or seq.suspect or seq.needs_prompt_rows:
            return None
        hit = self.kv.tree.match(seq.namespace, seq.tokens.tobytes(), limit)
        return hit if hit.tokens else None

    def _start(self, seq: Sequence) -> tuple[Hit | None, int]:
        """What the tree holds of a waiting sequence, and the tokens up to which blocks behind have arrived, or 0."""
        hit = self._find(seq)
        if self.store is None or seq.fetch is None or seq.suspect:
            return hit, 0
        size = self.capacity.block_size
        loaded = self.store.arrived(seq.fetch, hit.tokens // size if hit else 0)
        return (hit.whole(size) if hit and loaded else hit), loaded

    def _facts(self, seq: Sequence, hit: Hit | None, loaded: int, step: _Step) -> policy.AdmitFacts:
        found = loaded or (hit.tokens if hit else 0)
        pending = seq.known - found
        chunk = self._chunk(pending, step)
        return policy.AdmitFacts(
            free_rows=len(self._free_rows),
            budget=step.budget if pending == 1 else min(step.budget, step.prefill),
            first_chunk=chunk if chunk or not self.bidirectional else pending,
            indivisible=self.bidirectional,
            blocks_fit=self.kv.fits(hit, min(seq.known + 1, seq.max_known), self.max_chunk),
            values_known=seq.in_flight == 0,
            prefix_under_way=self._coming(seq) - found >= self.capacity.block_size // 2,
            loading=seq.fetch is not None and seq.fetch.open,
            compiling=seq.compiling is not None,
        )

    def _coming(self, seq: Sequence) -> int:
        """Leading tokens that another sequence computes or loads already and that this one could take from it."""
        if seq.suspect or seq.needs_prompt_rows:
            return 0
        most = 0
        for other in self.running:
            if other.stored < other.prompt_len and other.namespace == seq.namespace and not other.suspect:
                most = max(most, common(other.packed_prompt, seq.packed_prompt))
        for other in self.waiting if self.store and seq.fetch is None else ():
            if other.fetch and other.fetch.open and other.namespace == seq.namespace:
                end = (other.fetch.first + other.fetch.count) * self.capacity.block_size
                most = max(most, min(common(other.packed_prompt, seq.packed_prompt), end))
        return min(most, seq.known - 1)

    # -- the tier ----------------------------------------------------------------------------------------------

    def _evicted(self, block: Block, index: int, ids: tuple[int, ...]) -> None:
        if self.store and block.namespace.startswith(SHARED):
            self.store.note(block, ids)

    def _begin_fetch(self, seq: Sequence, hit: Hit | None) -> bool:
        """Asks the tier, once while the sequence waits, for what comes behind the hit; whether to wait for it."""
        asks = seq.known > 1 and not (seq.suspect or seq.needs_prompt_rows) and seq.namespace.startswith(SHARED)
        if self.store is None or seq.fetch is not None or not asks:
            return False
        found, ids = hit.tokens if hit else 0, seq.tokens[: seq.known - 1].tobytes()
        seq.fetch = self.store.fetch(
            seq.namespace, ids, found, lambda tokens: self.service.prefill_seconds(found, tokens), self.clock()
        )
        return seq.fetch.open

    def _end_fetch(self, seq: Sequence) -> None:
        if self.store and seq.fetch:
            self.store.end(seq.fetch)
        seq.fetch = None

    def _poll(self, timeout: float = 0.0) -> None:
        if self.store is None:
            return
        now = self.clock()
        for seq in self.waiting:
            if seq.fetch and seq.fetch.open:
                self.store.poll(seq.fetch, now, timeout)
                timeout = 0.0

    def linger(self, seconds: float) -> None:
        """To be called when there was nothing to plan: waits so long at most for what comes from elsewhere."""
        compiling = [s.compiling for s in self.waiting if s.compiling]
        if compiling:
            concurrent.futures.wait(compiling, seconds, concurrent.futures.FIRST_COMPLETED)
        else:
            self._poll(seconds)

    def _save(self, plan: StepPlan, saved: tuple[Bytes, ...]) -> None:
        saves = self._saving.pop(plan.step, [])
        for (block, group, _), payload in zip(saves, saved, strict=True):
            assert self.store
            self.store.tier.save(block, group, payload)

    def last_plans(self) -> Iterator[StepPlan]:
        """Steps that compute nothing: each gives some of what the prefix tree holds to the tier, the last used first.
        To be run and committed one by one when no other is under way."""
        for block, index, ids in list(self.kv.tree.named()) if self.store else ():
            self._evicted(block, index, ids)
            if self.store and self.store.has_saves:
                yield self._complete(_Step(0))

    # ----------------------------------------------------------------------------------------------------------

    def _join(self, seq: Sequence, hit: Hit | None, loaded: int, step: _Step) -> None:
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.row = self._free_rows.pop()
        seq.untold = []  # joining tells all
        if hit is not None:
            step.copies += self.kv.adopt(seq.blocks, hit)
            seq.computed = hit.tokens  # stored once a step has run: until then a copy may be missing
        if loaded:
            assert seq.fetch
            received = self.kv.receive(seq.blocks, loaded)
            step.loads += [(group, id, seq.fetch.parts[group, index]) for group, index, id in received]
            self.loaded_tokens += loaded - seq.computed
            seq.computed = loaded
        self._end_fetch(seq)
        if not seq.preemptions:
            # What an answer takes from its siblings is no hit: nobody had computed it before.
            first = seq is self._requests[seq.request.id][0]
            seq.cached = seq.computed if first else min(seq.computed, seq.expected)
            self.looked_up_tokens += seq.known
            self.cached_tokens += seq.cached
            self._queue_seconds[seq.request.slo].add(self.clock() - seq.arrived)
        step.joined.append(Join(seq.row, seq.tokens.tobytes(), seq.prompt_len, seq.spec, carry=seq.carry))

    def _compute(self, seq: Sequence, count: int, step: _Step, joined: bool = False) -> None:
        start = seq.computed
        added = self.kv.extend(seq.blocks, start + count)
        blocks = seq.blocks.whole() if joined else added
        appended, seq.untold = pack_ids(seq.untold), []
        seq.computed += count
        reached = seq.computed == seq.known
        sample = reached and not seq.embeds
        if sample:
            seq.known += 1
            seq.in_flight += 1
        step.budget -= count
        if count > 1:
            step.prefill -= count
        step.sequences.append(seq)
        step.planned.add(id(seq))
        step.work.append(
            Work(
                row=seq.row,
                start=start,
                count=count,
                blocks=blocks,
                appended=appended,
                sample=sample,
                want_prompt_logprobs=seq.prompt_logprobs is not None and start < seq.prompt_len - 1,
                want_pooled=seq.embeds and reached,
                indivisible=self.bidirectional,
            )
        )

    def _make_room(self, seq: Sequence, num_tokens: int, step: _Step) -> bool:
        """Frees blocks until `seq` can grow to `num_tokens`; False when it has to leave itself, or to wait until a step
        under way has given back what is beyond its window. Who is part of the step already stays."""
        while not self.kv.grows(seq.blocks, num_tokens):
            others = [s for s in self.running if id(s) not in step.planned]
            last = max(others, key=self.service.victim_key)
            if self.service.victim_key(last) < self.service.victim_key(seq):
                last = seq
            if last is seq and seq.under_way:
                return False
            if len(self.running) == 1 and self.kv.tree.expire(inf):  # alone it fits, if nothing is held on to
                continue
            self.preempt(last)
            if last is seq:
                return False
        return True

    # -- results -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Takes the result of a planned step; returns what it adds to the answers, in the plan's order."""
        sequences = self._under_way.pop(plan.step)
        self._save(plan, result.saved)
        deltas: list[Delta] = []
        served: list[Served] = []
        now = self.clock()
        for (seq, epoch), work, row in zip(sequences, plan.work, result.rows, strict=True):
            seq.in_flight -= work.sample
            prompt_tokens = max(0, min(work.start + work.count, seq.prompt_len) - work.start)
            served.append(Served(seq, prompt_tokens, len(row.tokens)))
            if row.tokens:
                seq.since = now
            if seq.status is Status.FINISHED:
                continue
            if row.error:
                deltas.append(self._fail(seq, row.error))
                continue
            delta = self._take(seq, work, row, current=seq.preemptions == epoch)
            if delta is not None:
                deltas.append(delta)
        self.service.charge(served)
        return deltas

    def _take(self, seq: Sequence, work: Work, row: RowResult, current: bool) -> Delta | None:
        """`current`: the sequence has kept its row and blocks since the step was planned."""
        end = work.start + work.count
        self.prompt_tokens += max(0, min(end, seq.prompt_len) - work.start)
        if seq.suspect and end >= seq.suspect:
            seq.suspect = 0
        if seq.prompt_logprobs is not None and row.prompt_logprobs:
            first = work.start + 1
            seq.prompt_logprobs[first : first + len(row.prompt_logprobs)] = [_entry(e) for e in row.prompt_logprobs]
        if current:
            seq.stored = end
            if work.start < seq.prompt_len:
                self._remember(seq)
                self._pin(seq)
            seq.blocks.trim(end)
        if row.pooled:
            self._end(seq, FinishReason.STOP)
            values = struct.unpack(f"<{len(row.pooled) // 4}f", row.pooled)
            return Delta(seq.request.id, seq.index, finish_reason=FinishReason.STOP, embedding=values)
        return self._extend(seq, row) if row.tokens else None

    def _remember(self, seq: Sequence) -> None:
        """Leaves what the sequence has computed to the prefix tree, too."""
        if seq.stored and not seq.suspect:
            ids, priority = seq.tokens[: seq.stored].tobytes(), -seq.request.priority
            self.kv.tree.insert(seq.namespace, ids, seq.blocks.ids, priority)

    def _pin(self, seq: Sequence) -> None:
        ttl = seq.request.cache_ttl
        if ttl and seq.stored >= seq.prompt_len and not self._private(seq.request):
            self.kv.tree.pin(seq.namespace, seq.packed_prompt, self.clock() + ttl)

    def _extend(self, seq: Sequence, row: RowResult) -> Delta:
        first = len(seq.tokens) - seq.unsent == seq.prompt_len
        tokens = seq.tokens[len(seq.tokens) - seq.unsent :].tolist()
        known = [*row.tokens, *seq.coming]
        seq.coming, seq.unsent = [], 0
        finish, stop = self._append(seq, known, tokens)
        if seq.guide and finish is not FinishReason.STOP:
            try:
                finish, stop = self._follow(seq, known, tokens, finish)
            except KvasirError as error:
                return self._fail(seq, str(error))
        seq.carry = row.carry
        self.generated_tokens += len(tokens)
        prompt_logprobs = tuple(seq.prompt_logprobs) if first and seq.prompt_logprobs is not None else None
        if finish:
            self._end(seq, finish)
        return Delta(
            seq.request.id,
            seq.index,
            tuple(tokens),
            tuple(_entry(e) for e in row.logprobs[: len(tokens)]),
            prompt_logprobs,
            finish,
            stop,
            cached_tokens=seq.cached,
            carry=seq.carry,
        )

    def _append(self, seq: Sequence, ids: list[int], told: list[int]) -> tuple[FinishReason | None, int | None]:
        """Ids become known, and part of what the answer's delta tells, up to one that ends it."""
        for token in ids:
            told.append(token)
            seq.tokens.append(token)
            finish, stop = self._verdict(seq, token)
            if finish:
                return finish, stop
        return None, None

    def _follow(
        self, seq: Sequence, known: list[int], told: list[int], finish: FinishReason | None
    ) -> tuple[FinishReason | None, int | None]:
        """The grammar goes on behind what became known; an answer that is complete by it is not cut by its length.
        Raises KvasirError."""
        assert seq.guide
        seq.guide.advance(known)
        if finish is None:
            forced = guidance.jump(seq)
            self.forced_tokens += len(forced) or len(seq.coming)
            finish, stop = self._append(seq, forced, told)
            if finish:
                return finish, stop
            seq.guide.advance(forced)
        return (FinishReason.STOP if seq.guide.done else finish), None

    def _verdict(self, seq: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        sampled = len(seq.tokens) - seq.prompt_len
        if token in seq.stop_ids and sampled > seq.request.params.min_tokens:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if len(seq.tokens) >= seq.max_known else (None, None)

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """The step raised. Its only sequence ends with an error; of several, each is tried alone from now on."""
        sequences = [seq for seq, _ in self._under_way.pop(plan.step)]
        self._saving.pop(plan.step, None)
        for seq, work in zip(sequences, plan.work, strict=True):
            seq.in_flight -= work.sample
            seq.known -= work.sample
            guidance.take_back(seq)
        alive = [s for s in sequences if s.status is not Status.FINISHED]
        if len(sequences) == 1:
            return [self._fail(seq, message) for seq in alive]
        for seq in alive:
            seq.suspect = max(seq.suspect, seq.computed, 1)
            if seq.status is Status.RUNNING:
                self.preempt(seq)
        return []

    def retract(self, plan: StepPlan) -> StepPlan:
        """Takes back a planned step that builds on one that failed: its sequences leave their rows and wait. Returns
        what is left of the plan: who joins and who leaves, which the runner must know of."""
        for (seq, _), work in zip(self._under_way[plan.step], plan.work, strict=True):
            seq.in_flight -= work.sample
            seq.known -= work.sample
            if seq.status is Status.RUNNING:
                self.preempt(seq)
        self._under_way[plan.step] = ()
        self._saving.pop(plan.step, None)
        return replace(plan, work=(), copies=(), saves=(), loads=())

    def _fail(self, seq: Sequence, message: str) -> Delta:
        self._end(seq, FinishReason.ERROR)
        return Delta(seq.request.id, seq.index, finish_reason=FinishReason.ERROR, error=message)

    # -- leaving -----------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._leave_row(seq)
        else:
            self.waiting.remove(seq)
            self._end_fetch(seq)
        self._leave_blocks(seq, reason)
        seq.status, seq.finish = Status.FINISHED, reason
        self.finished += 1
        siblings = self._requests[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.id]
            if self._private(seq.request):
                self.kv.tree.drop(seq.namespace)

    def _leave_row(self, seq: Sequence) -> None:
        self._left.append(seq.row)
        self._free_rows.append(seq.row)
        seq.row = -1

    def _leave_blocks(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        if reason is not FinishReason.ERROR:
            self._remember(seq)
        seq.blocks.release()
        seq.computed = seq.stored = 0

    # -- looking -----------------------------------------------------------------------------------------------

    def class_stats(self) -> dict[ServiceClass, ClassStats]:
        running, waiting = (Counter(s.request.slo for s in living) for living in (self.running, self.waiting))
        return {
            c: ClassStats(running[c], waiting[c], self._displaced[c], self._queue_seconds[c].copy())
            for c in ServiceClass
        }

    def check(self) -> None:
        """Proves that rows and blocks add up. Raises AssertionError."""
        living = self.waiting + self.running
        self.kv.check(s.blocks for s in living)
        rows = [s.row for s in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.capacity.max_rows)), "rows are lost or held twice"
        assert sorted(map(id, living)) == sorted(id(s) for r in self._requests.values() for s in r), "a lost sequence"
        if self.store:
            assert not any(s.fetch for s in self.running), "a running sequence waits for a tier"
            assert living or not self.store.num_bytes, "bytes of a tier are held by nobody"
        if not living:
            lost = self.kv.used - self.kv.tree.stats().pinned
            assert lost == 0, f"{lost} blocks are held by nobody"


class _Step:
    """A plan in the making."""

    __slots__ = ("budget", "copies", "joined", "loads", "planned", "prefill", "sequences", "work")

    def __init__(self, budget: int):
        self.budget = budget
        self.prefill = budget  # of it for pieces of more than one token
        self.planned: set[int] = set()  # identities of `sequences`
        self.joined: list[Join] = []
        self.work: list[Work] = []
        self.copies: list[tuple[int, int, int]] = []
        self.loads: list[tuple[int, int, Bytes]] = []
        self.sequences: list[Sequence] = []


def _order(seq: Sequence) -> int:
    return seq.order


def _entry(raw: tuple) -> TokenLogprob:
    return TokenLogprob(*raw)
