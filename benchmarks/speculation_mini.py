"""Measures drafters on kvasir-mini's own tasks: held-out prompts of every skill of its recipe, one user.

    python -m benchmarks.speculation_mini
    python -m benchmarks.speculation_mini --draft DIR --eagle3 DIR --mtp DIR      what recipes.mini.draft.train makes
    python -m benchmarks.speculation_mini --llama-server build/bin/llama-server   llama.cpp's lookup on the same weights
    python -m benchmarks.speculation_mini --model FILE --draft FILE ...           the same at the cost of a larger model

Each engine answers every prompt of a skill, greedily; `repeated` answers one of each skill a second time, as agents and
batches do. `mt_bench` and `gsm8k` are real questions (--questions): kvasir-mini's answers to them are poor but its own.
Times are those of whole answers without their first token, alternating between the engine without drafters and the
others. kvasir-mini is so small that a step is mostly the time of Python and of threads that wait: tokens per step tell
more about larger models than the ratio of times. The files of benchmarks.padded cost as much as larger models.
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

from benchmarks.peers.places import SHARED
from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.types import Request, SamplingParams, each_delta

TOKENS = 160  # of an answer
REPEATED = "repeated"
QUESTIONS = {"mt_bench": "mt_bench_questions.jsonl", "gsm8k": "gsm8k_test_0-299.jsonl"}
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


def questions(folder: Path, cases: int) -> dict[str, list[list[int]]]:
    """The first questions of MT-bench and GSM8K as ids; none of a file that is absent, which is said."""
    from recipes.mini.chat import encode, render
    from recipes.mini.draft.evaluate import FOLDER
    from recipes.mini.generate import load

    model, found = load(FOLDER), {}
    for name, file in QUESTIONS.items():
        if not (folder / file).exists():
            print(f"{name} is left out: {folder / file} does not exist")
            continue
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()[:cases]]
        texts = [row["turns"][0] if "turns" in row else row["question"] for row in rows]
        chats = [[{"role": "user", "content": text}] for text in texts]
        found[name] = [encode(model.tokenizer, render(chat, source=model.template)) for chat in chats]
    return found


def engine(core: EngineCore, most: int = TOKENS) -> Answer:
    def answer(prompts: list[list[int]]) -> tuple[float, Answers, int]:
        seconds, answers, steps = 0.0, [], 0
        salt = f"{time.perf_counter_ns()}"  # rounds do not learn from each other
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=most, seed=0)
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
def llama(server: Path, model: Path, more: Sequence[str], port: int, most: int = TOKENS) -> Iterator[Answer]:
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
                "n_predict": most,
                "temperature": 0.0,
                "return_tokens": True,
                "cache_prompt": False,
            }
            found = post("/completion", asked)
            seconds += found["timings"]["predicted_ms"] / 1e3
            answers.append(found["tokens"])
            tokens += found["timings"]["predicted_n"] - found["timings"].get("draft_n_accepted", 0) - 1
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


def measured(engines: dict[str, Answer], prompts: list[list[int]], rounds: int) -> dict[str, dict[str, Any]]:
    """Of each engine: the seconds of each round, and the tokens and steps of all prompts. Every answer must be the same
    as that of the engine "off"; llama.cpp's are not compared."""
    runs: dict[str, list[tuple[float, Answers, int]]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in list(engines) if turn % 2 else reversed(engines):
            runs[name].append(engines[name](prompts))
    for name, all_runs in runs.items():
        plain = runs[_plain(name)][0][1]
        assert name.startswith("llama.cpp") or all(run[1] == plain for run in all_runs), f"{name} differs"
    return {
        name: {
            "seconds": [run[0] for run in all_runs],
            "tokens": sum(len(ids) - 1 for ids in all_runs[0][1]),
            "steps": median(run[2] for run in all_runs),
        }
        for name, all_runs in runs.items()
    }


def _plain(name: str) -> str:
    """The engine without drafters that it is compared with."""
    return "llama.cpp off" if name.startswith("llama.cpp") else "off"


def total(rows: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Several skills as one."""
    return {
        name: {
            "seconds": [sum(parts) for parts in zip(*(row[name]["seconds"] for row in rows), strict=True)],
            "tokens": sum(row[name]["tokens"] for row in rows),
            "steps": sum(row[name]["steps"] for row in rows),
        }
        for name in rows[0]
    }


def figures(row: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Tokens per second and per step, and the ratio to the engine "off" of the same kind: the median of the rounds, the
    least and the largest."""
    found = {}
    for name, own in row.items():
        ratios = [off / on for off, on in zip(row[_plain(name)]["seconds"], own["seconds"], strict=True)]
        found[name] = {
            "tokens_per_s": own["tokens"] / median(own["seconds"]),
            "tokens_per_step": own["tokens"] / max(1.0, own["steps"]),
            "ratio": median(ratios),
            "least": min(ratios),
            "largest": max(ratios),
        }
    return found


def write_gguf(folder: str) -> Path:
    """kvasir-mini in bfloat16, with its vocabulary."""
    from tests.program.mini import write_mini

    return write_mini(Path(folder) / "mini.gguf", "BF16", tokens=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file of benchmarks.padded (default: kvasir-mini)")
    parser.add_argument("--cases", type=int, default=6, help="prompts of each skill")
    parser.add_argument("--skill", action="append", help="only this one, and what is answered twice")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="most tokens of an answer")
    parser.add_argument("--questions", type=Path, default=SHARED / "prompts", help="folder of real questions")
    parser.add_argument("--draft", help="folder or file of the draft model")
    parser.add_argument("--eagle3", help="folder of the EAGLE-3 head")
    parser.add_argument("--mtp", help="folder or file of the model with its layer for multi-token prediction")
    parser.add_argument("--draft-quantize", choices=("q8", "q4"), help="rounds a drafter's float weights")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--llama-spec", action="append", help="its --spec-type, repeatable (default: ngram-simple)")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The prompts of the skills that are asked for. Raises ValueError for an unknown one."""
    found = prompts_by_skill(args.cases) | questions(args.questions, args.cases)
    if unknown := set(args.skill or ()) - set(found):
        raise ValueError(f"--skill {min(unknown)} is unknown: expected one of {', '.join(found)}")
    found = {name: prompts for name, prompts in found.items() if name in (args.skill or found)}
    return found | {REPEATED: [prompt for prompts in found.values() for prompt in prompts[:1]] * 2}


def loaded(args: argparse.Namespace, stack: ExitStack, folder: str) -> dict[str, Answer]:
    """Every engine, ready to answer."""
    wanted = {"off": "off", "ngram": "ngram", "suffix": "suffix", "auto": "auto"}
    wanted |= {name: f"{name}={path}" for name in ("draft", "eagle3") if (path := getattr(args, name))}
    wanted |= {"mtp": "mtp"} if args.mtp else {}
    engines: dict[str, Answer] = {}
    for name, speculate in wanted.items():
        model = args.mtp if name == "mtp" else str(args.model or "kvasir-mini")
        rounded = args.draft_quantize if name in ("draft", "eagle3") else None
        core = build_core(EngineOptions(model, speculate=speculate, num_blocks=64, draft_quantize=rounded))
        stack.callback(core.close)
        engines[name] = engine(core, args.tokens)
    if args.llama_server:
        path = args.model or write_gguf(folder)
        more = {"off": (), **{name: ("--spec-type", name) for name in args.llama_spec or ["ngram-simple"]}}
        for port, (name, options) in enumerate(more.items(), 8970):
            server = llama(args.llama_server, path, options, port, args.tokens)
            engines[f"llama.cpp {name}"] = stack.enter_context(server)
    return engines


def main() -> int:
    args = arguments()
    try:
        skills = chosen(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        engines = loaded(args, stack, folder)
        measured(engines, next(iter(skills.values()))[:1], 1)  # warms up
        others = ForeignLoad()
        for skill, prompts in skills.items():
            rows[skill] = measured(engines, prompts, args.rounds)
            show(skill, rows[skill])
        show("all", total(list(rows.values())))
    print(f"ratio of speeds (tokens per step); other programs used {others.share():.0%} of the CPU time")
    if args.out:
        facts = {"machine": machine_facts(), "software": software_facts()}
        if args.model:
            facts |= {"model": args.model.name, "bytes": args.model.stat().st_size}
        name = "speculation-padded" if args.model else "speculation-mini"
        found = {skill: {n: f | row[n] for n, f in figures(row).items()} for skill, row in rows.items()}
        found["all"] = figures(total(list(rows.values())))
        report.write(args.out, name, {**facts, "skills": found}, lambda figure: draw(figure, found, bool(args.model)))
    return 0


def show(skill: str, row: dict[str, dict[str, Any]]) -> None:
    found = figures(row)
    text = "  ".join(f"{n} {f['ratio']:.2f} ({f['tokens_per_step']:.2f})" for n, f in found.items())
    print(f"{skill:20} {found['off']['tokens_per_s']:6.0f}/s  {text}", flush=True)


def draw(figure: Any, rows: dict[str, dict[str, dict[str, float]]], speed: bool) -> None:
    """speed: of the ratios of speeds, else of tokens per step."""
    panel = figure.subplots()
    names = [name for name in next(iter(rows.values())) if not name.endswith("off")]
    for place, name in enumerate(names):
        heights = [row[name]["ratio" if speed else "tokens_per_step"] for row in rows.values()]
        panel.bar([i + 0.8 * place / len(names) for i in range(len(rows))], heights, 0.8 / len(names), label=name)
    panel.set_xticks(range(len(rows)), list(rows), fontsize=6, rotation=60)
    panel.axhline(1.0, color="tab:gray", linestyle="--", linewidth=1)
    panel.set_title("speed over that without drafters" if speed else "tokens per step of kvasir-mini", fontsize=9)
    panel.legend(fontsize=7)


if __name__ == "__main__":
    sys.exit(main())
