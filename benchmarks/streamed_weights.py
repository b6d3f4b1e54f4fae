"""Measures weights that are streamed from disk: tokens per second against what the disk allows, by users.

    python -m benchmarks.streamed_weights                        qwen3-0.6b in bfloat16, in 500 MiB
    python -m benchmarks.streamed_weights --quantize q8 --memory 300 --users 1 32 128

The limit is the rate at which the layers of a step are read and checked with nothing else to do; it is measured before
and after each row, since disks of virtual machines vary, and reads go past the page cache. A step is not shorter than
the bytes of a step divided by this rate; `of the limit` is that bound over the median step. `waits` is the share of the
time in which the computing threads waited for a layer. Memory is what the process has touched (RssAnon) since before
the model was loaded; the KV cache and the buffers of a step are part of it.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import shapes
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.ops.linear.packed import allocate
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Request, SamplingParams
from kvasir.weights.find import find_model
from kvasir.weights.packed_file import PackedFile, open_packed

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--quantize", choices=("q8", "q4"), help="as of kvasir serve")
    parser.add_argument("--memory", type=int, default=500, help="MiB for the weights")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=12, help="of an answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ["KVASIR_PACKED"] = f"{folder}/packed"
        shapes.write(shapes.SHAPES[args.shape], Path(folder) / "model")
        measure(f"{folder}/model", args)


def measure(model: str, args: argparse.Namespace) -> None:
    budget = args.memory << 20
    wish = LoadOptions("program", quantize=args.quantize or "", threads=args.threads, weights_memory=budget)
    begun = time.perf_counter()
    loaded = load_model(find_model(model), options=wish)  # packs the file
    assert loaded.stream, f"the weights fit into {args.memory} MiB"
    packing = time.perf_counter() - begun
    layers, per_step = loaded.stream.numbers, loaded.stream.per_step
    loaded.stream.close()
    del loaded
    gc.collect()
    before = resident()
    core = build_core(
        EngineOptions(
            model, quantize=args.quantize, threads=args.threads, weights_memory=budget, max_model_len=512,
            max_num_seqs=max(args.users), speculate="off", prefix_cache=False,
        )
    )  # fmt: skip
    [path] = Path(os.environ["KVASIR_PACKED"]).glob("*.weights")
    file = open_packed(path.parent, path.stem)
    assert file
    print(*core.summary, sep="\n")
    print(f"packed in {packing:.1f} s; a step reads {per_step / 1e6:.0f} MB\n")
    print("| users | disk | step | tokens per second | of the limit | waits | memory |\n" + "|---" * 7 + "|")
    for number, users in enumerate(args.users):
        print_row(core, file, layers, per_step, users, args.tokens, number, before)
    file.close()
    core.close()


def print_row(
    core: EngineCore,
    file: PackedFile,
    layers: list[int],
    per_step: int,
    users: int,
    tokens: int,
    number: int,
    before: int,
) -> None:
    window = core.runner.executor.stream.window  # type: ignore[attr-defined]
    first, waited = disk_rate(file, layers), window.waited
    steps = run(core, users, tokens, number)
    waited = (window.waited - waited) / sum(steps)
    rate = (first + disk_rate(file, layers)) / 2
    step = median(steps[1:])
    print(
        f"| {users} | {rate / 1e9:.2f} GB/s | {step:.3f} s | {users / step:.2f} | {per_step / rate / step:.0%} "
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


def disk_rate(file: PackedFile, layers: list[int]) -> float:
    """Bytes per second of reading and checking these layers."""
    memory = allocate(max(file.layers[layer].nbytes for layer in layers))
    memory[:] = 0
    begun = time.perf_counter()
    for layer in layers:
        file.read(layer, memory)
    return sum(file.layers[layer].nbytes for layer in layers) / (time.perf_counter() - begun)


def resident() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
