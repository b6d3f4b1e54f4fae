"""Measures how much longer a greedy request waits for its tokens while 8 neighbours use an option of the sampler.

    python benchmarks/neighbours.py                          all options, five rounds, about five minutes
    python benchmarks/neighbours.py --rounds 1 --gaps 60     a quick look
    python benchmarks/neighbours.py --only typical_p --only dry

The model has two layers with random weights and a vocabulary of 151,936, so a step consists mostly of logits and
sampling: a large model would hide the sampler's time. Its tokenizer has as many tokens of random letters.

A greedy request runs alone first. Then 8 neighbours join, and the gaps between its tokens are measured while all of
them decode; for options whose cost is in the prompt (`prompt_logprobs`), until the last neighbour has its first token.
Each round measures all options, every second round in reverse order, and compares their gaps with the gaps of the same
round with 8 plain neighbours: the median over the rounds of the ratios of the 99th percentiles must be at most 2.
`prompt` is not an option: it shows the cost of any prompt of that length, for comparison with `prompt_logprobs`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.guided import sources
from kvasir.guided.rule import Rule
from kvasir.types import Request, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
import shapes

VOCAB, NEIGHBOURS = 151_936, 8
REFERENCES = ("plain", "prompt")  # no options
SHORT, LONG, READ = 64, 4096, 1500  # tokens of prompts: by default, for DRY, and where the prompt is measured
MAX_LEN = 6144
AIM = 2.0
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
BREAKERS = tuple((17, i, 19) for i in range(1000))

# The parameters of the neighbours besides a temperature of 1, by name. prompt: its length.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.9},
    "top_k + min_p": {"top_k": 50, "min_p": 0.02},
    "typical_p": {"typical_p": 0.7},
    "typical_p + top_p": {"typical_p": 0.95, "top_p": 0.9, "min_p": 0.001},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 1e-5},
    "dynatemp": {"dynatemp_range": 0.5},
    "mirostat": {"mirostat": 2},
    "penalties": {"repetition_penalty": 1.1, "repetition_last_n": 64, "presence_penalty": 0.5},
    "bad_words": {"bad": tuple((i, i + 1) for i in range(1000))},
    "dry, 4096 ids": {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "prompt": LONG},
    "dry, one id again and again": {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "prompt": LONG, "same": True},
    "logprobs": {"logprobs": 20},
    "json schema": {"schema": SCHEMA},
    "prompt": {"prompt": READ, "reads": True},
    "prompt_logprobs": {"prompt": READ, "reads": True, "prompt_logprobs": 5},
}


# -- the model -------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> str:
    narrow = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = shapes.SHAPES["qwen3-0.6b"] | narrow | {"num_hidden_layers": 2, "head_dim": 64, "vocab_size": VOCAB}
    shapes.write(config, folder)
    make_tokenizer(folder)
    return str(folder)


def make_tokenizer(folder: Path) -> None:
    """Byte-level, without merges: texts are encoded as bytes, and choices use all tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters, rng = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < VOCAB - 1:
        words["\u0120" * rng.randrange(2) + "".join(rng.choices(letters, k=rng.randint(4, 9)))] = None
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


# -- one case --------------------------------------------------------------------------------------------------


def request(id: str, rng: random.Random, asked: Mapping[str, Any], max_tokens: int) -> Request:
    fields = {"temperature": 1.0, "seed": rng.randrange(2**32), "ignore_eos": True, "max_tokens": max_tokens, **asked}
    own = {name: fields.pop(name, None) for name in ("prompt", "same", "bad", "schema", "reads")}
    length = own["prompt"] or SHORT
    ids = [rng.randrange(VOCAB - 1)] * length if own["same"] else [rng.randrange(VOCAB - 1) for _ in range(length)]
    made = Request(id, tuple(ids), SamplingParams(**fields), no_cache=True)
    if own["bad"]:
        made = replace(made, bad_word_ids=own["bad"])
    if own["schema"]:
        made = replace(made, grammar=Rule(sources.json_schema(own["schema"])).text())
    return replace(made, dry_breaker_sequences=BREAKERS) if fields.get("dry_multiplier") else made


def gaps_of(core: EngineCore, name: str, seed: int, count: int) -> list[float]:
    """Seconds between the tokens of the greedy request, about `count` of them."""
    rng, asked = random.Random(seed), CASES[name]
    core.add(request("greedy", rng, {"temperature": 0.0}, MAX_LEN - 2 * SHORT))
    times: dict[str, list[float]] = {"greedy": []}
    for _ in range(8):
        take(core, times)
    reads = bool(asked.get("reads"))
    for i in range(NEIGHBOURS):
        core.add(request(f"n{i}", rng, asked, 1 if reads else MAX_LEN - LONG - 1))
    neighbours = [f"n{i}" for i in range(NEIGHBOURS)]
    begun = len(times["greedy"]) - 1
    while not all(n in times for n in neighbours):
        take(core, times)
    if not reads:
        begun = len(times["greedy"]) + 2  # the first gaps still contain the prompts
        while len(times["greedy"]) <= begun + count:
            take(core, times)
    for id in times:
        core.abort(id)
    while core.has_work():
        core.step()
    core.check()
    found = times["greedy"][begun:]
    return [after - before for before, after in pairwise(found)]


def take(core: EngineCore, times: dict[str, list[float]]) -> None:
    deltas, now = core.step(), time.perf_counter()
    for delta in deltas:
        if delta.error:
            raise RuntimeError(f"{delta.id}: {delta.error}")
        times.setdefault(delta.id, []).extend([now] * len(delta.token_ids))


# -- all cases -------------------------------------------------------------------------------------------------


def spread(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    last = len(ordered) - 1
    return {
        "gaps": len(gaps),
        "p50": median(ordered),
        "p99": ordered[min(last, round(0.99 * last))],
        "max": ordered[-1],
    }


def measure(core: EngineCore, names: list[str], rounds: int, count: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name in names:  # a warm-up: grammars compile, memory is touched
        gaps_of(core, name, 0, 5)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            runs[name].append(spread(gaps_of(core, name, turn + 1, count)))
    found: dict[str, Any] = {}
    for name in names:
        pairs = [(run["p99"], plain["p99"]) for run, plain in zip(runs[name], runs["plain"], strict=True)]
        middle = {what: median(run[what] for run in runs[name]) for what in ("p50", "p99", "max")}
        found[name] = {**middle, "ratio": median(own / plain for own, plain in pairs), "runs": runs[name]}
    return found


def misses(name: str, row: Mapping[str, Any]) -> bool:
    return name not in REFERENCES and row["ratio"] > AIM


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'neighbours':28} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'p99 / plain':>12}")
    for name, row in found.items():
        mark = "  above the aim" if misses(name, row) else ""
        times = " ".join(f"{1e3 * row[what]:8.2f}" for what in ("p50", "p99", "max"))
        print(f"{name:28} {times} {row['ratio']:12.2f}{mark}")


def draw(figure: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    panel = figure.subplots()
    names = list(found)
    panel.bar(range(len(names)), [found[n]["ratio"] for n in names])
    panel.axhline(AIM, color="tab:gray", linestyle="--", linewidth=1)
    panel.set_xticks(range(len(names)), names, fontsize=7, rotation=30)
    panel.set_title("p99 gap of a greedy request with 8 neighbours, relative to 8 plain neighbours", fontsize=9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gaps", type=int, default=200, help="measured tokens of the greedy request in each case")
    parser.add_argument("--only", action="append", choices=CASES, help="measure only this case, and plain; repeatable")
    parser.add_argument("--threads", type=int, help="computing threads")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    args = parser.parse_args()
    names = [n for n in CASES if n == "plain" or not args.only or n in args.only]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        core = build_core(EngineOptions(model, max_model_len=MAX_LEN, threads=args.threads, speculate="off"))
        others, begun = ForeignLoad(), time.perf_counter()
        found = measure(core, names, args.rounds, args.gaps)
        facts = {"machine": machine_facts(), "software": software_facts(), "engine": list(core.summary)}
        result = {**facts, "foreign_cpu": others.share(), "neighbours": NEIGHBOURS, "cases": found}
        core.close()
        core.runner.close()
    show(found)
    others_used = f"other programs used {result['foreign_cpu']:.0%} of the CPU time"
    print(f"{time.perf_counter() - begun:.0f} s; {others_used}")
    if args.out:
        report.write(args.out, "neighbours", result, lambda figure: draw(figure, found))
    return int(any(misses(name, row) for name, row in found.items()))


if __name__ == "__main__":
    sys.exit(main())
