"""`kvasir bench prefix MODEL`: the benefit of the prefix cache for prompts with shared prefixes, and its cost for
others.

The same rounds of requests go to engines with and without the cache, in turns, each round with fresh ids. The sampled
ids must be equal; in the unmeasured first round, all log-probabilities must be bit-identical too.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from kvasir.cli.bench.measure import SEED, Figures, of_steps, percentiles, without_drafters
from kvasir.cli.bench.probe import ForeignLoad, probe
from kvasir.cli.bench.report import BenchRun, summarize
from kvasir.cli.bench.workloads import (
    BRANCHES,
    LEVELS,
    LONG,
    NO_REUSE,
    TURNS,
    WORKLOADS,
    Exchange,
    Load,
    blocks_needed,
    play,
)
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.resolve import resolve
from kvasir.cli.show import number_text, print_table
from kvasir.cli.simulate import report
from kvasir.cli.waiting import print_decided, progress_bar
from kvasir.config import EngineOptions
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.front import Front
from kvasir.environment import user_path
from kvasir.errors import ConfigError, KvasirError
from kvasir.statistics import EngineStats
from kvasir.types import SamplingParams

OFF, ON, DISK = "off", "on", "disk"  # disk: a disk tier below the cache, for the workload without reuse

_DRAIN = 0.005  # seconds between checks of the tier's pending writes


@dataclass(frozen=True, slots=True)
class Ratio:
    """Throughput relative to that without the cache, over the rounds."""

    median: float
    min: float
    max: float

    @property
    def overhead(self) -> float:
        """Additional time, as a fraction."""
        return 1 / self.median - 1


def run(
    engine: EngineOptions,
    load: Load,
    repeats: int,
    workloads: Sequence[str],
    out: Path | None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Measures, prints a table, writes files into `out`; returns the contents of the JSON file. workloads: empty for
    all. Raises KvasirError."""
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        raise ConfigError(f"workload {unknown[0]!r}", f"expected some of {', '.join(WORKLOADS)}")
    if not engine.prefix_cache:
        raise ConfigError(
            "the prefix cache is disabled", "bench prefix runs with and without the cache: leave --no-prefix-cache out"
        )
    names = [name for name in WORKLOADS if name in (workloads or WORKLOADS)]
    engine = resolve(without_drafters(engine))[0]
    result = asyncio.run(_measure(engine, load, repeats, names, verbose))
    _print(result)
    if out:
        name = Path(engine.served_model_name or engine.model).name
        report.write(out, f"prefix-{name}", result, lambda figure: _plot(figure, result["workloads"], name))
    return result


async def _measure(
    engine: EngineOptions, load: Load, repeats: int, names: Sequence[str], verbose: bool
) -> dict[str, Any]:
    machine = machine_facts()
    found: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name in names:
        options = await _options(engine, name, load)
        async with _engines(options) as llms:
            if not facts:
                print_decided(llms[ON].summary, verbose)
            facts = {"model": asdict(llms[ON].info), "threads": engine.threads or machine["cores"]}
            found[name] = await measure_rounds(
                name, load, repeats, {v: llm.front for v, llm in llms.items()}, facts["threads"]
            )
            found[name]["engines"] = {v: list(llm.summary) for v, llm in llms.items()}
    shape = {**asdict(load), "turns": TURNS, "long": LONG, "branches": BRANCHES, "levels": LEVELS}
    facts |= {"mode": "prefix", "shape": shape, "seed": SEED, "machine": machine, "software": software_facts()}
    return {**facts, "options": asdict(engine), "workloads": found}


async def _options(engine: EngineOptions, name: str, load: Load) -> dict[str, EngineOptions]:
    """The options of each engine. Unless specified, memory for KV blocks is sized to hold one round, replacing the
    previous round's blocks."""
    if not engine.num_blocks and not engine.kv_memory:
        engine = replace(engine, num_blocks=1 + await blocks_needed(name, load, engine.block_size))
    engine = without_drafters(engine)
    plain = replace(engine, cache_dir=None, cache_disk=None, cache_write_share=None)
    options = {OFF: replace(plain, prefix_cache=False), ON: plain}
    return {**options, DISK: engine} if name == NO_REUSE else options


@asynccontextmanager
async def _engines(options: Mapping[str, EngineOptions]) -> AsyncIterator[dict[str, AsyncLLM]]:
    """All engines, loaded; an engine with a disk tier gets a temporary folder of its own."""
    async with AsyncExitStack() as stack:
        llms = {}
        for variant, wish in options.items():
            if variant == DISK:
                wish = replace(wish, cache_dir=stack.enter_context(_folder(wish.cache_dir)))
            llms[variant] = await stack.enter_async_context(AsyncLLM(**asdict(wish)))
        yield llms


def _folder(inside: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="kvasir-bench-", dir=user_path(inside) if inside else None)
    except OSError as error:
        raise ConfigError(f"no folder can be made in {inside}: {error.strerror}", "give another --cache-dir") from error


async def measure_rounds(
    name: str, load: Load, repeats: int, fronts: Mapping[str, Front], threads: int
) -> dict[str, Any]:
    """The record of a workload. fronts: by variant. Raises KvasirError if the variants' answers differ."""
    runs: dict[str, list[BenchRun]] = {variant: [] for variant in fronts}
    info = fronts[OFF].info
    with progress_bar(name, (1 + repeats) * len(fronts), still=True) as progress:
        for number in range(1 + repeats):
            gave, exchanges = probe(info.device, info.dtype, threads), {}
            for i, variant in enumerate(rotated(list(fronts), number)):
                others = ForeignLoad()
                exchanges[variant], figures = await _play(name, load, number, fronts[variant], number == 0)
                if number:
                    runs[variant].append(BenchRun(figures, gave, others.share()))
                progress(number * len(fronts) + i + 1)
            for variant in fronts:
                check_equal(f"{name}, round {number}, cache {variant}", exchanges[OFF], exchanges[variant])
    return {
        "about": " ".join((WORKLOADS[name].__doc__ or "").split()),
        "requests": len(exchanges[OFF]),
        "variants": {variant: _variant(runs[OFF], own) for variant, own in runs.items()},
    }


def rotated(variants: list[str], number: int) -> list[str]:
    """The variants in an order that changes from round to round."""
    shift = number % len(variants)
    return variants[shift:] + variants[:shift]


def _variant(off: Sequence[BenchRun], own: Sequence[BenchRun]) -> dict[str, Any]:
    def ratio(seconds: str) -> dict[str, float]:
        found = ratio_to([run.figures[seconds] for run in off], [run.figures[seconds] for run in own])
        return {**asdict(found), "overhead": found.overhead}

    return {
        "of_off": ratio("duration_s"),
        "cpu_of_off": ratio("cpu_s"),
        "figures": {row.name: {"median": row.median, "min": row.min, "max": row.max} for row in summarize(own, {})},
        "runs": [asdict(run) for run in own],
    }


def ratio_to(off: Sequence[float], own: Sequence[float]) -> Ratio:
    """off, own: seconds of the same rounds."""
    shares = [theirs / ours for theirs, ours in zip(off, own, strict=True)]
    return Ratio(median(shares), min(shares), max(shares))


def check_equal(where: str, plain: Sequence[Exchange], cached: Sequence[Exchange]) -> None:
    """Raises KvasirError if a result with the cache is not bit-identical to the result without it."""
    for i, (a, b) in enumerate(zip(plain, cached, strict=True)):
        if (a.prompt, a.answers, a.logprobs) != (b.prompt, b.answers, b.logprobs):
            raise KvasirError(
                f"{where}: answer {i} differs from the one computed without the cache", "please report this as a bug"
            )


# -- one round ---------------------------------------------------------------------------------------------


async def _play(
    name: str, load: Load, number: int, front: Front, with_logprobs: bool
) -> tuple[list[Exchange], Figures]:
    async def answer(exchange: Exchange) -> None:
        await _answer(front, exchange, load.answer, with_logprobs)

    before, cpu, begun = await front.stats(), time.process_time(), time.perf_counter()
    exchanges = await play(name, load, front.info.vocab_size, number, answer)
    ended = time.perf_counter()
    while (after := await front.stats()).tier_queued_bytes:  # do not overlap with the next engine's round
        await asyncio.sleep(_DRAIN)
    figures = _figures(exchanges, ended - begun, before, after) | {"cpu_s": time.process_time() - cpu}
    return exchanges, figures | {"drain_s": time.perf_counter() - ended if after.tier_saves else 0.0}


async def _answer(front: Front, exchange: Exchange, max_tokens: int, with_logprobs: bool) -> None:
    """Greedy for a single choice, sampled for several. Raises KvasirError if the request failed."""
    params = SamplingParams(
        n=exchange.n,
        temperature=0.0 if exchange.n == 1 else 1.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=SEED,
        logprobs=0 if with_logprobs else None,
    )
    request, begun = front.resolve(exchange.prompt, params), time.perf_counter()
    ids: list[list[int]] = [[] for _ in range(exchange.n)]
    logprobs: list[list[float]] = [[] for _ in range(exchange.n)]
    async with aclosing(front.engine.submit(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            if delta.error:
                raise KvasirError(f"a request failed: {delta.error}", "see the engine's log above")
            exchange.ttft = exchange.ttft or time.perf_counter() - begun
            ids[delta.index] += delta.token_ids
            logprobs[delta.index] += (entry.logprob for entry in delta.logprobs)
    if any(len(one) != max_tokens for one in ids):
        raise KvasirError(f"the requests produced {[*map(len, ids)]} tokens, expected {max_tokens} each")
    exchange.answers, exchange.logprobs = [*map(tuple, ids)], [*map(tuple, logprobs)]


def _figures(exchanges: Sequence[Exchange], seconds: float, before: EngineStats, after: EngineStats) -> Figures:
    """prompt_tokens_per_s: counts whole prompts, computed or cached. cached_share: share of the tokens that were looked
    up when a sequence joined."""

    def grown(name: str) -> float:
        return getattr(after, name) - getattr(before, name)

    return {
        "duration_s": seconds,
        "requests_per_s": len(exchanges) / seconds,
        "prompt_tokens_per_s": sum(len(e.prompt) for e in exchanges) / seconds,
        "output_tokens_per_s": sum(len(one) for e in exchanges for one in e.answers) / seconds,
        **percentiles("ttft", [e.ttft for e in exchanges]),
        "computed_prompt_tokens": grown("prompt_tokens"),
        "cached_share": grown("cached_tokens") / grown("looked_up_tokens"),
        "evicted_blocks": grown("evicted_blocks"),
        "preemptions": grown("preemptions"),
        "tier_loaded_tokens": grown("tier_loaded_tokens"),
        "tier_bytes_saved": grown("tier_bytes_saved"),
        **of_steps(before, after, seconds),
    }


# -- output ------------------------------------------------------------------------------------------------


def _print(result: Mapping[str, Any]) -> None:
    shape, rows = result["shape"], []
    for name, found in result["workloads"].items():
        for variant, record in found["variants"].items():
            rows.append(
                (name, variant, *_cells(record["figures"]), _of_off(record["of_off"]) if variant != OFF else "")
            )
    print_table(
        ("workload", "cache", ">output tokens/s", ">ttft p50", ">found", ">evicted blocks", ">throughput of off"),
        rows,
        f"{result['model']['name']}: {shape['users']} users, turns of {shape['turn']} tokens, outputs of "
        f"{shape['answer']}; medians of {_count(result)} rounds (lowest to highest)",
    )
    for variant, record in result["workloads"].get(NO_REUSE, {}).get("variants", {}).items():
        if variant != OFF:
            wall, cpu = (record[of]["overhead"] for of in ("of_off", "cpu_of_off"))
            print(f"overhead when nothing is reused, cache {variant}: {wall:+.1%} of time, {cpu:+.1%} of CPU time")
    foreign = [run["foreign_cpu"] for run in _runs(result)]
    print(f"all outputs are equal; other processes used {min(foreign):.0%} to {max(foreign):.0%} of the CPU")


def _runs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        r for found in result["workloads"].values() for record in found["variants"].values() for r in record["runs"]
    ]


def _count(result: Mapping[str, Any]) -> int:
    return len(next(iter(result["workloads"].values()))["variants"][OFF]["runs"])


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    middle = {name: record["median"] for name, record in figures.items()}
    rate = figures["output_tokens_per_s"]
    return (
        f"{number_text(rate['median'])} ({number_text(rate['min'])} to {number_text(rate['max'])})",
        f"{1e3 * middle['ttft_p50_s']:.0f} ms",
        f"{middle['cached_share']:.1%}",
        f"{middle['evicted_blocks']:.0f}",
    )


def _of_off(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"


def _plot(figure: Any, workloads: Mapping[str, Any], name: str) -> None:
    """Bars by workload: throughput relative to that without the cache (error bars from the lowest to the highest
    round), time to the first token, and the share of cached tokens."""
    panels = figure.subplots(1, 3)
    for k, variant in enumerate((OFF, ON, DISK)):
        own = [(i, f["variants"][variant]) for i, f in enumerate(workloads.values()) if variant in f["variants"]]
        if not own:
            continue
        at = [i + 0.27 * (k - 1) for i, _ in own]
        ratios = [record["of_off"] for _, record in own]
        spread = [[r["median"] - r["min"] for r in ratios], [r["max"] - r["median"] for r in ratios]]
        panels[0].bar(at, [r["median"] for r in ratios], 0.25, yerr=spread, color=f"C{k}", label=f"cache {variant}")
        figures = [record["figures"] for _, record in own]
        panels[1].bar(at, [f["ttft_p50_s"]["median"] for f in figures], 0.25, color=f"C{k}")
        panels[2].bar(at, [100 * f["cached_share"]["median"] for f in figures], 0.25, color=f"C{k}")
    titles = ("throughput relative to no cache", "time to first token, p50, seconds", "% of prompt tokens cached")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=9)
        panel.set_xticks(range(len(workloads)), list(workloads), fontsize=7)
    panels[0].axhline(1, color="tab:gray", linestyle="--", linewidth=1)
    panels[0].legend(fontsize=8)
    figure.suptitle(name, fontsize=9)
