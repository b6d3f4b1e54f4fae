"""What a hand-over from a prefill replica to a decode replica costs a stream, by the length of its prompt.

    python -m benchmarks.hand_over qwen3-0.6b-Q4_K_M.gguf --prompts 64,512,1024,2048

One stream at a time, with a random prompt. `first` is the time to the first token, which the prefill replica computes;
`second` the time from there to the next one, which the decode replica computes once it has the blocks; `further` that
of the tokens after it. Blocks of earlier chunks are sent while later ones are computed, so `second` less `further` is
what the hand-over costs: the blocks of the last chunk, the move, and the tokens after the last whole block. `taken` is
the share of the prompt that came as blocks; the rest was computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.replicas import fleet_of
from kvasir.cli.show import print_table
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.fleet.engine import FleetEngine
from kvasir.types import Request, SamplingParams

TOKENS = 8  # of each answer
COLUMNS = ("prompt", "first_ms", "second_ms", "further_ms", "taken")
READY_SECONDS = 120.0  # for the weights to be identified


async def stream(fleet: FleetEngine, rng: random.Random, prompt: int) -> dict[str, float]:
    """One request: milliseconds, and the share of its prompt that came as blocks."""
    params = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    request = Request(f"{rng.random()}", tuple(rng.randrange(5, 900) for _ in range(prompt)), params)
    before = await taken(fleet)
    times = [time.perf_counter()]
    async for delta in fleet.submit(request):
        times += [time.perf_counter()] * bool(delta.token_ids)
    gaps = [1000 * (after - earlier) for earlier, after in pairwise(times)]
    share = (await taken(fleet) - before) / (prompt // fleet.info.block_size)
    return {"prompt": prompt, "first_ms": gaps[0], "second_ms": gaps[1], "further_ms": median(gaps[2:]), "taken": share}


async def taken(fleet: FleetEngine) -> int:
    """Blocks that were taken from the other replica so far."""
    tier = (await fleet.stats()).tiers.get("transfer")
    return tier.loads.get("loaded", 0) if tier else 0


async def measure(given: argparse.Namespace) -> list[dict[str, float]]:
    options = EngineOptions(
        given.model, max_model_len=4096, max_num_seqs=8, speculate="off", num_blocks=given.blocks or None
    )
    fleet = fleet_of(options, FleetOptions(prefill_replicas=1, decode_replicas=1), hang_seconds=60.0)
    await fleet.start()
    rng, rows = random.Random(1), []
    try:
        begun = time.monotonic()
        while not (await stream(fleet, rng, 256))["taken"] and time.monotonic() - begun < READY_SECONDS:
            await asyncio.sleep(0.2)
        for prompt in given.prompts:
            runs = [await stream(fleet, rng, prompt) for _ in range(given.rounds)]
            rows.append({name: median(run[name] for run in runs) for name in COLUMNS} | {"runs": runs})
    finally:
        await fleet.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", default="64,512,1024,2048", help="tokens; comma-separated list")
    parser.add_argument(
        "--blocks", type=int, help="of each engine's cache; few, so that its memory has been used before"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    given = parser.parse_args()
    given.prompts = [int(n) for n in given.prompts.split(",")]
    rows = asyncio.run(measure(given))
    print_table([f">{name}" for name in COLUMNS], ([f"{row[name]:.4g}" for name in COLUMNS] for row in rows))
    if given.out:
        name = Path(given.model).stem
        facts = {"model": name, "machine": machine_facts(), "software": software_facts(), "rows": rows}
        report.write_json(given.out / f"hand-over-{name}-{time.strftime('%Y-%m-%d')}.json", facts)


if __name__ == "__main__":
    main()
