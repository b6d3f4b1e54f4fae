"""The routers of a fleet compared live: conversations on 3 replicas of kvasir-mini, hits of their caches and goodput.

    python -m benchmarks.fleet_policies                       every policy in each of five rounds
    python -m benchmarks.fleet_policies --rate 40 --users 12 --rounds 1

Users have conversations: each prompt of theirs begins with all that was said before, and all begin with one of a few
common instructions. Arrivals are Poisson, the same for every policy; a turn waits for the one before it. A replica's
cache is too small for the conversations of all users. `hits` is the share of prompt tokens that were cached, `goodput`
the requests per second that met both targets, which suit a model of this size. All replicas share this machine, so the
work that a hit saves speeds up the others as well.

Other work on the machine disturbs single runs. So the policies take turns, each round begins with another one, and the
table has medians over the rounds, with the lowest and the highest of what varies most.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.replicas import fleet_of
from kvasir.cli.show import print_table
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.fleet.cost import POLICIES
from kvasir.fleet.engine import FleetEngine
from kvasir.fleet.members import ASK_SECONDS
from kvasir.types import Request, SamplingParams

COMMON, COMMON_TOKENS = 4, 192  # instructions, and their length
TURNS, SAID, ANSWER = 6, 96, 24  # of a conversation; tokens of a turn and of its answer
CONTEXT = COMMON_TOKENS + TURNS * (SAID + ANSWER) + 64
COLUMNS = ("policy", "hits", "goodput_per_s", "in_time", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
VARIED = ("goodput_per_s", "ttft_p99_ms")  # of which the table also has the lowest and the highest
ROUNDS = 5


@dataclass(slots=True)
class Served:
    """One request, in seconds."""

    prompt: int
    cached: int
    ttft: float
    tpot: float


def ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(5, 900) for _ in range(count))


async def ask(fleet: FleetEngine, name: str, prompt: tuple[int, ...]) -> tuple[Served, tuple[int, ...]]:
    """One turn: its times, and the ids of its answer. The time to the first token counts from now."""
    params = SamplingParams(max_tokens=ANSWER, seed=0, temperature=0.0, ignore_eos=True)
    begun, first, cached, answer = time.perf_counter(), 0.0, 0, ()
    async for delta in fleet.submit(Request(name, prompt, params)):
        if delta.token_ids and not answer:
            first, cached = time.perf_counter(), delta.cached_tokens
        answer += delta.token_ids
    pace = (time.perf_counter() - first) / (ANSWER - 1)
    return Served(len(prompt), cached, first - begun, pace), answer


async def talk(fleet: FleetEngine, user: int, at: list[float], begun: float) -> list[Served]:
    """A conversation whose turns come at these times, or when the one before has ended."""
    rng, found = random.Random(user), []
    prompt = ids(random.Random(f"common {user % COMMON}"), COMMON_TOKENS)
    for turn, when in enumerate(at):
        await asyncio.sleep(max(0.0, begun + when - time.perf_counter()))
        prompt += ids(rng, SAID)
        served, answer = await ask(fleet, f"{user}-{turn}", prompt)
        prompt += answer
        found.append(served)
    return found


def arrivals(users: int, rate: float) -> list[list[float]]:
    """The times of each user's turns: all turns are Poisson arrivals, and each round has one of every user."""
    rng, at, found = random.Random(7), 0.0, [list[float]() for _ in range(users)]
    for _ in range(TURNS):
        for user in rng.sample(range(users), users):
            at += rng.expovariate(rate)
            found[user].append(at)
    return found


async def measure(policy: str, given: argparse.Namespace) -> report.Row:
    blocks = given.memory // 16
    options = EngineOptions("kvasir-mini", max_model_len=CONTEXT, max_num_seqs=32, block_size=16, num_blocks=blocks)
    fleet = fleet_of(options, FleetOptions(given.replicas, router_policy=policy), hang_seconds=60.0)
    await fleet.start()
    try:
        rng = random.Random(0)
        for turn in range(2):  # then the router has heard how long steps take
            await asyncio.gather(*(ask(fleet, f"{turn} {i}", ids(rng, 200)) for i in range(4 * given.replicas)))
            await asyncio.sleep(2 * ASK_SECONDS)
        begun = time.perf_counter()
        talks = (talk(fleet, user, at, begun) for user, at in enumerate(arrivals(given.users, given.rate)))
        served = [one for found in await asyncio.gather(*talks) for one in found]
        seconds = time.perf_counter() - begun
    finally:
        await fleet.stop()
    good = sum(1000 * s.ttft <= given.ttft and 1000 * s.tpot <= given.tpot for s in served)
    ttfts = sorted(1000 * s.ttft for s in served)
    return {
        "policy": policy,
        "requests": len(served),
        "hits": sum(s.cached for s in served) / sum(s.prompt for s in served),
        "goodput_per_s": good / seconds,
        "in_time": good / len(served),
        "ttft_p50_ms": median(ttfts),
        "ttft_p99_ms": ttfts[int(0.99 * len(ttfts))],
        "tpot_p50_ms": median(1000 * s.tpot for s in served),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--users", type=int, default=48)
    parser.add_argument("--rate", type=float, default=60.0, help="turns per second")
    parser.add_argument("--memory", type=int, default=16_000, help="tokens of each replica's cache")
    parser.add_argument("--ttft", type=float, default=50.0, help="target: milliseconds to the first token")
    parser.add_argument("--tpot", type=float, default=10.0, help="target: milliseconds per further token")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    given = parser.parse_args()
    rows: list[report.Row] = []
    for number in range(given.rounds):
        rows += [asyncio.run(measure(policy, given)) | {"round": number} for policy in turns(number)]
    medians = summary(rows)
    print_table(["policy", *(f">{n}" for n in COLUMNS[1:])], ([_cell(m, n) for n in COLUMNS] for m in medians))
    if given.out:
        options = {name: value for name, value in vars(given).items() if name != "out"}
        facts = {"options": options, "machine": machine_facts(), "software": software_facts()}
        path = given.out / f"fleet-policies-{time.strftime('%Y-%m-%d')}.json"
        report.write_json(path, facts | {"medians": medians, "rows": rows})


def turns(number: int) -> tuple[str, ...]:
    """The policies in the order of a round: after as many rounds as policies, each was at each place once."""
    first = number % len(POLICIES)
    return (*POLICIES[first:], *POLICIES[:first])


def summary(rows: list[report.Row]) -> list[report.Row]:
    """For each policy the medians over its rounds, and the ranges of what varies."""
    found = []
    for policy in POLICIES:
        of_it = [row for row in rows if row["policy"] == policy]
        medians = {name: median(row[name] for row in of_it) for name in COLUMNS[1:]}
        ranges = {f"{n}_range": [min(row[n] for row in of_it), max(row[n] for row in of_it)] for n in VARIED}
        found.append({"policy": policy, "rounds": len(of_it)} | medians | ranges)
    return found


def _cell(row: report.Row, name: str) -> str:
    if name == "policy":
        return str(row[name])
    lowest, highest = row.get(f"{name}_range", (None, None))
    return f"{row[name]:.3g}" + (f" ({lowest:.3g}-{highest:.3g})" if lowest is not None else "")


if __name__ == "__main__":
    main()
