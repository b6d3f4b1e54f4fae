"""Measures speculation against the same engine without it, in alternated pairs.

    python -m benchmarks.speculation                              every case: about twenty minutes on two cores
    python -m benchmarks.speculation --case never --users 1 --pairs 5

The model has the shape of Qwen3-0.6B in Q4_K_M and random weights, so what a drafter would guess is replayed from the
answers: each id is right with a given chance, independently. A replay costs as much as prompt lookup, which runs beside
it. Cases:

    never       no draft is ever right: at most 2 % slower than off, with 1, 8 and 32 users
    replay      one user, chances of 0.5 to 0.9: at 0.7 at least 1.8 times as fast. `ideal`: the best that the measured
                step times allow for any fixed number of ids
    model       one user, 0.7, with a draft model of a tenth of the size, whose guesses are replaced: at least 1.4
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import shapes
from benchmarks.formats import config_of, make_reference
from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.sched.drafts import StepTime
from kvasir.sched.sequence import Sequence
from kvasir.spec.drafter import Speculator
from kvasir.spec.lookup import continuation
from kvasir.spec.pace import StepTimes
from kvasir.types import Request, SamplingParams, each_delta

PROMPT, TOKENS = 32, 96
OFTEN = 5  # measurements of a step's time that a median needs
CHANCES = (0.5, 0.7, 0.9)
SMALL = {
    **shapes.SHAPES["qwen3-0.6b"],
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
AIMS = {"never": 1 / 1.02, "replay 0.7": 1.8, "model 0.7": 1.4}


class Replay(Speculator):
    """Guesses that are right with a chance. answers: ids by request. instead: whether they replace the runner's."""

    def __init__(self, answers: dict[str, list[int]], chance: float, instead: bool = False, **more: Any):
        super().__init__(("draft",) if instead else ("ngram",), **more)
        self._answers, self._right = answers, chance
        self._guessed: dict[str, array[int]] = {}
        self._steps: dict[int, list[float]] = {}

    @property
    def medians(self) -> StepTimes:
        """The median times of steps, of those that were measured often."""
        found = StepTimes()
        for rows, seconds in sorted(self._steps.items()):
            if len(seconds) >= OFTEN:
                found.note(rows, median(seconds))
        return found

    def measured(self, rows: int, drafted: int, time: StepTime) -> None:
        super().measured(rows, drafted, time)
        self._steps.setdefault(rows, []).append(time.period)

    def _coming(self, seq: Sequence, most: int) -> array[int]:
        name = seq.request.id
        if name not in self._guessed:
            draw = random.Random(name)
            guessed = (token if draw.random() < self._right else token ^ 1 for token in self._answers[name])
            self._guessed[name] = array("i", guessed)
        begin = len(seq.tokens) - seq.prompt_len
        return self._guessed[name][begin : begin + most]

    def _ngram(self, seq: Sequence, ids: array[int], most: int) -> tuple[array[int], int]:
        continuation(ids, most)  # for its time
        return self._coming(seq, most), 0

    def proposed(self, seq: Sequence, ids: Seq[int], after: int) -> None:
        super().proposed(seq, self._coming(seq, len(ids)), after)


def requests(users: int, seed: int, salt: str) -> list[Request]:
    """Requests with the same ids and prompts whatever the salt; only those of one salt share cached prompts."""
    draw = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    prompts = [tuple(draw.randrange(1000) for _ in range(PROMPT)) for _ in range(users)]
    return [Request(f"{seed} {i}", prompt, params, cache_salt=salt) for i, prompt in enumerate(prompts)]


def run(core: EngineCore, asked: Seq[Request]) -> tuple[float, dict[str, list[int]]]:
    """Tokens per second after every request has its first, and the answers."""
    found: dict[str, list[int]] = {r.id: [] for r in asked}
    for request in asked:
        core.add(request)
    begun, before = 0.0, 0
    while core.has_work():
        for delta in each_delta(core.advance()):
            found[delta.id] += delta.token_ids
        if not begun and all(found.values()):
            begun, before = time.perf_counter(), sum(map(len, found.values()))
    return (sum(map(len, found.values())) - before) / (time.perf_counter() - begun), found


def compared(plain: EngineCore, core: EngineCore, answers: dict[str, list[int]], users: int, pairs: int) -> dict:
    """The median of the ratios, all pairs, and what was accepted. Every answer must be the same. No run finds its
    prompts cached: else all its sequences would begin in the same step."""
    runs = []
    for turn in range(-1, pairs):
        seed = 1000 * users + turn
        if f"{seed} 0" not in answers:
            answers |= run(plain, requests(users, seed, "answers"))[1]
        both = {}
        for name in ("off", "on") if turn % 2 else ("on", "off"):
            speed, ids = run(plain if name == "off" else core, requests(users, seed, name))
            assert all(found == answers[key] for key, found in ids.items()), "an answer differs"
            both[name] = speed
        if turn >= 0:  # the first pair warms up
            runs.append((both["off"], both["on"]))
    scheduler = core.scheduler
    return {
        "ratio": median(on / off for off, on in runs),
        "off": median(off for off, _ in runs),
        "on": median(on for _, on in runs),
        "drafted": scheduler.drafted_tokens,
        "accepted": scheduler.accepted_tokens,
        "runs": runs,
    }


def ideal(times: StepTimes, chance: float, drafting: float = 0.0, most: int = 16) -> tuple[float, int]:
    """The best speed-up that a fixed number of ids reaches, and the number. drafting: seconds for each id."""
    found = {}
    for count in range(min(most, times.rows[-1] - 1) + 1):
        tokens = sum(chance**place for place in range(count + 1))
        found[count] = tokens * times.of(1) / (times.of(1 + count) + count * drafting)
    best = max(found, key=found.__getitem__)
    return found[best], best


def built(model: str, args: argparse.Namespace, speculate: str = "off", drafter: Any = None) -> EngineCore:
    options = EngineOptions(model=model, threads=args.threads, max_model_len=512, speculate=speculate)
    return build_core(options, drafter=drafter)


def show(name: str, row: dict) -> dict:
    runs = [on / off for off, on in row["runs"]]
    share = row["accepted"] / max(1, row["drafted"])
    aim = AIMS.get(name.split(" users")[0], AIMS.get(name.split()[0], 0.0))
    best = f"  ideal {row['ideal']:.2f} with {row['ids']} ids" if "ideal" in row else ""
    mark = "" if row["ratio"] >= aim else f"  below the aim of {aim:.2f}"
    print(
        f"{name:18} off {row['off']:7.1f}  on {row['on']:7.1f}  ratio {row['ratio']:.3f} "
        f"({min(runs):.2f} to {max(runs):.2f}, {len(runs)} pairs)  "
        f"accepted {share:.0%} of {row['drafted']}{best}{mark}",
        flush=True,
    )
    return row


# --- cases ------------------------------------------------------------------------------------------


def never(path: str, args: argparse.Namespace) -> dict[str, dict]:
    rows, plain = {}, built(path, args)
    for users in args.users:
        answers: dict[str, list[int]] = {}
        core = built(path, args, drafter=Replay(answers, 0.0))
        rows[f"never {users}"] = show(f"never {users}", compared(plain, core, answers, users, args.pairs))
        core.close()
    plain.close()
    return rows


def replay(path: str, args: argparse.Namespace) -> dict[str, dict]:
    rows, plain = {}, built(path, args)
    for chance in CHANCES:
        answers: dict[str, list[int]] = {}
        drafter = Replay(answers, chance)
        core = built(path, args, drafter=drafter)
        row = compared(plain, core, answers, 1, args.pairs)
        row["times"] = dict(zip(drafter.medians.rows, drafter.medians.times, strict=True))
        row["ideal"], row["ids"] = ideal(drafter.medians, chance)
        rows[f"replay {chance}"] = show(f"replay {chance}", row)
        core.close()
    plain.close()
    return rows


def model(path: str, args: argparse.Namespace) -> dict[str, dict]:
    plain, answers = built(path, args), dict[str, list[int]]()
    small = make_reference(SMALL, Path(path).parent / "small.gguf")
    drafter = Replay(answers, 0.7, instead=True)
    core = built(path, args, f"draft={small}", drafter)
    row = compared(plain, core, answers, 1, args.pairs)
    row["round"] = drafter.rounds.of(1)
    print(f"a step {drafter.medians.of(1) * 1e3:.1f} ms, drafting an id {row['round'] * 1e3:.1f} ms")
    row["times"] = dict(zip(drafter.medians.rows, drafter.medians.times, strict=True))
    row["ideal"], row["ids"] = ideal(drafter.medians, 0.7, row["round"])
    for engine in (plain, core):
        engine.close()
    return {"model 0.7": show("model 0.7", row)}


CASES = {"never": never, "replay": replay, "model": model}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this case; repeatable")
    parser.add_argument("--users", action="append", type=int, help="of `never`; repeatable (default: 1, 8, 32)")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=shapes.SHAPES["qwen3-0.6b"]["num_hidden_layers"])
    parser.add_argument("--threads", type=int, help="computing threads")
    parser.add_argument("--dir", type=Path, help="folder for the models (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    args = parser.parse_args()
    args.users = args.users or [1, 8, 32]
    if args.dir:
        args.dir.mkdir(parents=True, exist_ok=True)
    others, rows = ForeignLoad(), {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = make_reference(config_of(args.layers), Path(folder) / "model.gguf")
        for name in args.case or CASES:
            rows |= CASES[name](path, args)
    print(f"other programs used {others.share():.0%} of the CPU time")
    if args.out:
        facts = {"machine": machine_facts(), "software": software_facts(), "layers": args.layers}
        report.write(args.out, "speculation", {**facts, "rows": rows}, lambda figure: draw(figure, rows))
    return 0


def draw(figure: Any, rows: dict[str, dict]) -> None:
    panel = figure.subplots()
    places = range(len(rows))
    panel.bar(places, [row["ratio"] for row in rows.values()], label="measured")
    best = [(place, row["ideal"]) for place, row in enumerate(rows.values()) if "ideal" in row]
    panel.plot([x for x, _ in best], [y for _, y in best], "k_", markersize=20, label="ideal")
    panel.set_xticks(places, list(rows), fontsize=7, rotation=30)
    panel.axhline(1.0, color="tab:gray", linestyle="--", linewidth=1)
    panel.set_title("speed relative to the engine without speculation", fontsize=9)
    panel.legend()


if __name__ == "__main__":
    sys.exit(main())
