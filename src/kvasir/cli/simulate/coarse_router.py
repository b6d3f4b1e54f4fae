"""A router over `coarse` replicas: it sees all of them at once, as arrays, and chooses as `fleet.cost.choose` does."""

from __future__ import annotations

import numpy as np

from kvasir.cli.simulate.coarse import CoarseReplica
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.routing import KEPT
from kvasir.cli.simulate.trace import BLOCK, Asked
from kvasir.fleet.cost import AHEAD, ANSWER, DYNAMO_BLOCK, MATCH, RATIO
from kvasir.sched.budget import PACE, STRETCH


class CoarseRouter:
    """What is known of each replica, as arrays [replicas]; see fleet.cost.ReplicaFacts. prompts: whether these replicas
    compute the prompts of their requests. Of those that do not, requests count as rows from the moment that they are
    sent, since their prompts arrive complete."""

    def __init__(self, setup: Setup, count: int, prompts: bool = True):
        self._setup, self._prompts, self._count = setup, prompts, count
        self.requests, self.rows, self.context, self.backlog = (np.zeros(count) for _ in range(4))
        self._pace = np.zeros(count)  # prompt tokens per second
        self._at = np.zeros(count)  # when these were noted
        self._share = np.ones(count)
        self._coming = np.zeros(count)  # tokens of prompts that were sent and are not here yet
        self._holders: dict[int, int] = {}  # by block of the trace, the replicas that keep it, as bits of an integer
        self._turn = 0
        self.answer = ANSWER  # tokens that an answer usually has
        self.takes = np.arange(count)  # the replicas that requests may go to

    # -- what it knows -----------------------------------------------------------------------------------------

    def send(self, index: int, asked: Asked) -> None:
        """A request goes to a replica."""
        self.requests[index] += 1
        if not self._prompts:
            self._coming[index] += asked.prompt

    def arrive(self, index: int, asked: Asked) -> None:
        """The prompt of a request has been computed or has arrived there."""
        if not self._prompts:
            self._coming[index] -= asked.prompt

    def end(self, index: int) -> None:
        """A request has left a replica."""
        self.requests[index] -= 1

    def learn(self, answer: int) -> None:
        """Takes the length of an answer."""
        self.answer += (1 - KEPT) * (answer - self.answer)

    def note(self, index: int, replica: CoarseReplica) -> None:
        """Takes a replica's state after an event."""
        _, row, key, step = self._setup.costs
        self.rows[index] = rows = replica.num_rows if self._prompts else self.requests[index]
        self.context[index] = replica.context + self._coming[index]
        self.backlog[index], self._pace[index], self._at[index] = replica.backlog, replica.prompt_pace, replica.now
        alone = row * rows + key * self.context[index] + step if rows else 0.0
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

    @property
    def backlog_seconds(self) -> float:
        """Predicted seconds of the prompts that wait, summed over the replicas; see `fleet.cost.first_seconds`."""
        token, _, _, step = self._setup.costs
        return float(((token * self.backlog + step * (self.backlog > 0)) / self._share).sum())

    # -- the choice --------------------------------------------------------------------------------------------

    def choose(self, asked: Asked, now: float) -> int:
        """The replica for a request, by its index; there must be one that takes it. Call `send` if it goes there."""
        turn, self._turn = self._turn, self._turn + 1
        takes, policy = self.takes, self._setup.router
        if policy == "round-robin" or len(takes) == 1:
            return int(takes[turn % len(takes)])
        busy = self.requests[takes]
        if policy == "least-busy":
            return int(takes[_least(busy, turn)])
        cached = self.cached(asked) if self._prompts else np.full(self._count, asked.prompt - 1.0)
        if policy == "prefix":
            found = cached[takes]
            best = int(np.lexsort((busy, -found))[0])
            spread = busy.max() > busy.min() + AHEAD and busy.max() > RATIO * busy.min()
            fits = found[best] >= MATCH * asked.prompt and not spread
            return int(takes[best if fits else _least(busy, turn)])
        costs = self.costs(asked, cached, self.answer, now) if policy == "cost" else self.blocks(asked, cached)
        return int(takes[_least(costs[takes], turn)])

    def cached(self, asked: Asked) -> np.ndarray:
        """Tokens of the prompt that each replica keeps, [replicas]."""
        found = np.zeros(self._count)
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


def _least(values: np.ndarray, turn: int) -> int:
    """The index of the least value; of equal ones the first, counted from the turn."""
    start = turn % len(values)
    after, before = int(values[start:].argmin()) + start, int(values[:start].argmin()) if start else -1
    return before if start and values[before] < values[after] else after
