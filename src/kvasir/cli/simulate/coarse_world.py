"""A large fleet in virtual time: `coarse` replicas, and a router that sees all of them at once."""

from __future__ import annotations

import heapq
from dataclasses import replace
from math import inf

from kvasir.cli.simulate.coarse import CoarseReplica, Job
from kvasir.cli.simulate.coarse_router import CoarseRouter
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import Asked
from kvasir.cli.simulate.world import LATENCY, Outcome, Progress, SimulatedShares


class CoarseWorld:
    """As `World`. The replicas that compute prompts have the first numbers, then come those that compute answers."""

    def __init__(self, trace: list[Asked], setup: Setup):
        self.trace, self.setup = trace, setup
        most = setup.limits.most if setup.limits else setup.replicas
        self._num_fronts = setup.prefill or most
        self._replicas = [CoarseReplica(setup) for _ in range(self._num_fronts + self._num_backs)]
        self._router = CoarseRouter(setup, self._num_fronts)
        self._decoders = CoarseRouter(setup, self._num_backs, prompts=False)
        self._events: list[tuple[float, int, int]] = []  # time, the replica's version, the replica
        self._versions = [0] * len(self._replicas)
        self._free = [0.0] * self._num_fronts  # when each sender's connection is free
        self._receivers: dict[int, int] = {}  # of requests that will be handed over
        self._arrivals: list[tuple[float, int]] = []  # hand-overs under way: time, request
        self.outcome = Outcome([None] * len(trace), trace[-1].at / setup.rate)
        self._looked_up = self._cached = self._evicted = self._ended = 0
        self.now = 0.0

    @property
    def _num_backs(self) -> int:
        return self.setup.decode if self.setup.prefill else 0

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        """Runs until all requests have ended. progress: called with the number of ended requests."""
        for number, asked in enumerate(self.trace):
            at = asked.at / self.setup.rate
            self._run_until(at)
            self.now = at
            self._receive(number, asked)
            if number % 1024 == 0:
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
        while True:
            step = self._events[0][0] if self._events else inf
            arrival = self._arrivals[0][0] if self._arrivals else inf
            wake = self._wakes()
            at = min(step, arrival, wake)
            if at > end or at == inf:
                return
            self.now = at
            if at == step:
                _, version, index = heapq.heappop(self._events)
                if version == self._versions[index]:
                    self._advance(index)
                    self._settle(index)
            elif at == arrival:
                self._continue(heapq.heappop(self._arrivals)[1])
            else:
                self._wake()

    def _wakes(self) -> float:
        """When `_wake` is called next."""
        return inf

    def _wake(self) -> None:
        """Something happens that is no replica's."""

    # -- replicas ----------------------------------------------------------------------------------------------

    def _router_of(self, index: int) -> tuple[CoarseRouter, int]:
        """The router of a replica, and its number there."""
        if index < self._num_fronts:
            return self._router, index
        return self._decoders, index - self._num_fronts

    def _advance(self, index: int) -> None:
        """Brings a replica to the present."""
        self.outcome.steps += 1
        replica, (router, own) = self._replicas[index], self._router_of(index)
        begun, ended = replica.advance(self.now)
        for job in begun:
            router.arrive(own, job.asked)
            new, gone = replica.cache.keep(job.asked)
            router.keep(own, new, gone)
            self._evicted += len(gone)
            self._begin(job)
        for job in ended:
            router.end(own)
            if job.index in self._receivers and index < self._num_fronts:
                self._hand_over(job.index, own)
            else:
                self._end(job)

    def _begin(self, job: Job) -> None:
        if not job.pushed:
            self._looked_up += job.asked.prompt
            self._cached += job.cached
        served = self.outcome.served[job.index]
        assert served
        if not served.tokens:
            served.take(1, self.now, False)

    def _end(self, job: Job) -> None:
        served, answer = self.outcome.served[job.index], self.trace[job.index].answer
        assert served
        served.take(answer - served.tokens, self.now, True)
        self._router.learn(answer)
        self._decoders.learn(answer)
        self._ended += 1

    def _settle(self, index: int) -> None:
        """Notes a replica's state, and when it goes on."""
        replica, (router, own) = self._replicas[index], self._router_of(index)
        router.note(own, replica)
        self._versions[index] += 1
        if (at := replica.next()) < inf:
            heapq.heappush(self._events, (at, self._versions[index], index))

    # -- requests ----------------------------------------------------------------------------------------------

    def _receive(self, number: int, asked: Asked) -> None:
        self.outcome.served[number] = SimulatedShares(self.now)
        if self._num_backs and asked.answer > 1:
            self._receivers[number] = receiver = self._decoders.choose(asked, self.now)
            self._decoders.send(receiver, asked)
            asked = replace(asked, answer=1)
        self._place(Job(number, asked, self.now))

    def _place(self, job: Job) -> None:
        """Sends a request to a replica."""
        index = self._router.choose(job.asked, self.now)
        self._advance(index)
        replica = self._replicas[index]
        self.outcome.waited += replica.waiting  # at arrivals, not over time
        self.outcome.most_waiting = max(self.outcome.most_waiting, replica.waiting)
        self._router.send(index, job.asked)
        replica.add(job)
        self._settle(index)

    def _hand_over(self, number: int, sender: int) -> None:
        """Sends what the receiver does not have of a prompt that is computed."""
        asked, served = self.trace[number], self.outcome.served[number]
        assert served
        receiver = self._replicas[self._num_fronts + self._receivers[number]]
        begun = max(self._free[sender], served.arrived)
        tokens = asked.prompt - receiver.cache.found(asked)
        self._free[sender] = arrived = max(self.now, begun + tokens * self.setup.transfer)
        heapq.heappush(self._arrivals, (arrived + LATENCY, number))

    def _continue(self, number: int) -> None:
        """The receiver takes over a request whose prompt has arrived."""
        index = self._num_fronts + self._receivers.pop(number)
        asked, served = self.trace[number], self.outcome.served[number]
        assert served
        self._advance(index)
        self._replicas[index].add(Job(number, replace(asked, answer=asked.answer - 1), served.arrived, pushed=True))
        self._settle(index)
