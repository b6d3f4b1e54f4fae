"""Measures ranks and stages that are processes: the time of a meeting, and steps against steps of one process.

    python -m benchmarks.ranks                                   meetings, then llama-1b with 4 layers in Q8_0
    python -m benchmarks.ranks --stages 2                        the same with stages
    python -m benchmarks.ranks --shape qwen3-0.6b --layers 28 --rounds 40
    python -m benchmarks.ranks --meetings-only

A meeting sums as many floats as a row of a model has, and more. Ranks that spin have a processor each; ranks that sleep
wait on the futex each time, as they do with more threads than processors.

Steps are computed in turns, one with ranks directly after one without, over the same threads in all, so that what else
the machine does disturbs both; the figures are medians. On a machine with one memory the ratio shows what sharing
costs.

The model for sockets counts. t is the time of one process on one socket, N the number of sockets:

    ranks     t / N + meetings x time of a meeting     each has 1/N of the bytes and of the operations
    stages    t x (parts + N - 1) / (parts x N) + parts x (N - 1) x time of a meeting

A step of fewer rows than two parts is one part: stages then take as long as one process. Parts have so many rows that
they compute rather than read, so together they take as long as the step at once; a part passes through N stages, the
others follow it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import shapes
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.environment import engine_environment
from kvasir.ops import native
from kvasir.program.commands import LEAST, PARTS
from kvasir.program.lower import COLLECTIVES
from kvasir.program.shared import PAUSES, memory_file, segment_bytes
from kvasir.types import Request, SamplingParams

FLOATS = (1, 1024, 4096, 32768, 131072)
TOKENS = 24  # of an answer


# --- meetings ---------------------------------------------------------------------------------------


class Measured:
    """A rank's view of a segment. pauses: as of kvasir_ranks_open."""

    def __init__(self, fd: int, rank: int, size: int, pauses: int):
        import mmap

        self._memory = mmap.mmap(fd, segment_bytes(size))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        opened = native.declare("kvasir_ranks_open", ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int32] * 6)
        self._address = opened(start, rank, size, 0, 1, pauses, 600)
        self._measure = native.declare(
            "kvasir_ranks_measure", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
        )

    def microseconds(self, floats: int, meetings: int) -> float:
        x = np.zeros(floats, np.float32)
        self._measure(self._address, x.ctypes.data, floats, meetings // 10 + 1)
        return self._measure(self._address, x.ctypes.data, floats, meetings) / meetings / 1000


def meetings_of(fd: int, rank: int, size: int, pauses: int, rounds: int) -> dict[int, float]:
    """Microseconds of a meeting by its floats: the median of five series."""
    view = Measured(fd, rank, size, pauses)
    counts = {floats: max(20, rounds * 64 // (64 + floats // 16)) for floats in FLOATS}
    return {floats: median(view.microseconds(floats, count) for _ in range(5)) for floats, count in counts.items()}


def measure_meetings(size: int, pauses: int, rounds: int) -> dict[int, float]:
    fd = memory_file("measure", segment_bytes(size))
    os.set_inheritable(fd, True)
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", "--meet", *map(str, (fd, rank, size, pauses, rounds))],
            pass_fds=(fd,), env=engine_environment(),
        )
        for rank in range(1, size)
    ]  # fmt: skip
    found = meetings_of(fd, 0, size, pauses, rounds)
    for one in others:
        one.wait()
    os.close(fd)
    return found


def print_meetings(rounds: int) -> float:
    """Prints the table; returns the microseconds of a small meeting of two ranks that spin."""
    print("| ranks | waits by | " + " | ".join(f"{floats * 4} bytes" for floats in FLOATS) + " |")
    print("|---|---|" + "---|" * len(FLOATS))
    least = 0.0
    for size in (2, 4):
        for name, pauses in (("spinning", PAUSES), ("sleeping", -1)):
            if name == "spinning" and size > (os.cpu_count() or 1):
                continue
            found = measure_meetings(size, pauses, rounds)
            least = least or found[1024]
            print(f"| {size} | {name} | " + " | ".join(f"{us:.1f} µs" for us in found.values()) + " |", flush=True)
    return least


# --- steps ------------------------------------------------------------------------------------------


def core_of(model: str, args: argparse.Namespace, many: bool) -> EngineCore:
    threads = args.threads or os.cpu_count() or 1
    return build_core(
        EngineOptions(
            model, quantize=args.quantize, threads=threads, max_model_len=1024, max_num_batched_tokens=512,
            tensor_parallel=args.ranks if many else 1, pipeline_parallel=args.stages if many else 1,
            speculate="off", overlap=False, prefix_cache=False,
        )
    )  # fmt: skip


def run(core: EngineCore, users: int, prompt: int, number: int) -> tuple[float, list[float]]:
    """Seconds of the prompts, and of each later step."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    for user in range(users):
        ids = tuple((31 * (number * users + user) + 7 * i) % 1000 for i in range(prompt))
        core.add(Request(f"{number}-{user}", ids, params=params))
    times = []
    while core.has_work():
        begun = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begun)
    steps = TOKENS - 1
    return sum(times[:-steps]), times[-steps:]


def measure_steps(args: argparse.Namespace, meeting: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = {**shapes.SHAPES[args.shape]}
        config["num_hidden_layers"] = args.layers
        shapes.write(config, Path(folder))
        cores = {many: core_of(folder, args, many) for many in (False, True)}
        lead = cores[True].runner.executor.program.lead  # type: ignore[attr-defined]
        programs = getattr(lead, "programs", [lead])
        instructions = [one for program in programs for one in program.lowered.instructions]
        meetings = sum(one.op in COLLECTIVES or (one.op == "experts" and args.ranks > 1) for one in instructions)
        print(f"\n{args.shape}, {args.layers} layers, {args.quantize or 'bfloat16'}: {meetings} meetings a step")
        sockets = args.ranks * args.stages
        who = f"{args.ranks} ranks" if args.stages == 1 else f"{args.stages} stages of {args.ranks}"
        print(f"| users | what | 1 process | {who} | ratio | model of {sockets} sockets |\n" + "|---" * 6 + "|")
        for users, prompt in ((1, 16), (8, 16), (1, 512)):
            print_row(cores, args, users, prompt, meetings, meeting / 1000)
        for core in cores.values():
            core.close()


def on_sockets(one: float, args: argparse.Namespace, rows: int, meetings: int, meeting: float) -> float:
    """Milliseconds of a step on a socket for each process. one: of one process on one socket. meeting: of a meeting."""
    stage = one / args.ranks + meetings * meeting
    if args.stages == 1:
        return stage
    parts = max(1, min(rows // LEAST, PARTS * args.stages))
    return stage * (parts + args.stages - 1) / (parts * args.stages) + parts * (args.stages - 1) * meeting


def print_row(
    cores: dict[bool, EngineCore], args: argparse.Namespace, users: int, prompt: int, meetings: int, meeting: float
) -> None:
    found: dict[bool, list[Any]] = {many: [] for many in cores}
    for number in range(args.rounds):
        for many in (*cores,) if number % 2 else (*reversed(cores),):
            found[many].append(run(cores[many], users, prompt, number))
    what = "prompt" if prompt > 100 else "token"
    one, many = (
        1000 * median(first if what == "prompt" else median(rest) for first, rest in found[several])
        for several in cores
    )
    limit = on_sockets(one, args, prompt if what == "prompt" else users, meetings, meeting)
    print(
        f"| {users} | {what} of {prompt} | {one:.2f} ms | {many:.2f} ms | {many / one:.2f} | {limit:.2f} ms |",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--meet"]:
        meetings_of(*map(int, sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="llama-1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quantize", choices=("q8", "q4"), default="q8", help="as of kvasir serve")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), help="in each stage (default: 2, with stages 1)")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, help="computing threads of all ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--meetings-only", action="store_true")
    args = parser.parse_args()
    args.ranks = args.ranks or (2 if args.stages == 1 else 1)
    meeting = print_meetings(20000)
    if not args.meetings_only:
        measure_steps(args, meeting)


if __name__ == "__main__":
    main()
