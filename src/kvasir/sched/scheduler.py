"""Scheduler: decides what every step computes. Integers only; the only place where a request changes.

The life of a request: `add` makes a waiting sequence for each of its `n` answers. `plan` gives running sequences some
of their pending tokens under one budget and lets waiting ones join. `commit` takes the step's result: values become
known, answers end, deltas go out. `abort` ends answers at any moment. A preempted sequence leaves its row and blocks
and joins again later; what it had sampled is kept and computed anew.

Prefill, chunk, decode, resume and prefill-only requests are one case: `known` and `computed` counts that differ.
Counts advance when a step is planned and values arrive when it is committed, so step N + 1 can be planned while
step N runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvasir.errors import InvalidRequest, QueueFull
from kvasir.kv.blocks import KVManager
from kvasir.plan import Capacity, Join, RowResult, StepPlan, StepResult, Work, pack_ids
from kvasir.sched import policy
from kvasir.sched.admission import make_sequence, refuse_impossible
from kvasir.sched.sequence import Sequence, Status
from kvasir.types import Delta, FinishReason, Request, TokenLogprob


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
    ):
        """bidirectional: the model attends in both directions, so prompts are indivisible.
        max_chunk: most tokens of one sequence in a step. max_waiting: sequences that may wait before QueueFull."""
        self.capacity = capacity
        self.kv = KVManager.of(capacity)
        self.eos_ids = frozenset(eos_ids)
        self.bidirectional = bidirectional
        self.max_chunk = min(max_chunk, capacity.max_tokens_per_step)
        self.max_waiting = max_waiting
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._free_rows = list(range(capacity.max_rows - 1, -1, -1))
        self._left: list[int] = []
        self._under_way: dict[int, tuple[tuple[Sequence, int], ...]] = {}  # with the count of preemptions then
        self._step = 0
        self._order = 0
        self.preemptions = self.finished = self.aborted = 0
        self.prompt_tokens = self.generated_tokens = 0

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request. Raises InvalidRequest when it can never fit, QueueFull at the queue's bound."""
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is in use", param="request_id")
        refuse_impossible(request, self.capacity, self.kv, self.max_chunk, self.bidirectional)
        if len(self.waiting) + request.params.n > self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} answers are waiting already", "try again later")
        sequences = [self._sequence(request, i) for i in range(request.params.n) if i not in request.done]
        for sibling in sequences[1:]:
            sibling.leader = sequences[0]
        sequences[0].siblings = sequences[1:]
        self._requests[request.id] = sequences
        self.waiting += sequences

    def _sequence(self, request: Request, index: int) -> Sequence:
        self._order += 1
        return make_sequence(request, index, self._order, self.capacity.max_model_len, self.eos_ids, self.kv.new())

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one answer or all of a request at once; no delta is owed. Unknown ids are no error."""
        for seq in list(self._requests.get(request_id, ())):
            if index is None or seq.index == index:
                self._end(seq, FinishReason.ABORT)
                self.aborted += 1

    def preempt(self, seq: Sequence) -> None:
        """The running sequence leaves its row and gives back its blocks; it waits to join again."""
        self.running.remove(seq)
        self._leave_row(seq)
        self._drop_blocks(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.append(seq)

    # -- planning ----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._left)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and no row to free."""
        step = _Step(self.capacity.max_tokens_per_step)
        suspect = next((s for s in sorted(self.waiting + self.running, key=_key) if s.suspect), None)
        if suspect is not None:
            self._plan_alone(suspect, step)
        else:
            self._plan_running(step)
            self._plan_waiting(step)
        if not (step.work or self._left):
            return None
        plan = StepPlan(self._step, tuple(step.joined), tuple(step.work), tuple(self._left), tuple(step.copies))
        self._left = []
        self._under_way[self._step] = tuple((s, s.preemptions) for s in step.sequences)
        self._step += 1
        return plan

    def _plan_running(self, step: _Step) -> None:
        order = sorted((s for s in self.running if s.pending), key=_key)
        decodes = sum(s.pending == 1 for s in order)
        for seq in order:
            decodes -= seq.pending == 1
            if seq.status is not Status.RUNNING:  # preempted for the sake of one before it
                continue
            count = self._chunk(seq, step, decodes)
            if count and self._make_room(seq, seq.computed + count):
                self._compute(seq, count, step)

    def _plan_waiting(self, step: _Step) -> None:
        for seq in sorted(self.waiting, key=_key):
            facts = self._facts(seq, step)
            if not all(gate(facts) for gate in policy.OWN_GATES):
                continue
            while not facts.blocks_fit and not self.running and self._reclaim_idle(seq):
                facts = self._facts(seq, step)
            if not all(gate(facts) for gate in policy.SHARED_GATES):
                break
            self._join(seq, step)
            self._compute(seq, facts.first_chunk, step, joined=True)

    def _plan_alone(self, seq: Sequence, step: _Step) -> None:
        """A step for one sequence alone, as long as it is suspected to have broken an earlier one."""
        if seq.in_flight:
            return
        others = [s for s in self.running if s is not seq]
        for other in others:
            self.preempt(other)
        count = self._chunk(seq, step, 0)
        if seq.status is Status.RUNNING:
            if self._make_room(seq, seq.computed + count):
                self._compute(seq, count, step)
        else:
            while not self._facts(seq, step).blocks_fit and self._reclaim_idle(seq):
                pass
            self._join(seq, step)
            self._compute(seq, self._chunk(seq, step, 0), step, joined=True)

    def _chunk(self, seq: Sequence, step: _Step, decodes: int) -> int:
        return policy.chunk_tokens(seq.pending, step.budget, decodes, self.max_chunk, self.bidirectional)

    def _facts(self, seq: Sequence, step: _Step) -> policy.AdmitFacts:
        chunk = policy.chunk_tokens(seq.pending, step.budget, 0, self.max_chunk, self.bidirectional)
        return policy.AdmitFacts(
            free_rows=len(self._free_rows),
            budget=step.budget,
            first_chunk=chunk if chunk or not self.bidirectional else seq.pending,
            indivisible=self.bidirectional,
            blocks_fit=self.kv.fits(seq.blocks, min(seq.known + 1, seq.max_known), self.max_chunk, seq.computed > 0),
            values_known=seq.in_flight == 0,
            prompt_ready=seq.leader is None,
        )

    def _join(self, seq: Sequence, step: _Step) -> None:
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.row = self._free_rows.pop()
        if seq.computed:
            step.copies += seq.blocks.make_own(seq.computed)
        step.joined.append(Join(seq.row, pack_ids(seq.tokens), seq.prompt_len, seq.spec, carry=seq.carry))

    def _compute(self, seq: Sequence, count: int, step: _Step, joined: bool = False) -> None:
        start = seq.computed
        added = seq.blocks.extend(start + count)
        blocks = seq.blocks.whole() if joined else added
        seq.computed += count
        reached = seq.computed == seq.known
        sample = reached and not seq.embeds
        if sample:
            seq.known += 1
            seq.in_flight += 1
        step.budget -= count
        step.sequences.append(seq)
        step.work.append(
            Work(
                row=seq.row,
                start=start,
                count=count,
                blocks=blocks,
                sample=sample,
                want_prompt_logprobs=seq.prompt_logprobs is not None and start < seq.prompt_len - 1,
                want_pooled=seq.embeds and reached,
                indivisible=self.bidirectional,
            )
        )

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Frees blocks until `seq` can grow to `num_tokens`; False when it had to leave itself."""
        while any(t.missing(num_tokens) > t.pool.free for t in seq.blocks.tables):
            if not self._reclaim(seq):
                self.preempt(seq)
                return False
        return True

    def _reclaim(self, seq: Sequence) -> bool:
        """Takes blocks from whoever comes after `seq` in the order of service; False when there is nobody."""
        if any(s is not seq and s.computed for s in self.waiting):
            return self._reclaim_idle(seq)
        last = self.running[policy.victim([s.key for s in self.running])] if self.running else seq
        if last is seq or last.key < seq.key:
            return False
        self.preempt(last)
        return True

    def _reclaim_idle(self, seq: Sequence) -> bool:
        """Takes the shared prompt blocks of the last waiting sequence that holds some, of `seq` itself at the end."""
        idle = [s for s in self.waiting if s.computed]
        if not idle:
            return False
        self._drop_blocks(max(idle, key=lambda s: (s is not seq, s.key)))
        return True

    # -- results -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Takes the result of a planned step; returns what it adds to the answers, in the plan's order."""
        sequences = self._under_way.pop(plan.step)
        deltas: list[Delta] = []
        for (seq, epoch), work, row in zip(sequences, plan.work, result.rows, strict=True):
            seq.in_flight -= work.sample
            if seq.status is Status.FINISHED:
                continue
            if row.error:
                deltas.append(self._fail(seq, row.error))
                continue
            delta = self._take(seq, work, row, current=seq.preemptions == epoch)
            if delta is not None:
                deltas.append(delta)
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
            if end >= seq.prompt_len - 1:
                self._share_prompt(seq)
            seq.blocks.trim(end)
        if row.pooled:
            self._end(seq, FinishReason.STOP)
            values = struct.unpack(f"<{len(row.pooled) // 4}f", row.pooled)
            return Delta(seq.request.id, seq.index, finish_reason=FinishReason.STOP, embedding=values)
        return self._extend(seq, row) if row.tokens else None

    def _extend(self, seq: Sequence, row: RowResult) -> Delta:
        first = len(seq.tokens) == seq.prompt_len
        tokens, finish, stop = [], None, None
        for token in row.tokens:
            tokens.append(token)
            seq.tokens.append(token)
            finish, stop = self._verdict(seq, token)
            if finish:
                break
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
        )

    def _verdict(self, seq: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        sampled = len(seq.tokens) - seq.prompt_len
        if token in seq.stop_ids and sampled > seq.request.params.min_tokens:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if len(seq.tokens) >= seq.max_known else (None, None)

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """The step raised. Its only sequence ends with an error; of several, each is tried alone from now on."""
        sequences = [seq for seq, _ in self._under_way.pop(plan.step)]
        for seq, work in zip(sequences, plan.work, strict=True):
            seq.in_flight -= work.sample
            seq.known -= work.sample
        alive = [s for s in sequences if s.status is not Status.FINISHED]
        if len(alive) == 1:
            return [self._fail(alive[0], message)]
        for seq in alive:
            seq.suspect = max(seq.suspect, seq.computed, 1)
            if seq.status is Status.RUNNING:
                self.preempt(seq)
        return []

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
        self._drop_blocks(seq)
        seq.status, seq.finish = Status.FINISHED, reason
        self.finished += 1
        self._pass_on_lead(seq)
        if seq.leader is not None:
            seq.leader.siblings.remove(seq)
        siblings = self._requests[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.id]

    def _leave_row(self, seq: Sequence) -> None:
        self._left.append(seq.row)
        self._free_rows.append(seq.row)
        seq.row = -1

    def _drop_blocks(self, seq: Sequence) -> None:
        seq.blocks.release()
        seq.computed = 0

    # -- answers that share a prompt ---------------------------------------------------------------------------

    def _share_prompt(self, seq: Sequence) -> None:
        """The prompt is in the cache: the siblings get its blocks, all but the last token, which each computes
        itself to have logits of its own."""
        for sibling in seq.siblings:
            sibling.leader = None
            if sibling.known == sibling.prompt_len and sibling.prompt_len > 1:
                sibling.blocks = seq.blocks.fork(seq.prompt_len - 1)
                sibling.computed = seq.prompt_len - 1
        seq.siblings = []

    def _pass_on_lead(self, seq: Sequence) -> None:
        """The leader ended before its prompt was ready: its first sibling leads the others."""
        if not seq.siblings:
            return
        heir, *rest = seq.siblings
        heir.leader = None
        heir.siblings = rest
        for sibling in rest:
            sibling.leader = heir
        seq.siblings = []

    # -- looking -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Proves that rows and blocks add up. Raises AssertionError."""
        living = self.waiting + self.running
        self.kv.check(s.blocks for s in living)
        rows = [s.row for s in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.capacity.max_rows)), "rows are lost or held twice"
        assert sorted(map(id, living)) == sorted(id(s) for r in self._requests.values() for s in r), "a lost sequence"
        if not living:
            assert self.kv.used == 0, f"{self.kv.used} blocks are held by nobody"


class _Step:
    """A plan in the making."""

    __slots__ = ("budget", "copies", "joined", "sequences", "work")

    def __init__(self, budget: int):
        self.budget = budget
        self.joined: list[Join] = []
        self.work: list[Work] = []
        self.copies: list[tuple[int, int, int]] = []
        self.sequences: list[Sequence] = []


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key


def _entry(raw: tuple) -> TokenLogprob:
    return TokenLogprob(*raw)
