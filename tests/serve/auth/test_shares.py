"""Limits that several servers share: in virtual time, with messages that come late, twice, or not at all."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from kvasir.errors import LimitExceeded
from kvasir.serve.auth.buckets import SECOND, Bucket, drain, take
from kvasir.serve.auth.shares import FRESH_SECONDS, NotHeard, Peers, SharedCount, SharedRate

TELL = SECOND // 2


@dataclass
class World:
    """Servers that share a rate and a count. truth: the bucket of all that was admitted. worst: the most units that it
    had above its limit. peak: the most that was open at once."""

    servers: int
    limit: int
    seed: int = 0
    delay: float = 0.2  # seconds that a message takes at most
    loss: float = 0.0
    now: int = 0
    worst: int = 0
    peak: int = 0
    admitted: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.truth = Bucket(self.limit)
        self.urgent: set[int] = set()
        self.peers = [
            Peers(f"s{i}", self.servers, lambda: self.now, lambda i=i: self.urgent.add(i)) for i in range(self.servers)
        ]
        self.rates = [SharedRate("k/requests", "requests", self.limit, peers) for peers in self.peers]
        self.counts = [SharedCount("k/open", self.limit, peers, 0) for peers in self.peers]
        self.admitted = [0] * self.servers
        self._events: list[tuple] = []
        self._order = 0
        for i in range(self.servers):
            self._at(self.rng.randrange(TELL), "tell", i)

    def _at(self, when: int, what: str, *facts) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what, facts))

    def _say(self, i: int) -> None:
        told = {one.name: one.told for one in (self.rates[i], self.counts[i]) if one.told}
        news = self.peers[i].news(told)
        self.urgent.discard(i)
        for other in range(self.servers):
            for _ in range(self.rng.choice((1, 1, 2))):
                if other != i and self.rng.random() >= self.loss:
                    self._at(self.now + int(self.rng.random() * self.delay * SECOND), "hear", other, news)

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.now + int(seconds * SECOND)
        while True:
            for i in list(self.urgent):
                self._say(i)
            if not self._events or self._events[0][0] > end:
                break
            self.now, _, what, facts = heapq.heappop(self._events)
            if what == "tell":
                (i,) = facts
                self.rates[i].give_back()
                self.counts[i].give_back()
                self._say(i)
                self._at(self.now + TELL, "tell", i)
            else:
                i, news = facts
                for name, (before, told) in (self.peers[i].take(news) or {}).items():
                    if name == self.rates[i].name:
                        self.rates[i].learn(before, told)
        self.now = end

    def ask(self, i: int, units: int = 1) -> str:
        try:
            self.rates[i].take(units)
        except NotHeard:
            return "later"
        except LimitExceeded:
            return "no"
        self.truth = take(drain(self.truth, self.now), units)
        self.worst = max(self.worst, -(-self.truth.used // self.truth.per_unit) - self.limit)
        self.admitted[i] += units
        return "yes"

    def open(self, i: int) -> bool:
        try:
            self.counts[i].take()
        except (NotHeard, LimitExceeded):
            return False
        self.peak = max(self.peak, sum(count.open for count in self.counts))
        return True


@pytest.mark.parametrize("servers", [2, 3, 5])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_all_together_admit_hardly_more_than_the_limit(servers, loss):
    for seed in range(3):
        world = World(servers, limit=60, seed=seed, loss=loss)
        world.run(2)
        assert all(peers.complete for peers in world.peers)
        for _ in range(400):
            world.run(world.rng.random() * 0.1)
            for i in range(servers):
                for _ in range(world.rng.choice((0, 1, 5, 40))):
                    world.ask(i)
        assert world.worst < servers, seed
        assert sum(world.admitted) >= 60 + 10, "they use the limit, and what drains"


@pytest.mark.parametrize("servers", [2, 4])
def test_large_requests_exceed_it_by_no_more_than_one_of_each_other_server(servers):
    for seed in range(3):
        world = World(servers, limit=1000, seed=seed)
        world.run(2)
        for _ in range(200):
            world.run(world.rng.random() * 0.1)
            for i in range(servers):
                world.ask(i, world.rng.choice((1, 50, 300)))
        assert world.worst <= (servers - 1) * 300


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_a_busy_server_uses_the_shares_of_idle_ones(servers):
    world = World(servers, limit=60)
    world.run(2)
    answers = []
    for _ in range(200):
        answers.append(world.ask(0))
        if answers[-1] == "later":
            world.run(0.1)
    assert world.admitted[0] >= 60 and answers[-1] == "no" and world.worst < 1
    world.run(1)
    assert world.ask(1) in ("yes", "no") and world.worst < servers
    world.run(60)
    assert world.ask(1) == "yes", "what was claimed and not used was given back"


def test_servers_that_do_not_hear_each_other_have_their_fixed_shares():
    world = World(3, limit=60, loss=1.0)
    world.run(5)
    for _ in range(100):
        for i in range(3):
            assert world.ask(i) != "later"
    assert world.admitted == [20, 20, 20] and world.worst == 0


def test_after_servers_lose_each_other_each_has_its_fixed_share_at_most_once_more():
    world = World(2, limit=60)
    world.run(2)
    while world.ask(0) != "no":
        world.run(0.05)
    assert world.admitted[0] >= 60
    world.loss = 1.0
    world.run(FRESH_SECONDS + 1)
    before = sum(world.admitted)
    for _ in range(100):
        world.ask(0)
        world.ask(1)
    assert sum(world.admitted) - before <= 30 + 4


def test_a_server_that_comes_late_learns_what_is_used():
    world = World(2, limit=60)
    world.loss = 1.0
    world.run(2)
    for _ in range(40):
        world.ask(0)
    world.loss = 0.0
    world.run(2)
    for _ in range(200):
        if world.ask(1) == "later":
            world.run(0.1)
    assert world.admitted[0] == 30 and world.worst < 2


@pytest.mark.parametrize("servers", [2, 3])
def test_what_is_open_at_once(servers):
    for seed in range(3):
        world = World(servers, limit=12, seed=seed)
        world.run(2)
        for _ in range(300):
            world.run(world.rng.random() * 0.2)
            i = world.rng.randrange(servers)
            for _ in range(world.rng.choice((1, 3, 12))):
                world.open(i)
            for count in world.counts:
                while count.open and world.rng.random() < 0.5:
                    count.release()
        assert 12 - servers <= world.peak < 12 + servers
    world = World(servers, limit=12)
    world.run(2)
    while world.counts[0].open < 12:
        if not world.open(0):
            world.run(0.1)
    world.run(0.5)
    assert not world.open(0) and not world.open(1)
