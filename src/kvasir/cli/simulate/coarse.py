"""A replica as a fluid: for fleets of thousands of replicas and days of traffic.

Between two events of a replica (a request arrives, a prompt is computed, an answer ends) all steps are taken to be
alike. A step computes one token of every answer, and of the first prompt as many tokens as the scheduler's budget
allows. Prompts come in the scheduler's order: those that can still be in time by length, then the others, of which one
at a time is promoted when it has waited too long. A request
needs memory for its prompt and its whole answer before it begins. The prefix cache knows the trace's blocks, and evicts
those least recently used.

`benchmarks/fleet_simulation.py` compares it with the real scheduler.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import inf

from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import BLOCK, Asked
from kvasir.sched.budget import PACE, STRETCH
from kvasir.sched.slo import PROMOTE_AFTER


@dataclass(slots=True, eq=False)
class Job:
    """One request. pushed: its prompt's whole blocks were computed elsewhere and have arrived. cached: tokens of its
    prompt that were in the cache when it began. left: prompt tokens to compute. steps: the replica's step count at
    which its answer ends."""

    index: int
    asked: Asked
    arrived: float
    pushed: bool = False
    cached: int = 0
    left: float = 0.0
    steps: float = inf

    @property
    def size(self) -> int:
        return self.asked.prompt + self.asked.answer


class BlockCache:
    """The trace's blocks that a replica keeps, least recently used first. room: how many."""

    def __init__(self, room: int):
        self._room = room
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> list[int]:
        """All that are kept."""
        return [*self._blocks]

    def found(self, asked: Asked) -> int:
        """Tokens of the prompt's prefix that are kept; one at least is always computed."""
        count = 0
        for block in asked.blocks:
            if block not in self._blocks:
                break
            count += 1
        return min(count * BLOCK, asked.prompt - 1)

    def keep(self, asked: Asked) -> tuple[list[int], list[int]]:
        """Keeps a prompt's whole blocks; returns the new ones, and those that left for them."""
        blocks, own = self._blocks, asked.blocks[: asked.prompt // BLOCK]
        new = [block for block in own if block not in blocks]
        for block in reversed(own):  # the first is used by more prompts: it leaves last
            blocks[block] = None
            blocks.move_to_end(block)
        gone = []
        while len(blocks) > self._room:
            gone.append(blocks.popitem(last=False)[0])
        return new, gone


class CoarseReplica:
    """Call `advance` with the time of every event before anything else at that time."""

    def __init__(self, setup: Setup):
        self._token, self._row, self._key, self._step = setup.costs
        self._memory, self._rows, self._whole = setup.memory, setup.rows, setup.step_tokens
        self._target = setup.target
        self._block = setup.block_size
        self.cache = BlockCache(setup.memory // BLOCK)
        self.now = 0.0
        self.backlog = 0.0  # prompt tokens to compute, of all requests here
        self.num_rows = 0  # answers under way
        self.context = 0.0  # their keys
        self._steps = 0.0  # so far
        self._used = 0  # tokens of memory
        self._queue: list[Job] = []  # wait for memory or a row
        self._prompts: list[Job] = []  # are computed, the first one now
        self._answers: list[tuple[float, int, Job]] = []  # by the step at which they end
        self._promoted: Job | None = None  # is served first until it ends
        self._pace = (0.0, 0.0)  # seconds of a step, prompt tokens in it
        self._repace()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def prompt_pace(self) -> float:
        """Prompt tokens per second."""
        seconds, tokens = self._pace
        return tokens / seconds

    def add(self, job: Job) -> None:
        job.left = self._uncached(job)
        self.backlog += job.left
        self._queue.append(job)
        self._admit()
        self._repace()

    def _uncached(self, job: Job) -> int:
        """Prompt tokens to compute; of a pushed one those after its last whole block, and the token that came last."""
        if job.pushed:
            return 1 + job.asked.prompt % self._block
        return job.asked.prompt - self.cache.found(job.asked)

    def give_up(self, all: bool) -> list[Job]:
        """Takes away the requests that have no token, or all. What is left of an answer under way is the answer to its
        prompt and its tokens so far."""
        gone = [*self._queue, *self._prompts]
        self._used -= sum(job.size for job in self._prompts)
        self._queue, self._prompts, self.backlog = [], [], 0.0
        if all:
            for steps, _, job in self._answers:
                left = max(1, math.ceil(steps - self._steps - 1e-9))
                done = job.asked.answer - left
                self._end(job)
                job.asked = replace(job.asked, prompt=job.asked.prompt + done, answer=left)
                gone.append(job)
            self._answers, self.context = [], 0.0
        for job in gone:
            job.steps, job.pushed = inf, False
        if self._promoted in gone:
            self._promoted = None
        self._repace()
        return gone

    def next(self) -> float:
        """When something happens here next; inf if nothing does."""
        seconds, tokens = self._pace
        found = inf
        if self._prompts:
            found = self._prompts[0].left / tokens * seconds
        if self._answers:
            found = min(found, (self._answers[0][0] - self._steps) * seconds)
        return self.now + found

    def advance(self, now: float) -> tuple[list[Job], list[Job]]:
        """Goes on to the time of its next event, or an earlier time. Returns the requests whose first token came, and
        those that ended."""
        seconds, tokens = self._pace
        steps = (now - self.now) / seconds
        self.now = now
        begun: list[Job] = []
        ended: list[Job] = []
        if steps:
            self._steps += steps
            self.context += steps * self.num_rows
            if self._prompts:
                job, done = self._prompts[0], steps * tokens
                self.backlog -= min(done, job.left)
                job.left -= done
        while self._prompts and self._prompts[0].left <= 1e-6:
            begun.append(self._begin_answer(self._prompts.pop(0)))
        while self._answers and self._answers[0][0] <= self._steps + 1e-9:
            ended.append(self._end(heapq.heappop(self._answers)[2]))
        if begun or ended:
            self._admit()
            self._repace()
        return begun, ended

    def _begin_answer(self, job: Job) -> Job:
        job.steps = self._steps + job.asked.answer - 1
        heapq.heappush(self._answers, (job.steps, job.index, job))
        self.num_rows += 1
        self.context += job.asked.prompt
        return job

    def _end(self, job: Job) -> Job:
        if job is self._promoted:
            self._promoted = None
        self.num_rows -= 1
        self.context -= job.size
        self._used -= job.size
        return job

    def _order(self, job: Job) -> tuple[bool, bool, int, int]:
        """The scheduler's order of service (sched.slo), without classes and tenants."""
        late = self.now - job.arrived + self._token * job.left > self._target.ttft
        return job is not self._promoted, late, 0 if late else int(job.left).bit_length(), job.index

    def _promote(self) -> None:
        """Promotes the request that has waited longest, if that is too long and no other is promoted."""
        if self._promoted is None and (self._queue or self._prompts):
            oldest = min((*self._queue, *self._prompts), key=lambda job: (job.arrived, job.index))
            if self.now - oldest.arrived > PROMOTE_AFTER * self._target.ttft:
                self._promoted = oldest

    def _admit(self) -> None:
        self._promote()
        self._queue.sort(key=self._order)
        while self._queue and self.num_rows + len(self._prompts) < self._rows:
            job = self._queue[0]
            if self._used and self._used + job.size > self._memory:
                return
            del self._queue[0]
            self._used += job.size
            left = self._uncached(job)
            job.cached = job.asked.prompt - left
            self.backlog += left - job.left
            job.left = left
            self._prompts.append(job)

    def _repace(self) -> None:
        """How long steps take from now on, and what they compute."""
        alone = self._step + self._row * self.num_rows + self._key * self.context
        if not self._prompts:
            self._pace = (alone, 0.0)
            return
        self._prompts.sort(key=self._order)
        job = self._prompts[0]
        token = self._token + self._key * (job.asked.prompt - job.left / 2)
        tokens = self._whole - self.num_rows
        if self.num_rows:
            tokens = max(1.0, min(tokens, (max(PACE * self._target.tpot, STRETCH * alone) - alone) / token))
        if len(self._prompts) == 1:
            tokens = min(tokens, max(job.left, 1.0))
        self._pace = (alone + token * tokens, float(tokens))
