"""`kvasir bench`: the performance of the engine in this process, compared with the limits of the machine."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, replace
from pathlib import Path

from kvasir.cli.bench.limits import Machine, limits
from kvasir.cli.bench.measure import MODES, Samples, Shape, kv_bytes, make_requests, warm_up, without_drafters
from kvasir.cli.bench.probe import ForeignLoad, Probe, probe
from kvasir.cli.bench.report import BenchRun, as_dict, best_probe, print_report, summarize, write
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.model_facts import Stored, TokenWork, experts_share, read_stored, token_work
from kvasir.cli.resolve import resolve
from kvasir.cli.show import bytes_text, count_text, fitted
from kvasir.cli.waiting import loaded, print_decided, progress_bar
from kvasir.config import EngineOptions
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.front import Front
from kvasir.errors import ConfigError

_FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of stored weights that are multiplied as floats


def run(
    engine: EngineOptions,
    mode: str,
    input_len: int,
    output_len: int,
    num_prompts: int,
    request_rate: float,
    repeats: int,
    out: Path | None,
    verbose: bool = False,
) -> None:
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}", f"expected one of {', '.join(MODES)}")
    if request_rate < 0:
        raise ConfigError(f"request_rate is {request_rate}", "give requests per second, or 0 for all at once")
    shape = Shape(input_len, output_len, 1 if mode == "latency" else num_prompts, request_rate)
    bench(AsyncLLM(**asdict(resolve(without_drafters(engine))[0])), mode, shape, repeats, out, verbose)


def bench(llm: AsyncLLM, mode: str, shape: Shape, repeats: int, out: Path | None = None, verbose: bool = False) -> dict:
    """Measures, prints the table, writes files into `out`; returns the contents of the JSON file. Raises KvasirError.

    Starts and stops `llm`.
    """
    machine = machine_facts()
    threads = llm.options.threads or machine["cores"]
    runs = asyncio.run(_measure(llm, mode, shape, repeats, threads, verbose))
    work = _work(llm, read_stored(llm.options.model, llm.options.revision))
    rows = summarize(runs, limits(_machine(llm, work, shape, best_probe(runs)), mode, shape))
    print_report(f"{llm.info.name}, {mode}: {_shape_text(mode, shape)}, {repeats} runs", rows, runs)
    print(fitted(_limit_text(work), sys.stdout))
    facts = {
        "mode": mode,
        "shape": asdict(shape),
        "model": asdict(llm.info),
        "machine": machine,
        "threads": threads,
        "software": software_facts(),
        "options": asdict(llm.options),
        "engine": list(llm.summary),
        "work": asdict(work),
    }
    result = as_dict(rows, runs, facts)
    for path in write(out, f"{llm.info.name}-{mode}", result, rows, runs) if out else []:
        print(f"wrote {path}")
    return result


async def _measure(llm: AsyncLLM, mode: str, shape: Shape, repeats: int, threads: int, verbose: bool) -> list[BenchRun]:
    async with loaded(llm):
        print_decided(llm.summary, verbose)
        make_requests(llm.front, shape, 1, run=0)  # raises before measuring if a request cannot fit
        await warm_up(llm.front)
        stored, info = read_stored(llm.options.model, llm.options.revision), llm.info
        numbers, nbytes = _numbers(llm, stored), _work(llm, stored).weight_bytes
        runs = []
        with progress_bar(f"{mode}, runs", repeats, still=True) as progress:
            for number in range(repeats):
                progress(number)
                gave = probe(info.device, numbers, threads, nbytes, info.executor == "eager")
                runs.append(await _run(llm.front, mode, shape, number, gave))
        return runs


async def _run(front: Front, mode: str, shape: Shape, number: int, gave: Probe) -> BenchRun:
    others = ForeignLoad()
    samples: Samples = {}
    figures = await MODES[mode](front, shape, number, samples)
    return BenchRun(figures, gave, others.share(), samples)


def _numbers(llm: AsyncLLM, stored: Stored) -> str:
    """The numbers that most products multiply: bytes where weights are quantized, else the dtype."""
    is_float = all(tensor.dtype in _FLOATS for tensor in stored.tensors if len(tensor.shape) > 1)
    quantized = llm.options.quantize not in (None, "none") or not is_float
    return "int8" if quantized and llm.info.executor == "program" else llm.info.dtype


def _work(llm: AsyncLLM, stored: Stored) -> TokenWork:
    """The work with the weights' size in the engine if known, else their size in the file."""
    work = token_work(stored.tensors, llm.info.vocab_size, experts_share(stored.metadata))
    return replace(work, weight_bytes=llm.info.weight_bytes_read or work.weight_bytes)


def _machine(llm: AsyncLLM, work: TokenWork, shape: Shape, gave: Probe) -> Machine:
    kv_token = kv_bytes(llm.info, shape.middle) / shape.middle
    return Machine(work, kv_token, gave, llm.options.max_num_seqs, bool(llm.info.drafters))


def _limit_text(work: TokenWork) -> str:
    macs = count_text(work.body_macs + work.head_macs)
    return f"the limit: {bytes_text(work.weight_bytes)} of weights a step, {macs} multiply-adds a token"


def _shape_text(mode: str, shape: Shape) -> str:
    lengths = f"{shape.input_len} prompt and {shape.output_len} output tokens"
    if mode == "latency":
        return f"one request of {lengths}"
    if mode == "load":
        return f"1 to {shape.num_prompts} requests at once, of {lengths}"
    rate = f" at {shape.request_rate:g} a second" if mode == "serve" and shape.request_rate else " at once"
    return f"{shape.num_prompts} requests of {lengths}{rate}"
