"""A large fleet in virtual time: `coarse` replicas, and routers that see all of them at once, as arrays."""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from kvasir.cli.simulate.coarse import CoarseReplica, Job
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.routing import KEPT
from kvasir.cli.simulate.trace import BLOCK, Asked
from kvasir.cli.simulate.world import Outcome, Progress, SimulatedShares
from kvasir.fleet.cost import AHEAD, ANSWER, DYNAMO_BLOCK, MATCH, RATIO
from kvasir.sched.budget import PACE, STRETCH


class Loads:
    """What a router knows of all replicas, as arrays [replicas]; see fleet.cost.ReplicaFacts. holders: by block of the
    trace, the replicas that keep it, as bits of an integer."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self.requests, self.rows, self.context, self.backlog = (np.zeros(setup.replicas) for _ in range(4))
        self._pace = np.zeros(setup.replicas)  # prompt tokens per second
        self._at = np.zeros(setup.replicas)  # when these were noted
        self._share = np.ones(setup.replicas)
        self._holders: dict[int, int] = {}

    def note(self, index: int, replica: CoarseReplica) -> None:
        """Takes a replica's state after an event."""
        _, row, key, step = self._setup.costs
        self.rows[index], self.context[index] = replica.num_rows, replica.context
        self.backlog[index], self._pace[index], self._at[index] = replica.backlog, replica.prompt_pace, replica.now
        alone = row * replica.num_rows + key * replica.context + step if replica.num_rows else 0.0
        self._share[index] = 1.0 - alone / max(PACE * self._setup.target.tpot, STRETCH * alone)

    def keep(self, index: int, new: list[int], gone: list[int]) -> None:
        """Notes which blocks a replica has got and lost."""
        bit = 1 << index
        for block in new:
            self._holders[block] = self._holders.get(block, 0) | bit
        for block in gone:
            self._holders[block] &= ~bit
            if not self._holders[block]:
                del self._holders[block]

    def cached(self, asked: Asked) -> np.ndarray:
        """Tokens of the prompt that each replica keeps, [replicas]."""
        found = np.zeros(self._setup.replicas)
        mask, depth = -1, 0
        for block in asked.blocks:
            held = mask & self._holders.get(block, 0)
            if depth:
                found[_bits(mask & ~held)] = depth * BLOCK
            mask, depth = held, depth + 1
            if not held:
                return found
        if depth:
            found[_bits(mask)] = depth * BLOCK
        return np.minimum(found, asked.prompt - 1)

    def costs(self, asked: Asked, cached: np.ndarray, answer: float, now: float) -> np.ndarray:
        """`fleet.cost.cost` of each replica, [replicas]."""
        token, row, key, step = self._setup.costs
        own = asked.prompt - cached
        backlog = np.maximum(self.backlog - self._pace * (now - self._at), 0.0)
        context = cached * own + own * (own + 1) / 2
        waiting = np.maximum(self.requests - self.rows, 0.0)
        saved = waiting * (token * cached + key * cached * (cached + 1) / 2)
        first = (token * (backlog + own) + key * context + step - saved) / self._share
        return first + answer * (row * (self.rows + 1) + key * (self.context + asked.prompt) + step)

    def blocks(self, asked: Asked, cached: np.ndarray) -> np.ndarray:
        """Dynamo's cost of each replica, [replicas]."""
        incoming, active = -(-asked.prompt // DYNAMO_BLOCK), -(-self.context // DYNAMO_BLOCK)
        raw = -(-self.backlog // DYNAMO_BLOCK) + incoming
        return np.maximum(raw - cached // DYNAMO_BLOCK, 0) + active + incoming


def _bits(mask: int) -> list[int]:
    """The positions of the bits that are set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


class CoarseWorld:
    """As `World`, of replicas that compute whole requests."""

    def __init__(self, trace: list[Asked], setup: Setup):
        self._trace, self._setup = trace, setup
        self._replicas = [CoarseReplica(setup) for _ in range(setup.replicas)]
        self._loads = Loads(setup)
        self._events: list[tuple[float, int, int]] = []  # time, the replica's version, the replica
        self._versions = [0] * setup.replicas
        self._answer = ANSWER
        self.outcome = Outcome([None] * len(trace), trace[-1].at / setup.rate)
        self._looked_up = self._cached = self._evicted = self._ended = 0
        self.now = 0.0

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        """Runs until all requests have ended. progress: called with the number of ended requests."""
        for index, asked in enumerate(self._trace):
            at = asked.at / self._setup.rate
            self._run_until(at)
            self.now = at
            self._receive(index, asked)
            if index % 1024 == 0:
                progress(self._ended)
        self._run_until(inf)
        self.outcome.seconds = self.now
        self.outcome.counts = {
            "looked_up_tokens": self._looked_up,
            "cached_tokens": self._cached,
            "evicted_blocks": self._evicted,
            "preemptions": 0,
            "loads": 0,
        }
        return self.outcome

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, version, index = heapq.heappop(self._events)
            if version == self._versions[index]:
                self._advance(index)
                self._settle(index)

    def _advance(self, index: int) -> None:
        """Brings a replica to the present."""
        self.outcome.steps += 1
        begun, ended = self._replicas[index].advance(self.now)
        for job in begun:
            self._looked_up += job.asked.prompt
            self._cached += job.cached
            new, gone = self._replicas[index].cache.keep(job.asked)
            self._evicted += len(gone)
            self._loads.keep(index, new, gone)
        for job in ended:
            self._end(index, job)

    def _end(self, index: int, job: Job) -> None:
        self.outcome.served[job.index] = SimulatedShares(job.arrived, job.first, self.now, job.asked.answer, True)
        self._answer += (1 - KEPT) * (job.asked.answer - self._answer)
        self._loads.requests[index] -= 1
        self._ended += 1

    def _settle(self, index: int) -> None:
        """Notes a replica's state, and when it goes on."""
        replica = self._replicas[index]
        self._loads.note(index, replica)
        self._versions[index] += 1
        if (at := replica.next()) < inf:
            heapq.heappush(self._events, (at, self._versions[index], index))

    def _receive(self, number: int, asked: Asked) -> None:
        index = self._choose(asked, number)
        self._advance(index)
        self.outcome.waited += self._replicas[index].waiting  # at arrivals, not over time
        self.outcome.most_waiting = max(self.outcome.most_waiting, self._replicas[index].waiting)
        self._replicas[index].add(Job(number, asked, self.now))
        self._loads.requests[index] += 1
        self._settle(index)

    def _choose(self, asked: Asked, turn: int) -> int:
        """As `fleet.cost.choose`."""
        loads, policy, count = self._loads, self._setup.router, self._setup.replicas
        if policy == "round-robin" or count == 1:
            return turn % count
        if policy == "least-busy":
            return _least(loads.requests, turn)
        cached = loads.cached(asked)
        if policy == "prefix":
            best = int(np.lexsort((loads.requests, -cached))[0])
            most, least = loads.requests.max(), loads.requests.min()
            spread = most > least + AHEAD and most > RATIO * least
            return best if cached[best] >= MATCH * asked.prompt and not spread else _least(loads.requests, turn)
        found = loads.costs(asked, cached, self._answer, self.now) if policy == "cost" else loads.blocks(asked, cached)
        return _least(found, turn)


def _least(values: np.ndarray, turn: int) -> int:
    """The index of the least value; of equal ones the first, counted from the turn."""
    start = turn % len(values)
    after, before = int(values[start:].argmin()) + start, int(values[:start].argmin()) if start else -1
    return before if start and values[before] < values[after] else after
