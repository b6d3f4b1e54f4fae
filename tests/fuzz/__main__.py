"""`make fuzz`: every target for some seconds. One that fails leaves its input in build/fuzz/crashes.

python -m tests.fuzz [NAME ...] [--seconds 20] [--jobs 2]   fuzz all targets, or these
python -m tests.fuzz NAME FILE                              try one input again
python -m tests.fuzz --merge [NAME ...]                     minimise the corpus with what was found
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.run import Job, Outcome, fuzz, minimise, native_jobs, python_jobs
from tests.fuzz.target import NAMES, attempt, bounded_memory, load

SHOWN = 40  # lines of a failed target's log


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", nargs="*", help="targets (default: all), or one target and a file")
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--merge", action="store_true", help="minimise the corpus of the repository")
    options = parser.parse_args()
    if len(options.what) == 2 and Path(options.what[1]).is_file():
        return again(options.what[0], Path(options.what[1]))
    jobs = chosen(options.what)
    if options.merge:
        for job in jobs:
            print(f"{job.name}: {minimise(job)} inputs", flush=True)
        return 0
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda job: reported(fuzz(job, options.seconds)), jobs))
    return any(outcome.verdict != "held" for outcome in outcomes)


def chosen(names: list[str]) -> list[Job]:
    """The targets that can run here, with a line for those that cannot."""
    python, native = python_jobs(), native_jobs()
    if not python:
        print("atheris is not here: the Python targets do not run (pip install -e '.[fuzz]')")
    if not native:
        print("the native fuzzers are not built: the C ABI is not fuzzed (scripts/build_fuzzers.sh)")
    jobs = [job for job in (*python, *native) if not names or job.name in names]
    if unknown := set(names) - {job.name for job in (*python, *native)}:
        sys.exit(f"no target {', '.join(sorted(unknown))}; there are {', '.join(j.name for j in (*python, *native))}")
    return jobs


def reported(outcome: Outcome) -> Outcome:
    print(outcome.line(), flush=True)
    if outcome.verdict != "held":
        print("\n".join(outcome.log.splitlines()[-SHOWN:]))
        if outcome.crash:
            print(f"to see it again: python -m tests.fuzz {outcome.job.name} {outcome.crash}", flush=True)
    return outcome


def again(name: str, path: Path) -> int:
    """One input, in this process where it is Python's, so that a debugger can follow."""
    if name not in NAMES:
        job = next(job for job in native_jobs() if job.name == name)
        return subprocess.run([*job.command, str(path)], check=False).returncode
    target = load(name)
    with bounded_memory():
        attempt(target, path.read_bytes())
    print("held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
