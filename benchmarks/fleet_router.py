"""Measures what the router of a fleet adds to the first token: streams that are routed, against streams that are sent
to the same replicas directly, in turns.

    python -m benchmarks.fleet_router                           2 replicas of kvasir-mini, 32 streams
    python -m benchmarks.fleet_router --replicas 3 --rounds 40 --prompt 800

A round sends the streams at once, first directly (one replica after the other), then by the router, or the other way
round; each ends after a few tokens. Prompts are random, so nothing is in a prefix cache. `added` is the difference of
the medians of all first tokens. `routing` is the time in which the router itself computes for one request, alone and
with the prefix caches full: the processor time that it takes from the event loop. The aim: at most 1 ms added.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from statistics import median

from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.replicas import fleet_of
from kvasir.config import EngineOptions
from kvasir.engine.client import Engine
from kvasir.fleet.engine import FleetEngine
from kvasir.fleet.replica import Routed
from kvasir.types import Request, SamplingParams


def requests(rng: random.Random, count: int, prompt: int) -> list[Request]:
    params = SamplingParams(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    return [
        Request(f"{rng.random()}", tuple(rng.randrange(5, 900) for _ in range(prompt)), params) for _ in range(count)
    ]


async def first_token(engine: Engine, request: Request) -> float:
    """Seconds."""
    begun, first = time.perf_counter(), 0.0
    async for delta in engine.submit(request):
        if not first and delta.token_ids:
            first = time.perf_counter() - begun
    return first


async def direct(fleet: FleetEngine, asked: list[Request]) -> list[float]:
    engines = [replica.engine for replica in fleet.replicas]
    return await asyncio.gather(*(first_token(engines[i % len(engines)], r) for i, r in enumerate(asked)))


async def routed(fleet: FleetEngine, asked: list[Request]) -> list[float]:
    return await asyncio.gather(*(first_token(fleet, r) for r in asked))


def routing(fleet: FleetEngine, asked: list[Request]) -> float:
    """Median seconds in which the router computes for one request: its blocks' hashes, all costs, the choice."""
    found = []
    for request in asked:
        entry = Routed.of(request, 0.0)
        begun = time.perf_counter()
        replica = fleet._choose(entry)
        assert replica is not None
        replica.enter(entry, fleet._predicted(replica, entry))
        found.append(time.perf_counter() - begun)
        replica.leave(entry)
    return median(found)


async def measure(given: argparse.Namespace) -> dict:
    options = EngineOptions(given.model, max_model_len=1024, max_num_seqs=64)
    fleet = fleet_of(options, FleetOptions(given.replicas), hang_seconds=60.0)
    await fleet.start()
    rng, found = random.Random(1), {"direct": [], "routed": []}
    try:
        for i in range(given.rounds + 2):
            ways = [("direct", direct), ("routed", routed)]
            for name, way in ways if i % 2 else reversed(ways):
                seconds = await way(fleet, requests(rng, given.streams, given.prompt))
                if i >= 2:  # the first ones warm up
                    found[name] += seconds
        own = routing(fleet, requests(rng, 200, given.prompt))
        blocks = sum(len(replica.map) for replica in fleet.replicas)
    finally:
        await fleet.stop()
    medians = {name: 1000 * median(seconds) for name, seconds in found.items()}
    return {
        "replicas": given.replicas,
        "streams": given.streams,
        "prompt": given.prompt,
        "rounds": given.rounds,
        "direct_ms": round(medians["direct"], 3),
        "routed_ms": round(medians["routed"], 3),
        "added_ms": round(medians["routed"] - medians["direct"], 3),
        "routing_ms": round(1000 * own, 4),
        "known_blocks": blocks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvasir-mini")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=20)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
