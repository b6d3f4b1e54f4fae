"""Measures weights that are streamed from disk: tokens per second against what the disk allows, by users.

    python -m benchmarks.streamed_weights                        qwen3-0.6b in bfloat16, in 500 MiB
    python -m benchmarks.streamed_weights --quantize q8 --memory 300 --users 1 32 128
    python -m benchmarks.streamed_weights --ranks 2              shared by ranks, each with a file of its own

The limit is the rate at which layers are read and checked with nothing else to do, from the files of all processes at
the same time; it is measured before and after each row, since disks of virtual machines vary, and reads go past the
page cache. A step is not shorter than the bytes of a step divided by this rate; `of the limit` is that bound over the
median step. `waits` is the share of the time in which the computing threads of the engine's process waited for a layer.
Memory is what all processes have touched (RssAnon) beyond what this one had before; the KV cache and the buffers of a
step are part of it.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil

from benchmarks import shapes
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.ops.linear.packed import allocate
from kvasir.types import Request, SamplingParams
from kvasir.weights.packed_file import PackedFile, open_packed

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--quantize", choices=("q8", "q4"), help="as of kvasir serve")
    parser.add_argument("--memory", type=int, default=500, help="MiB for the weights")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=12, help="of an answer")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ["KVASIR_PACKED"] = f"{folder}/packed"
        shapes.write(shapes.SHAPES[args.shape], Path(folder) / "model")
        measure(f"{folder}/model", args)


def measure(model: str, args: argparse.Namespace) -> None:
    begun = time.perf_counter()
    start(model, args).close()  # packs the files
    packing = time.perf_counter() - begun
    gc.collect()
    before = resident()
    core = start(model, args)
    stream = core.runner.executor.stream  # type: ignore[attr-defined]
    assert stream and stream.window, f"the weights fit into {args.memory} MiB"
    files = [open_packed(path.parent, path.stem) for path in Path(os.environ["KVASIR_PACKED"]).glob("*.weights")]
    print(*core.summary, sep="\n")
    print(f"packed in {packing:.1f} s; a step reads {stream.of_all / 1e6:.0f} MB\n")
    print("| users | disk | step | tokens per second | of the limit | waits | memory |\n" + "|---" * 7 + "|")
    for number, users in enumerate(args.users):
        print_row(core, [file for file in files if file], users, args.tokens, number, before)
    core.close()


def start(model: str, args: argparse.Namespace) -> EngineCore:
    return build_core(
        EngineOptions(
            model, quantize=args.quantize, threads=args.threads, weights_memory=args.memory << 20, max_model_len=512,
            max_num_seqs=max(args.users), speculate="off", prefix_cache=False, executor="program",
            tensor_parallel=args.ranks, pipeline_parallel=args.stages,
        )
    )  # fmt: skip


def print_row(core: EngineCore, files: Sequence[PackedFile], users: int, tokens: int, number: int, before: int) -> None:
    stream = core.runner.executor.stream  # type: ignore[attr-defined]
    first, waited = disk_rate(files, stream.numbers), stream.read[1]
    steps = run(core, users, tokens, number)
    waited = (stream.read[1] - waited) / sum(steps)
    rate = (first + disk_rate(files, stream.numbers)) / 2
    step = median(steps[1:])
    print(
        f"| {users} | {rate / 1e9:.2f} GB/s | {step:.3f} s | {users / step:.2f} | {stream.of_all / rate / step:.0%} "
        f"| {waited:.0%} | {(resident() - before) / 2**20:.0f} MiB |",
        flush=True,
    )


def run(core: EngineCore, users: int, tokens: int, number: int) -> list[float]:
    """Seconds of each step in which all users decode."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for user in range(users):
        ids = tuple((31 * (number * users + user) + 7 * i) % 1000 for i in range(PROMPT))
        core.add(Request(f"{number}-{user}", ids, params=params))
    times = []
    while core.has_work():
        begun = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begun)
    return times[1 - tokens :]


def disk_rate(files: Sequence[PackedFile], layers: Sequence[int]) -> float:
    """Bytes per second of reading and checking these layers, or as many others if a file has other layers, from all
    files at once."""
    chosen = {file: [one for one in layers if one in file.layers] or [*file.layers][: len(layers)] for file in files}
    places = {file: allocate(max(layer.nbytes for layer in file.layers.values())) for file in files}
    for place in places.values():
        place[:] = 0

    def read(file: PackedFile) -> int:
        for layer in chosen[file]:
            file.read(layer, places[file])
        return sum(file.layers[layer].nbytes for layer in chosen[file])

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(files)) as pool:
        total = sum(pool.map(read, files))
    return total / (time.perf_counter() - begun)


def resident() -> int:
    """Bytes of anonymous memory of this process and those that it started."""
    own = psutil.Process()
    return sum(map(_resident, (own.pid, *(child.pid for child in own.children()))))


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


if __name__ == "__main__":
    main()
