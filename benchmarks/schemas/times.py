"""Measures the cost of enforcing public schemas with a real vocabulary, compared with llguidance alone.

    python -m benchmarks.schemas.times TOKENIZER_FOLDER --results schemas.json --suite ... --store ... --api

It measures the schemas that `run` found correct, in CPU time of the thread, which other programs hardly affect:

    translate    from the schema to llguidance's grammar
    compile      from the schema to the first mask, including the translation
    check        compiling without the translation, and exploring the grammar, as in the process that checks grammars
    mask         one mask, in a randomly drawn text on a grammar that no other text has used
    alone        compile and mask with llguidance alone, for the schemas that it enforces correctly

Each measurement is repeated on a new grammar with the same draws; a figure is the median.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from benchmarks.schemas.run import add_collections, alone, collected
from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.errors import KvasirError
from kvasir.guided import sources
from kvasir.guided.explore import Explorer
from kvasir.guided.grammar import LIMITS, CompiledGrammar, GrammarGuide
from kvasir.guided.guide import make_tokenizer
from kvasir.guided.vocabulary import Vocabulary
from kvasir.text.tokenizer import Tokenizer

MOST = 60  # tokens of a drawn text
BARS = {"compile": 30e-3, "alone compile": 30e-3, "mask": 0.5e-3, "alone mask": 0.5e-3}
FIGURES = ("translate", "compile", "alone compile", "check", "mask", "alone mask")
now = time.thread_time


@dataclass
class Times:
    """The times of one schema, in seconds, by figure. size: characters of the schema."""

    name: str
    collection: str
    size: int
    seconds: dict[str, list[float]] = field(default_factory=dict)


class Meter:
    """Measures schemas with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, repeats: int):
        self._vocabulary, self._repeats = vocabulary, repeats
        self._library: LLTokenizer = make_tokenizer(vocabulary)
        self._explorer = Explorer(vocabulary.tokens, vocabulary.eos_ids)
        encode = vocabulary.tokenizer.encode
        self._ends = np.array(sorted({i for text in ('"', "}", "]", '"}', '"]', ",") for i in encode(text)[-1:]}))

    def measure(self, times: Times, schema: Any, both: bool) -> None:
        """Adds the figures to times. both: measure llguidance alone, too. Raises KvasirError."""
        rounds: list[dict[str, list[float]]] = []
        for _ in range(self._repeats):
            found: dict[str, list[float]] = {}
            begun = now()
            text = sources.json_schema(schema)
            found["translate"] = [now() - begun]
            grammar, compiling = self._compiled(text)
            found["compile"] = [found["translate"][0] + compiling]
            found["mask"] = self._masks(grammar.begin(), random.Random(times.name))
            begun = now()
            self._explorer.walk(CompiledGrammar(self._library, text))
            found["check"] = [now() - begun]
            if both:
                begun = now()
                text = alone(schema)
                translating = now() - begun
                grammar, compiling = self._compiled(text)
                found["alone compile"] = [translating + compiling]
                found["alone mask"] = self._masks(grammar.begin(), random.Random(times.name))
            rounds.append(found)
        for name in rounds[0]:
            times.seconds[name] = [median(values) for values in zip(*(r[name] for r in rounds), strict=True)]

    def _compiled(self, text: str) -> tuple[CompiledGrammar, float]:
        begun = now()
        grammar = CompiledGrammar(self._library, text, LIMITS, self._vocabulary.numbers)
        return grammar, now() - begun

    def _masks(self, guide: GrammarGuide, rng: random.Random) -> list[float]:
        found: list[float] = []
        for _ in range(MOST):
            guide.advance(guide.forced())
            if guide.done:
                break
            begun = now()
            mask = guide.allowed()
            found.append(now() - begun)
            token = self._drawn(mask, rng)
            if token in self._vocabulary.eos_ids:
                break
            guide.advance([token])
        return found

    def _drawn(self, mask: bytes, rng: random.Random) -> int:
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        wanted = self._ends[bits[self._ends] > 0]
        return int(rng.choice(wanted if len(wanted) and rng.random() < 0.3 else np.flatnonzero(bits)))


def measured(asked: argparse.Namespace, meter: Meter) -> Iterator[Times]:
    results = {r["name"]: r for r in json.loads(asked.results.read_text())}
    sound = (case for case in collected(asked) if results.get(case.name, {}).get("kvasir") == "correct")
    for i, case in enumerate(sound):
        if i % asked.every:
            continue
        collection = "api" if ".types" in case.name else "suite" if "/" in case.name else "store"
        times = Times(case.name, collection, len(json.dumps(case.schema)))
        try:
            meter.measure(times, case.schema, results[case.name]["llguidance"] == "correct")
        except KvasirError:  # these collections contain duplicate names of schemas
            continue
        yield times


def spread(seconds: Sequence[float]) -> dict[str, float]:
    cuts = {f"p{n}_ms": float(np.percentile(seconds, n)) * 1e3 for n in (50, 90, 99)}
    return {"count": len(seconds), **cuts, "max_ms": max(seconds) * 1e3}


def summed(every: Sequence[Times]) -> dict[str, Any]:
    """The spread, and the number of values over the bar, by collection and figure."""
    found: dict[str, Any] = {}
    kinds = list(dict.fromkeys(one.collection for one in every))
    for kind in [*kinds, "all"]:
        of = [one for one in every if kind in (one.collection, "all")]
        found[kind] = {
            name: spread(seconds) | ({"over": sum(s > BARS[name] for s in seconds)} if name in BARS else {})
            for name in FIGURES
            if (seconds := [s for one in of for s in one.seconds.get(name, ())])
        }
    return found


def table(summary: dict[str, Any]) -> str:
    lines = [
        "| collection | figure | count | p50 ms | p90 | p99 | max | over the bar |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, figures in summary.items():
        for name, f in figures.items():
            cells = " | ".join(f"{f[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms", "max_ms"))
            lines.append(f"| {kind} | {name} | {f['count']} | {cells} | {f['over'] if name in BARS else ''} |")
    return "\n".join(lines) + "\n"


def worst(every: Sequence[Times], name: str, most: int = 25) -> list[dict[str, Any]]:
    """The schemas with the largest values of a figure, with all their figures."""
    largest: Callable[[Times], float] = lambda one: max(one.seconds.get(name) or [0.0])  # noqa: E731
    ms = {key: (lambda one, key=key: max(one.seconds.get(key) or [0.0]) * 1e3) for key in FIGURES}
    first = sorted(every, key=largest, reverse=True)[:most]
    return [{"name": one.name, "size": one.size, **{k: round(of(one), 3) for k, of in ms.items()}} for one in first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="the schemas.json that run wrote")
    parser.add_argument("--every", type=int, default=1, help="measure every Nth schema")
    parser.add_argument("--repeats", type=int, default=5, help="figures are medians of this many repeats")
    parser.add_argument("--out", type=Path, help="file for the figures, in JSON")
    add_collections(parser)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_folder(asked.tokenizer)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    meter = Meter(vocabulary, asked.repeats)
    gc.collect()
    gc.freeze()  # collecting the vocabulary must not count as time of a schema
    others = ForeignLoad()
    every = list(measured(asked, meter))
    summary = summed(every)
    print(f"{vocabulary.size} ids, {len(every)} schemas; other programs used {others.share():.0%} of the CPU time")
    print(f"\n{table(summary)}")
    if asked.out:
        facts = {"machine": machine_facts(), "software": software_facts(), "ids": vocabulary.size}
        options = {"tokenizer": asked.tokenizer.name, "every": asked.every, "repeats": asked.repeats}
        slowest = {name: worst(every, name) for name in ("compile", "mask")}
        found = {**facts, **options, "foreign_cpu": others.share(), "schemas": summary, "slowest": slowest}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
