"""`kvasir bench prefix --trace`: the prefix tree's hits as a share of a trace's ideal hits, by memory size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvasir.cli.machine import software_facts
from kvasir.cli.show import count_text, print_table
from kvasir.cli.simulate import check_memory, report
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import Asked, Prompts, ideal_hits, read_trace
from kvasir.cli.simulate.world import Progress, World
from kvasir.cli.waiting import progress_bar
from kvasir.errors import ConfigError

IDEAL = (
    "ideal: a cache without bounds, of single tokens, that holds each prompt completely before the next request comes; "
    "of a prompt one token at least is computed"
)
# Seconds: prefill takes almost no time, so that no request waits; a decode step of all running sequences takes 30 ms,
# so that they hold their blocks for about as long as in a real service.
COSTS = (1e-6, 0.0, 0.0, 0.03)
STEP_TOKENS = 16384
ROWS = 256


def run(trace: Path, memory: Sequence[int], block_size: int, out: Path | None) -> None:
    """memory: sizes in tokens; an unlimited size is added. Raises ConfigError."""
    asked = read_trace(trace)
    ideal = ideal_hits(asked)
    if not ideal:
        raise ConfigError(f"{trace.name} has no prompts with common prefixes", "give a trace with hash ids")
    check_memory(memory, asked, block_size)
    rows = []
    for size in sorted({*memory, endless(asked, block_size)}):
        with progress_bar(f"{count_text(size)} tokens", len(asked)) as progress:
            rows.append(hits(asked, size, block_size, ideal, progress))
    total = sum(a.prompt for a in asked)
    print_table(
        ("memory", ">of ideal", ">hit tokens", ">hit rate", ">preempted", ">evicted blocks"),
        [
            (
                f"{count_text(r['memory'])} tokens" + (" (endless)" if r is rows[-1] else ""),
                f"{r['of_ideal']:.2%}",
                count_text(r["hit_tokens"]),
                f"{r['hit_tokens'] / total:.1%}",
                r["preemptions"],
                r["evicted_blocks"],
            )
            for r in rows
        ],
        f"{trace.name}: {len(asked)} requests, {count_text(total)} prompt tokens, blocks of {block_size}",
    )
    print(f"\n{IDEAL}: {count_text(ideal)} tokens, {ideal / total:.1%}")
    if out:
        facts = {"trace": trace.name, "requests": len(asked), "prompt_tokens": total, "block_size": block_size}
        facts |= {"ideal_hit_tokens": ideal, "ideal": IDEAL, "costs": COSTS, "software": software_facts(), "rows": rows}
        report.write(out, f"prefix-{trace.stem}-{block_size}", facts, lambda figure: _plot(figure, rows, trace.name))


def endless(asked: list[Asked], block_size: int) -> int:
    """The number of tokens of memory with which nothing is ever evicted."""
    return sum(a.prompt + a.answer + 2 * block_size for a in asked)


def hits(asked: list[Asked], memory: int, block_size: int, ideal: int, progress: Progress) -> dict[str, Any]:
    setup = Setup(
        "ours",
        COSTS,
        memory=memory,
        rows=ROWS,
        step_tokens=STEP_TOKENS,
        block_size=block_size,
        max_waiting=len(asked),
    )
    outcome = World(asked, setup, Prompts(asked)).run(progress)
    found = outcome.counts["cached_tokens"]
    return {"memory": memory, "hit_tokens": found, "of_ideal": found / ideal, **report.summarize(setup, outcome)}


def _plot(figure: Any, rows: Sequence[dict[str, Any]], name: str) -> None:
    panel = figure.subplots(1, 1)
    panel.plot([r["memory"] / 1e6 for r in rows], [100 * r["of_ideal"] for r in rows], "o-")
    panel.set_xscale("log")
    panel.set_ylim(0, 103)
    panel.set_xlabel("KV memory, million tokens", fontsize=8)
    panel.set_ylabel("% of the ideal hits", fontsize=8)
    figure.suptitle(name, fontsize=9)
