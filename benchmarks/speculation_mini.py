"""Measures drafters on kvasir-mini's own tasks: held-out prompts of every skill of its recipe, one user.

    python -m benchmarks.speculation_mini
    python -m benchmarks.speculation_mini --draft DIR --eagle3 DIR --mtp DIR      what recipes.mini.draft.train makes
    python -m benchmarks.speculation_mini --llama-server build/bin/llama-server   llama.cpp's lookup on the same weights

Each engine answers every prompt of a skill, greedily; `repeated` answers them all a second time, as agents and batches
do. Times are those of whole answers without their first token, alternating between the engine without drafters and the
others. The model is so small that a step is mostly the time of Python and of threads that wait: tokens per step tell
more about larger models than the ratio of times.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.types import Request, SamplingParams, each_delta

REPEATED = "repeated"
Answers = list[list[int]]
Answer = Callable[[list[list[int]]], tuple[float, Answers, int]]  # prompts -> seconds, answers, steps


def prompts_by_skill(cases: int) -> dict[str, list[list[int]]]:
    """Held-out prompts as ids."""
    from recipes.mini.chat import encode, render
    from recipes.mini.draft.evaluate import FOLDER
    from recipes.mini.eval import ROWS
    from recipes.mini.generate import load

    model, found = load(FOLDER), {}
    for row in ROWS:
        draw = random.Random(f"{row.name}/speculation")
        made = [row.make(draw) for _ in range(cases)]
        texts = [render(c.prompt, c.tools, thinking=c.thinking, source=model.template) for c in made]
        found[row.name] = [encode(model.tokenizer, text) for text in texts]
    return found


def engine(core: EngineCore) -> Answer:
    def answer(prompts: list[list[int]]) -> tuple[float, Answers, int]:
        seconds, answers, steps = 0.0, [], 0
        salt = f"{time.perf_counter_ns()}"  # rounds do not learn from each other
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=160, seed=0)
            core.add(
                Request(f"{time.perf_counter_ns()} {number}", tuple(prompt), params, eos_ids=(2,), cache_salt=salt)
            )
            ids: list[int] = []
            begun = 0.0
            while core.has_work():
                for delta in each_delta(core.advance()):
                    ids += delta.token_ids
                    steps += begun > 0
                if not begun and ids:
                    begun = time.perf_counter()
            seconds += time.perf_counter() - begun
            answers.append(ids)
        return seconds, answers, steps

    return answer


@contextmanager
def llama(server: Path, model: Path, more: Sequence[str], port: int) -> Iterator[Answer]:
    """llama.cpp's server with one slot."""
    command = [
        str(server),
        "-m",
        str(model),
        "-t",
        "2",
        "-c",
        "1024",
        "-np",
        "1",
        "--port",
        str(port),
        "-lv",
        "0",
        *more,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def post(path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as found:
            return json.load(found)

    def answer(prompts: list[list[int]]) -> tuple[float, Answers, int]:
        seconds, answers, tokens = 0.0, [], 0
        for prompt in prompts:
            asked = {
                "prompt": prompt,
                "n_predict": 160,
                "temperature": 0.0,
                "return_tokens": True,
                "cache_prompt": False,
            }
            found = post("/completion", asked)
            seconds += found["timings"]["predicted_ms"] / 1e3
            answers.append(found["tokens"])
            tokens += found["timings"]["predicted_n"] - found["timings"].get("draft_n_accepted", 0)
        return seconds, answers, tokens

    try:
        for _ in range(100):
            try:
                post("/health", None)
                break
            except OSError:
                time.sleep(0.2)
        yield answer
    finally:
        process.terminate()
        process.wait()


def measured(engines: dict[str, Answer], prompts: list[list[int]], rounds: int) -> dict[str, dict[str, float]]:
    """Of each engine: seconds, tokens and steps of the prompts, medians of rounds, and the ratio to the engine "off" of
    the same kind."""
    runs: dict[str, list[tuple[float, Answers, int]]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in list(engines) if turn % 2 else reversed(engines):
            runs[name].append(engines[name](prompts))
    found = {}
    for name, all_runs in runs.items():
        answers, plain = all_runs[0][1], runs["llama.cpp off" if name.startswith("llama.cpp") else "off"]
        assert name.startswith("llama.cpp") or all(run[1] == plain[0][1] for run in all_runs), f"{name} differs"
        tokens = sum(len(ids) - 1 for ids in answers)
        ratios = [off[0] / own[0] for off, own in zip(plain, all_runs, strict=True)]
        found[name] = {
            "tokens_per_s": tokens / median(run[0] for run in all_runs),
            "tokens_per_step": tokens / max(1.0, median(run[2] for run in all_runs)),
            "ratio": median(ratios),
        }
    return found


def write_gguf(folder: str) -> Path:
    """kvasir-mini in bfloat16, with its vocabulary."""
    from tests.program.mini import write_mini

    return write_mini(Path(folder) / "mini.gguf", "BF16", tokens=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6, help="prompts of each skill")
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("draft", "eagle3", "mtp"):
        parser.add_argument(f"--{name}", help=f"folder of the {name} drafter")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    args = parser.parse_args()
    wanted = {"off": "off", "lookup": "ngram", "auto": "auto"}
    wanted |= {name: f"{name}={folder}" for name in ("draft", "eagle3") if (folder := getattr(args, name))}
    others, skills, rows = ForeignLoad(), prompts_by_skill(args.cases), {}
    skills[REPEATED] = [prompt for prompts in skills.values() for prompt in prompts[:1]] * 2
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        engines: dict[str, Answer] = {}
        for name, speculate in [*wanted.items(), *([("mtp", "mtp")] if args.mtp else [])]:
            model = args.mtp if name == "mtp" else "kvasir-mini"
            core = build_core(EngineOptions(model, speculate=speculate, num_blocks=64))
            stack.callback(core.close)
            engines[name] = engine(core)
        if args.llama_server:
            path = write_gguf(folder)
            for port, (name, more) in enumerate(
                {"off": (), "ngram-simple": ("--spec-type", "ngram-simple")}.items(), 8970
            ):
                engines[f"llama.cpp {name}"] = stack.enter_context(llama(args.llama_server, path, more, port))
        measured(engines, skills["echo"], 1)  # warms up
        for skill, prompts in skills.items():
            rows[skill] = measured(engines, prompts, args.rounds)
            text = "  ".join(f"{n} {f['ratio']:.2f} ({f['tokens_per_step']:.2f})" for n, f in rows[skill].items())
            print(f"{skill:20} {rows[skill]['off']['tokens_per_s']:6.0f}/s  {text}", flush=True)
    print(f"ratio of speeds (tokens per step); other programs used {others.share():.0%} of the CPU time")
    if args.out:
        facts = {"machine": machine_facts(), "software": software_facts()}
        report.write(args.out, "speculation-mini", {**facts, "skills": rows}, lambda figure: draw(figure, rows))
    return 0


def draw(figure: Any, rows: dict[str, dict[str, dict[str, float]]]) -> None:
    panel = figure.subplots()
    names = [name for name in next(iter(rows.values())) if not name.endswith("off")]
    for place, name in enumerate(names):
        heights = [row[name]["tokens_per_step"] for row in rows.values()]
        panel.bar([i + 0.8 * place / len(names) for i in range(len(rows))], heights, 0.8 / len(names), label=name)
    panel.set_xticks(range(len(rows)), list(rows), fontsize=6, rotation=60)
    panel.axhline(1.0, color="tab:gray", linestyle="--", linewidth=1)
    panel.set_title("tokens per step of kvasir-mini", fontsize=9)
    panel.legend(fontsize=7)


if __name__ == "__main__":
    sys.exit(main())
