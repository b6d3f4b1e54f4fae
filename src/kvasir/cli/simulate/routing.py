"""A router in virtual time. As a live one does, it knows each replica's prefix tree, and of a replica's work what it
has sent there and what has come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.cli.simulate.replica import SimulatedReplica
from kvasir.fleet.cost import ANSWER, ReplicaFacts, choose
from kvasir.plan import pack_ids
from kvasir.sched.admission import namespace
from kvasir.types import Delta, Request

KEPT = 0.99  # of the mean length of answers, per answer


@dataclass(slots=True)
class Sent:
    """A request at a replica. backlog: tokens of its prompt to compute. tokens: of its answer so far."""

    replica: int
    prompt: int
    backlog: int
    tokens: int = 0


@dataclass(slots=True)
class Load:
    """See ReplicaFacts."""

    requests: int = 0
    backlog: int = 0
    rows: int = 0
    context: int = 0


class Router:
    """policy: of `fleet.cost`. prompts: whether these replicas compute the prompts of their requests."""

    def __init__(self, policy: str, replicas: Sequence[SimulatedReplica], prompts: bool = True):
        self._policy, self._replicas, self._prompts = policy, replicas, prompts
        self._turn, self._answer = 0, ANSWER
        self._loads = [Load() for _ in replicas]
        self._sent: dict[str, Sent] = {}

    def choose(self, request: Request) -> int:
        """The replica for a request, by its index. Call `send` if it goes there."""
        turn, self._turn = self._turn, self._turn + 1
        if len(self._replicas) == 1:
            return 0
        facts = [self._facts(index, request) for index in range(len(self._replicas))]
        return choose(self._policy, facts, len(request.prompt_ids), turn, self._answer)

    def cached(self, index: int, request: Request) -> int:
        """Tokens of the prompt in the replica's prefix tree; the last is always computed."""
        tree, ids = self._replicas[index].scheduler.kv.tree, request.prompt_ids
        return tree.match(namespace(request, False), pack_ids(ids), len(ids) - 1).tokens

    def _facts(self, index: int, request: Request) -> ReplicaFacts:
        replica, load = self._replicas[index], self._loads[index]
        cached = self.cached(index, request) if self._prompts else len(request.prompt_ids) - 1
        model, tpot = replica.truth, replica.setup.target.tpot
        return ReplicaFacts(cached, load.requests, load.backlog, load.rows, load.context, model, tpot)

    def send(self, index: int, request: Request) -> None:
        """A request goes to a replica."""
        prompt = len(request.prompt_ids)
        backlog = prompt - self.cached(index, request) if self._prompts else 0
        self._sent[request.id] = sent = Sent(index, prompt, backlog)
        self._loads[index].requests += 1
        self._loads[index].backlog += backlog
        if not self._prompts:
            self._begin(sent)

    def _begin(self, sent: Sent) -> None:
        """The prompt is computed."""
        load = self._loads[sent.replica]
        load.backlog -= sent.backlog
        load.rows += 1
        load.context += sent.prompt

    def note(self, delta: Delta) -> None:
        """A replica has sent tokens of a request."""
        sent = self._sent[delta.id]
        load, count = self._loads[sent.replica], len(delta.token_ids)
        if not sent.tokens and self._prompts:
            self._begin(sent)
        sent.tokens += count
        load.context += count
        if delta.finish_reason:
            load.requests -= 1
            load.rows -= 1
            load.context -= sent.prompt + sent.tokens
            self._answer += (1 - KEPT) * (sent.tokens - self._answer)
            del self._sent[delta.id]
