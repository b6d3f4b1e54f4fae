"""The journal against a simulated engine in which some requests are poison.

Every other request must end with its exact tokens, every poison one must fail or come to its end, and few engines may
die on the way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.journal import Journal
from kvasir.types import Delta, FinishReason, Request, SamplingParams
from tests.examples import examples

KINDS = ("added", "queued", "joined", "later", "each", "company", "chance")
DEADLY = ("added", "queued", "joined", "later")  # these can never end
MOST_TOKENS = 12


def token(name: str, index: int) -> int:
    return hash((name, index)) % 1000


class Death(Exception):
    pass


@dataclass
class Asked:
    """kind: how it kills, "" for a harmless request. after: of "later", the tokens that it gives in all; of "each",
    those of one life."""

    name: str
    max_tokens: int
    kind: str = ""
    after: int = 0
    got: list[int] = field(default_factory=list)


@dataclass
class Engine:
    """One life: it adds what it is sent, computes `rows` at once, each for some steps until its first token."""

    world: World
    rows: int
    waiting: list[str] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)  # tokens of this life, below 0 while the prompt is computed

    def add(self, request: Request) -> None:
        asked = self.world.asked[request.id]
        assert list(request.resume_ids[0] if request.resume_ids else ()) == asked.got
        self.world.journal.take_report(request.id)
        if asked.kind == "added":
            raise Death
        self.world.journal.take_report(None)
        self.waiting.append(request.id)

    def step(self) -> list[Delta]:
        if any(self.world.asked[name].kind == "queued" for name in self.waiting):
            raise Death
        joins = self.waiting[: self.rows - len(self.running)]
        del self.waiting[: len(joins)]
        if joins:
            self.world.journal.take_report(joins)
        self.running |= {name: -self.world.rng.randint(0, 3) for name in joins}
        company = [name for name in self.running if self.world.asked[name].kind == "company"]
        if len(company) > 1:
            raise Death
        return [d for name in list(self.running) if (d := self._token(self.world.asked[name]))]

    def _token(self, asked: Asked) -> Delta | None:
        steps, count = self.running[asked.name], len(asked.got)
        if asked.kind == "joined" or (asked.kind == "chance" and self.world.rng.random() < 0.3):
            raise Death
        if (asked.kind == "later" and count >= asked.after) or (asked.kind == "each" and steps > asked.after):
            raise Death
        self.running[asked.name] += 1
        if steps < 0:
            return None
        last = count + 1 == asked.max_tokens
        if last:
            del self.running[asked.name]
        return Delta(asked.name, 0, (token(asked.name, count),), finish_reason=FinishReason.LENGTH if last else None)


@dataclass
class World:
    asked: dict[str, Asked]
    rng: random.Random
    journal: Journal = field(default_factory=Journal)
    lives: int = 0
    failed: set[str] = field(default_factory=set)

    def run(self, rows: int, arriving: list[Asked], most_lives: int) -> None:
        engine: Engine | None = None
        while arriving or self.journal.entries:
            for asked in [arriving.pop(0) for _ in range(min(len(arriving), self.rng.choice((0, 1, 5, 50))))]:
                self.journal.add(Request(asked.name, (1,), SamplingParams(max_tokens=asked.max_tokens, seed=0)))
            if engine is None:
                engine, self.lives = Engine(self, rows), self.lives + 1
                assert self.lives <= most_lives, "a crash loop"
            try:
                sent = self.journal.to_send()
                assert sent or engine.waiting or engine.running or not self.journal.entries, "nothing goes on"
                for request in sent:
                    engine.add(request)
                for delta in engine.step():
                    assert self.journal.take(delta)
                    self.asked[delta.id].got += delta.token_ids
            except Death:
                engine = None
                self.failed |= {request.id for request in self.journal.death()}


def poison(number: int) -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked, st.just(f"p{number}"), st.integers(1, MOST_TOKENS), st.sampled_from(KINDS), st.integers(0, 4)
    )


@examples(150)
@given(st.data(), st.integers(1, 40), st.integers(0, 4), st.integers(1, 16), st.integers(0, 1 << 30))
def test_the_innocent_end_with_their_tokens_the_poisonous_fail_and_few_engines_die(data, innocents, bad, rows, seed):
    rng = random.Random(seed)
    asked = [Asked(f"r{i}", rng.randint(1, MOST_TOKENS)) for i in range(innocents)]
    asked += [data.draw(poison(i)) for i in range(bad)]
    rng.shuffle(asked)
    world = World({a.name: a for a in asked}, rng)
    depth = ceil(log2(len(asked))) + 6
    slow = sum(a.max_tokens for a in asked if a.kind in ("each", "company", "chance"))  # a token may cost a life
    world.run(rows, list(asked), 6 + (bad + slow) * depth)
    for a in asked:
        whole = [token(a.name, i) for i in range(a.max_tokens)]
        if a.kind in ("", "company"):
            assert a.got == whole and a.name not in world.failed
        deadly = a.kind in DEADLY and not (a.kind == "later" and a.after >= a.max_tokens)
        assert (a.name in world.failed) == (a.got != whole)
        assert not deadly or a.name in world.failed
        assert a.got == whole[: len(a.got)]


def lives_of(kind: str, innocents: int, after: int = 0, max_tokens: int = 100, count: int = 1) -> int:
    asked = [Asked(f"r{i}", 100) for i in range(innocents)]
    asked += [Asked(f"p{i}", max_tokens, kind, after) for i in range(count)]
    world = World({a.name: a for a in asked}, random.Random(1))
    world.run(64, asked, 10_000)
    return world.lives


def test_one_poison_request_among_many_costs_a_logarithm_of_engines():
    assert lives_of("joined", 1) <= 5
    assert lives_of("joined", 63) <= 10
    assert lives_of("later", 63, after=50) <= 11
    assert lives_of("joined", 60, count=4) <= 4 * 8


def test_a_request_with_one_token_per_engine_process_ends():
    assert lives_of("each", 5, after=0) <= 101


def test_two_that_kill_together_do_not_cost_a_life_for_each_token():
    assert lives_of("company", 20, count=2) <= 30
