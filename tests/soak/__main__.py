"""`python -m tests.soak [--seconds N] [--seed N] [--replicas N]`: soaks, prints what was done and survived, and says by
its status whether anything was lost, leaked or wrong."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from tests.signals import heed
from tests.soak.client import Tally
from tests.soak.soak import idle, soak

LONG = 60.0  # seconds from which on everything must have happened
SLOW = 3.0  # times slower than alone: a reader cannot lag behind an engine that is slowed down by others


def table(tally: Tally) -> str:
    """A line for each kind of load and harm."""
    counts = (tally.injected, tally.fired, tally.survived)
    rows = [(n, *(str(c[n]) for c in counts), f"{tally.longest.get(n, 0):.1f}") for n in sorted(tally.injected)]
    rows += [(n, "", "", str(c), "") for n, c in sorted(tally.survived.items()) if n not in tally.injected]
    rows += [(f"counter {name}, at most", str(count), "", "", "") for name, count in tally.seen.items()]
    titles = ("", "injected", "took effect", "survived", "longest, s")
    return "\n".join(f"{a:<40} {b:>9} {c:>11} {d:>9} {e:>10}" for a, b, c, d, e in (titles, *rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load and harm for a server.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--replicas", type=int, default=1, help="of a fleet; 1: a single engine")
    options = parser.parse_args()
    seed = random.randrange(2**31) if options.seed is None else options.seed
    heed()
    print(f"soak of {options.seconds:g} seconds, seed {seed}", flush=True)
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", flush=True)

    tally = asyncio.run(soak(options.seconds, seed, say=say, replicas=options.replicas))
    print(table(tally))
    if tally.slowness >= SLOW:
        print(f"this machine is {tally.slowness:.1f} times slower than alone: whether all had its effect is not judged")
    elif options.seconds >= LONG:
        tally.wrong += idle(tally)
    for line in tally.wrong[:50]:
        print(f"WRONG {line}")
    print(f"{len(tally.wrong)} lost, leaked or wrong")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
