"""`python -m tests.fleet.chaos [--minutes N] [--seed N]`: load and every fault on fleets of real processes.

First a soak of `kvasir serve --replicas 3` (tests/soak): its replicas are killed, stopped, replaced and scaled, its
clients leave, do not read or are hostile, its disk is full. Then a server before replicas elsewhere, of which relays
break the connections (links.py). At last the same over network namespaces whose links go down, where they may be made
(namespaces.py). Prints a table of the faults; the exit status says whether anything was lost, leaked or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.fleet import namespaces
from tests.fleet.links import break_links, left_in
from tests.signals import heed
from tests.soak.__main__ import SLOW, table
from tests.soak.client import Tally
from tests.soak.soak import idle, soak

REPLICAS = 3
PARTS = {"soak": 0.6, "links": 0.25, "namespaces": 0.15}  # of the time
LONG = 120.0  # seconds of a soak from which on everything must have happened


def run_all(seconds: float, seed: int) -> dict[str, Tally]:
    """The parts one after another."""
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", flush=True)

    say("a fleet on one machine")
    found = {"soak": asyncio.run(soak(PARTS["soak"] * seconds, seed, say=say, replicas=REPLICAS))}
    if found["soak"].slowness < SLOW and PARTS["soak"] * seconds >= LONG:
        found["soak"].wrong += idle(found["soak"])
    say("replicas elsewhere, with connections that break")
    found["links"] = asyncio.run(break_links(PARTS["links"] * seconds, seed))
    if reason := namespaces.missing():
        say(f"skipped: network namespaces: {reason}")
    else:
        say("replicas in network namespaces, with links that go down")
        found["namespaces"] = namespaces.in_namespace(PARTS["namespaces"] * seconds, seed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**31) if options.seed is None else options.seed
    heed()
    print(f"chaos of {options.minutes:g} minutes, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        os.environ["TMPDIR"], os.environ["XDG_RUNTIME_DIR"] = folder, folder  # where the sockets of engines lie
        before = {path.name for path in Path("/dev/shm").glob("*")}
        found = run_all(60.0 * options.minutes, seed)
        wrong = [f"{part}: {line}" for part, tally in found.items() for line in tally.wrong]
        wrong += [f"left behind in the folder of sockets: {name}" for name in left_in(Path(folder))]
        wrong += [f"left behind in /dev/shm: {name}" for name in sorted(ours_in_memory() - before)]
        wrong += [f"left behind: process {line}" for line in processes_of(folder)]
    for part, tally in found.items():
        print(f"\n{part}\n{table(tally)}")
    for line in wrong[:50]:
        print(f"WRONG {line}")
    print(f"{len(wrong)} lost, leaked or wrong")
    return 1 if wrong else 0


def ours_in_memory() -> set[str]:
    """Names of Kvasir's files in shared memory; other tests may run beside this one."""
    return {path.name for path in Path("/dev/shm").glob("kvasir*") if "fuzz" not in path.name}


def processes_of(folder: str) -> list[str]:
    """The processes that were started with this folder and are still there."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR", "").startswith(folder):
                found.append(f"{process.pid}: {' '.join(process.info['cmdline'])[:200]}")
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
