"""The requests of `kvasir bench prefix`: users whose prompts share much, some or nothing, with ids from a seed.

A user sends one request after another; all users of a round run concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvasir.cli.bench.measure import SEED, all_of

TURNS = 4  # requests of a user, one after another
LONG = 8  # length of a long text in turns
BRANCHES, LEVELS = 2, 3  # shape of a tree of thoughts

Ids = tuple[int, ...]


class BenchRequest(Protocol):
    def __call__(self, prompt: Ids, n: int = 1) -> Awaitable[Sequence[Ids]]:
        """The sampled ids of each of `n` choices."""
        ...


class User:
    """One user of a round. shared, own: fresh ids for `turns` turns; shared ids are the same for all users."""

    def __init__(self, ask: BenchRequest, turn: int, vocab_size: int, key: tuple[int, ...], number: int):
        """turn: tokens per turn. key: identifies the round."""
        self.ask = ask
        self._turn, self._vocab_size = turn, vocab_size
        self._shared, self._own = (np.random.default_rng((SEED, *key, stream)) for stream in (0, number + 1))

    def shared(self, turns: int = 1) -> Ids:
        return self._draw(self._shared, turns)

    def own(self, turns: int = 1) -> Ids:
        return self._draw(self._own, turns)

    def _draw(self, random: np.random.Generator, turns: int) -> Ids:
        return tuple(random.integers(0, self._vocab_size, turns * self._turn).tolist())


async def few_shot(user: User) -> None:
    """Questions after one long header, the same for all users."""
    header = user.shared(LONG)
    for _ in range(TURNS):
        await user.ask(header + user.own())


async def multi_turn(user: User) -> None:
    """A conversation that grows by each answer and the next turn."""
    talk: Ids = ()
    for _ in range(TURNS):
        talk += user.own()
        talk += (await user.ask(talk))[0]


async def tree_of_thought(user: User) -> None:
    """A long problem; several thoughts continue it, and several continue each of these."""
    level = [user.own(LONG)]
    for _ in range(LEVELS):
        thoughts = await asyncio.gather(*(user.ask(node, BRANCHES) for node in level))
        level = [node + thought for node, several in zip(level, thoughts, strict=True) for thought in several]


async def agents(user: User) -> None:
    """A long prompt with tools, the same for all; a task; then calls and their results, twice as long as a turn."""
    transcript = user.shared(LONG) + user.own()
    for _ in range(TURNS):
        transcript += (await user.ask(transcript))[0] + user.own(2)


async def no_reuse(user: User) -> None:
    """Long prompts, each sent once, for which the cache has only a cost."""
    for _ in range(TURNS):
        await user.ask(user.own(LONG))


NO_REUSE = "no-reuse"
WORKLOADS: dict[str, Callable[[User], Awaitable[None]]] = {
    "few-shot": few_shot,
    "multi-turn": multi_turn,
    "tree-of-thought": tree_of_thought,
    "agents": agents,
    NO_REUSE: no_reuse,
}


@dataclass(frozen=True, slots=True)
class Load:
    """users: number of concurrent users. turn, answer: lengths in tokens."""

    users: int
    turn: int
    answer: int


@dataclass(slots=True)
class Exchange:
    """A request and its results: ids and log-probabilities (if requested) of each choice, and seconds to the first
    token."""

    prompt: Ids
    n: int
    answers: list[Ids] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    ttft: float = 0.0


async def play(
    name: str, load: Load, vocab_size: int, number: int, answer: Callable[[Exchange], Awaitable[None]]
) -> list[Exchange]:
    """Round `number` of a workload: the exchanges, user by user, in the order in which they were sent.

    answer: fills in the results. Two rounds or workloads share ids only by chance.
    """
    key = list(WORKLOADS).index(name), number
    logs: list[list[Exchange]] = [[] for _ in range(load.users)]

    def asker(log: list[Exchange]) -> BenchRequest:
        async def ask(prompt: Ids, n: int = 1) -> Sequence[Ids]:
            exchange = Exchange(prompt, n)
            log.append(exchange)
            await answer(exchange)
            return exchange.answers

        return ask

    users = [User(asker(log), load.turn, vocab_size, key, i) for i, log in enumerate(logs)]
    await all_of([WORKLOADS[name](user) for user in users])
    return [exchange for log in logs for exchange in log]


async def blocks_needed(name: str, load: Load, block_size: int) -> int:
    """Number of blocks for everything in a round, or for everything that runs at once without sharing, whichever is
    larger."""
    running = most = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal running, most
        exchange.answers = [tuple(range(i * load.answer, (i + 1) * load.answer)) for i in range(exchange.n)]
        own = exchange.n * -(-(len(exchange.prompt) + load.answer) // block_size)
        running += own
        most = max(most, running)
        await asyncio.sleep(0)  # let the others send their requests too
        running -= own

    exchanges = await play(name, load, 1 << 15, 0, answer)
    places: set[int] = set()  # blocks in the tree, by their ids and the path to them
    for exchange in exchanges:
        for ids in (exchange.prompt + answer for answer in exchange.answers):
            place = 0
            for i in range(0, len(ids), block_size):
                place = hash((place, ids[i : i + block_size]))
                places.add(place)
    spare = sum(exchange.n for exchange in exchanges)  # a partly filled block is copied before it is freed
    return max(len(places) + spare, most)
