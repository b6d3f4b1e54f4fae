"""A service in virtual time: replicas (see `replica`) and what is between them, driven by events.

    due requests -> a router chooses a replica -> its steps, which take their time -> times of tokens

With separate replicas for prompts and answers, the router chooses both when a request arrives. The first token comes
from the one; the other continues once the prompt's keys and values have arrived there. They are sent while the prompt
is computed, one prompt after the other on each sender's connection.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvasir.cli.simulate.pushed import PushedBlocks
from kvasir.cli.simulate.replica import Setup, SimulatedReplica, StaticReplica
from kvasir.cli.simulate.routing import Router
from kvasir.cli.simulate.trace import Asked, Prompts
from kvasir.errors import QueueFull
from kvasir.types import Delta, Request, SamplingParams, Target

LATENCY = 1e-3  # seconds of a hand-over, besides the transfer
Progress = Callable[[int], None]


@dataclass(slots=True)
class SimulatedShares:
    """One request, in seconds of the virtual clock."""

    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    done: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there are none."""
        return (self.last - self.first) / max(1, self.tokens - 1)

    def take(self, tokens: int, now: float, last: bool) -> None:
        """Notes tokens of the answer. last: whether it ends with them."""
        if not self.tokens:
            self.first = now
        self.tokens += tokens
        self.last = now
        self.done = last

    def meets(self, target: Target) -> bool:
        return self.done and self.ttft <= target.ttft and self.tpot <= target.tpot


@dataclass(slots=True)
class Outcome:
    """served: in the order of the trace, None for refused requests. waited: sequences times seconds. span: seconds in
    which requests arrived. replica_seconds: replicas times seconds, if their number changed."""

    served: list[SimulatedShares | None]
    span: float
    seconds: float = 0.0
    waited: float = 0.0
    most_waiting: int = 0
    steps: int = 0
    replica_seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


class World:
    """One run. `prompts` are the trace's prompts."""

    def __init__(self, trace: list[Asked], setup: Setup, prompts: Prompts | None = None):
        self.trace, self.setup = trace, setup
        self.prompts = prompts or Prompts(trace)
        self.now = 0.0
        self.outcome = Outcome([None] * len(trace), trace[-1].at / setup.rate)
        longest = max(a.prompt + a.answer for a in trace)
        kind = StaticReplica if setup.policy == "static" else SimulatedReplica

        def make(pushed: PushedBlocks | None = None) -> SimulatedReplica:
            return kind(setup, longest, self.prompts.answer_id, lambda: self.now, pushed)

        self.fronts = [make() for _ in range(setup.prefill or setup.replicas)]
        self.backs = [make(PushedBlocks(setup.block_size)) for _ in range(setup.decode)] if setup.prefill else []
        self._router = Router(setup.router, self.fronts)
        self._decoders = Router(setup.router, self.backs, prompts=False)
        self._free = [0.0] * len(self.fronts)  # when each sender's connection is free
        self._routes: dict[int, tuple[int, int]] = {}  # request -> sender, receiver
        self._due = 0  # index of the next request to come
        self._numbers = itertools.count()
        self._arrivals: list[tuple[float, int, int]] = []  # hand-overs under way: time, number, request
        self._steps: list[tuple[float, int, SimulatedReplica]] = []  # steps under way: end, number, replica
        self._idle: dict[SimulatedReplica, None] = dict.fromkeys((*self.fronts, *self.backs))
        self._blocked: dict[SimulatedReplica, float] = {}  # all its requests wait for adapters: since when
        self._ended = 0

    @property
    def replicas(self) -> list[SimulatedReplica]:
        return [*self.fronts, *self.backs]

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        """Runs until all requests have ended. progress: called with the number of ended requests."""
        while (now := self._next()) is not None:
            self.now, before = max(self.now, now), self._ended
            while self._steps and self._steps[0][0] <= self.now:
                self._end(heapq.heappop(self._steps)[2])
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._continue(heapq.heappop(self._arrivals)[2])
            while self._due < len(self.trace) and self._when(self._due) <= self.now:
                self._receive(self._due)
                self._due += 1
            for replica in [replica for replica in self._idle if replica.has_work]:
                self._start(replica)
            if self._ended != before:
                progress(self._ended)
        return self._finish()

    def _next(self) -> float | None:
        """When something happens next."""
        times = [heap[0][0] for heap in (self._steps, self._arrivals) if heap]
        times += [replica.wakes for replica in self._blocked]
        if self._due < len(self.trace):
            times.append(self._when(self._due))
        return min(times, default=None)

    def _when(self, index: int) -> float:
        return self.trace[index].at / self.setup.rate

    # -- requests ----------------------------------------------------------------------------------------------

    def _request(self, index: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=self.trace[index].answer, ignore_eos=True, seed=0)
        return Request(str(index), self.prompts.ids(index), params, adapters=self.fronts[0].adapters.of(index))

    def _receive(self, index: int) -> None:
        request = self._request(index)
        self.outcome.served[index] = SimulatedShares(self._when(index))
        if self.backs:
            request = replace(request, params=replace(request.params, max_tokens=1))
        sender = self._router.choose(request)
        try:
            self.fronts[sender].add(request)
        except QueueFull:
            self.outcome.served[index] = None
            return
        self._router.send(sender, request)
        if self.backs and self.trace[index].answer > 1:
            self._routes[index] = sender, (receiver := self._decoders.choose(request))
            self._decoders.send(receiver, request)

    def _continue(self, index: int) -> None:
        """The receiver takes over a request whose prompt has arrived."""
        _, receiver = self._routes.pop(index)
        request, back = self._request(index), self.backs[receiver]
        assert back.pushed
        back.pushed.push(request)
        back.add(replace(request, resume_ids=((self.prompts.answer_id,),), resume_carries=(b"",)))

    def _hand_over(self, index: int) -> None:
        """Sends what the receiver does not have of a prompt that is computed."""
        sender, receiver = self._routes[index]
        tokens = self.trace[index].prompt - self._decoders.cached(receiver, self._request(index))
        shares = self.outcome.served[index]
        assert shares
        begun = max(self._free[sender], shares.arrived)
        self._free[sender] = arrived = max(self.now, begun + tokens * self.setup.transfer)
        heapq.heappush(self._arrivals, (arrived + LATENCY, next(self._numbers), index))

    # -- steps -------------------------------------------------------------------------------------------------

    def _start(self, replica: SimulatedReplica) -> None:
        outcome, waiting = self.outcome, replica.waiting
        seconds = replica.start(self.now)
        since = self._blocked.pop(replica, self.now)
        outcome.waited += waiting * (self.now - since)
        if seconds is None:
            self._blocked[replica] = self.now
            return
        outcome.waited += waiting * seconds
        outcome.most_waiting = max(outcome.most_waiting, waiting)
        outcome.steps += 1
        del self._idle[replica]
        heapq.heappush(self._steps, (replica.ends, next(self._numbers), replica))

    def _end(self, replica: SimulatedReplica) -> None:
        self._idle[replica] = None
        for delta in replica.end():
            self._note(replica, delta)

    def _note(self, replica: SimulatedReplica, delta: Delta) -> None:
        index = int(delta.id)
        served = self.outcome.served[index]
        assert served is not None and delta.error is None, delta.error
        if replica.pushed and served.tokens == 1:
            replica.pushed.drop(self._request(index))
        (self._decoders if replica.pushed else self._router).note(delta)
        tokens = len(delta.token_ids)
        served.take(tokens, self.now, served.tokens + tokens == self.trace[index].answer)
        self._ended += served.done
        if delta.finish_reason and not served.done:
            self._hand_over(index)

    def _finish(self) -> Outcome:
        outcome, schedulers = self.outcome, [replica.scheduler for replica in self.replicas]
        for scheduler in schedulers:
            scheduler.check()
        outcome.seconds = self.now
        outcome.counts = {
            "preemptions": sum(s.preemptions for s in schedulers),
            "prompt_tokens": sum(s.prompt_tokens for s in schedulers),
            "generated_tokens": sum(s.generated_tokens for s in schedulers),
            "looked_up_tokens": sum(r.scheduler.planner.looked_up_tokens for r in self.fronts),
            "cached_tokens": sum(r.scheduler.cached_tokens for r in self.fronts),
            "evicted_blocks": sum(s.kv.tree.stats().evicted for s in schedulers),
            "loads": sum(s.adapters.loads for s in schedulers),
            "unloads": sum(s.adapters.evictions for s in schedulers),
        }
        return outcome
