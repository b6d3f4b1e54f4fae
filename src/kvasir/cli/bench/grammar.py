"""`kvasir bench grammar [MODEL]`: the cost of following a grammar, by tokenizer; no weights are read.

    compile    from the grammar's text to the first mask
    mask       computing the allowed ids, at positions with a choice
    forced     ids that need no mask, since the grammar leaves no choice

Ids are drawn at random from the masks, reproducibly for a seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from kvasir.cli.bench.grammars import grammars
from kvasir.cli.bench.measure import SEED
from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.resolve import resolve
from kvasir.cli.show import print_table
from kvasir.cli.simulate import report
from kvasir.cli.waiting import progress_bar
from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_text
from kvasir.errors import ConfigError
from kvasir.guided.guide import AnyGuide, Compiled, make_tokenizer
from kvasir.guided.rule import Rule
from kvasir.guided.vocabulary import Vocabulary
from kvasir.text.tokenizer import Tokenizer

ENDS = frozenset(('"', "}", "]", '"}', '"]', "'", ")", ","))  # chosen often; otherwise texts would rarely end
MOST = 200  # maximum tokens of a text


@dataclass
class Times:
    """Measurements of one grammar over one vocabulary: seconds, and counts of tokens."""

    compiling: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    drawn: int = 0
    forced: int = 0


def run(engine: EngineOptions | None, tokenizers: Sequence[Path], repeats: int, out: Path | None) -> dict[str, Any]:
    """Measures, prints a table, writes files into `out`; returns the contents of the JSON file. engine: its model's
    tokenizer is measured too. Raises KvasirError."""
    named: dict[str, Tokenizer] = {}
    if engine:
        own, _ = load_text(resolve(engine)[0])
        if own is None:
            raise ConfigError(f"{engine.model} has no tokenizer", "give a model with one, or --tokenizer-folder")
        named[Path(engine.model).name] = own
    named |= {folder.name: Tokenizer.from_folder(folder) for folder in tokenizers}
    others = ForeignLoad()
    found = {}
    with progress_bar("grammars", len(named) * len(grammars()), still=True) as progress:
        for number, (name, tokenizer) in enumerate(named.items()):
            found[name] = measure(tokenizer, repeats, lambda done, n=number: progress(n * len(grammars()) + done))
    facts = {"machine": machine_facts(), "software": software_facts(), "seed": SEED, "answers": repeats}
    result = {**facts, "foreign_cpu": others.share(), "tokenizers": found}
    _print(result)
    if out:
        name = f"grammar-{'-'.join(found)}"[:80]
        report.write(out, name, result, lambda figure: _plot(figure, found))
    return result


def measure(tokenizer: Tokenizer, repeats: int, progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Compiles each grammar and draws a text that follows it, `repeats` times. progress: gets the number done."""
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    begun = time.perf_counter()
    library = make_tokenizer(vocabulary)
    load = time.perf_counter() - begun
    ends = np.array(
        sorted({i for text in ENDS if (i := _single(tokenizer, text)) is not None} | set(vocabulary.eos_ids))
    )
    by_name: dict[str, Times] = {}
    for done, (name, grammar) in enumerate(grammars().items()):
        progress(done)
        times = by_name[name] = Times()
        for number in range(repeats):
            begun = time.perf_counter()
            guide = Compiled(Rule(grammar), vocabulary, library).begin()
            guide.allowed()
            times.compiling.append(time.perf_counter() - begun)
            _draw(guide, vocabulary, ends, random.Random(SEED + number), times)
    every = list(by_name.values())
    return {
        "vocab_size": vocabulary.size,
        "load_s": load,
        "compile_s": _spread([s for times in every for s in times.compiling]),
        "mask_s": _spread([s for times in every for s in times.mask]),
        "forced_share": sum(t.forced for t in every) / sum(t.forced + t.drawn for t in every),
        "grammars": {
            name: {"compile_s": _spread(t.compiling), "mask_s": _spread(t.mask), "drawn": t.drawn, "forced": t.forced}
            for name, t in by_name.items()
        },
    }


def _draw(guide: AnyGuide, vocabulary: Vocabulary, ends: np.ndarray, rng: random.Random, times: Times) -> None:
    tokens = 0
    while not guide.done and tokens < MOST:
        forced = guide.forced()
        if forced:
            guide.advance(forced)
            times.forced += len(forced)
            tokens += len(forced)
            continue
        begun = time.perf_counter()
        mask = guide.allowed()
        times.mask.append(time.perf_counter() - begun)
        assert mask is not None, "a grammar that is in force from the beginning"
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: vocabulary.size]
        wanted = ends[bits[ends] > 0]
        allowed = wanted if len(wanted) and rng.random() < 0.3 else np.flatnonzero(bits)
        token = int(rng.choice(allowed))
        times.drawn += 1
        tokens += 1
        if token in vocabulary.eos_ids:
            return
        guide.advance([token])


def _single(tokenizer: Tokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _spread(seconds: list[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [*seconds, *seconds * 99]
    return {"p50": cuts[49], "p99": cuts[98], "max": max(seconds, default=0.0)}


# -- output ------------------------------------------------------------------------------------------------


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (
            name, f"{entry['vocab_size']:,}", f"{1e3 * entry['load_s']:.0f} ms",
            *(f"{1e3 * entry['compile_s'][p]:.2f} ms" for p in ("p50", "p99")),
            *(f"{1e6 * entry['mask_s'][p]:.0f} µs" for p in ("p50", "p99")), f"{entry['forced_share']:.0%}",
        )
        for name, entry in result["tokenizers"].items()
    ]  # fmt: skip
    print_table(
        ("tokenizer", ">tokens", ">load", ">compile p50", ">p99", ">mask p50", ">p99", ">forced"),
        rows,
        f"{len(grammars())} grammars, {result['answers']} runs of each",
    )
    print(f"other processes used {result['foreign_cpu']:.0%} of the CPU")


def _plot(figure: Any, found: Mapping[str, Any]) -> None:
    """By grammar: time to compile, and time per mask (bars for medians, marks for p99)."""
    panels = figure.subplots(1, 2)
    names = list(grammars())
    for k, (name, entry) in enumerate(found.items()):
        at = [i + 0.8 * (k + 0.5) / len(found) - 0.4 for i in range(len(names))]
        for panel, what, scale in zip(panels, ("compile_s", "mask_s"), (1e3, 1e6), strict=True):
            own = [entry["grammars"][n][what] for n in names]
            panel.bar(at, [scale * o["p50"] for o in own], 0.8 / len(found), color=f"C{k}", label=name)
            panel.plot(at, [scale * o["p99"] for o in own], "_", color=f"C{k}")
    for panel, title in zip(panels, ("compile, ms", "mask, µs"), strict=True):
        panel.set_title(f"{title}: median, and p99 as a mark", fontsize=9)
        panel.set_xticks(range(len(names)), names, fontsize=6, rotation=70)
        panel.set_yscale("log")
    panels[0].legend(fontsize=7)
