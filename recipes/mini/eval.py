"""Held-out cases, one row per skill: `python -m recipes.mini.eval [--model DIR] [--cases N]`.

Cases are generated from keys that training never draws (see `skills.case.split_of`); answers are greedy.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table

from . import skills
from .chat import render
from .generate import Model, load
from .skills import HELD, Case, arithmetic
from .skills.memory import thinking_recall
from .skills.mix import segment

FOLDER = Path(__file__).resolve().parents[2] / "src/kvasir/assets/kvasir-mini"
Check = Callable[[Case, str], bool]


@dataclass(frozen=True)
class Row:
    """A skill: how its cases are made, when an answer is right, and the share that must be right."""

    name: str
    make: Callable[[Random], Case]
    right: Check
    bar: float | None = None
    max_new: int = 80


@dataclass
class Score:
    """One line of the table; `share` is between 0 and 1."""

    skill: str
    cases: int
    share: float
    bar: float | None

    @property
    def met(self) -> bool:
        return self.bar is None or self.share >= self.bar


def has_value(case: Case, text: str) -> bool:
    """The value wanted, as whole words, in the answer."""
    return re.search(rf"(?<!\w){re.escape(case.want)}(?!\w)", text) is not None


def recalled(case: Case, text: str) -> bool:
    return has_value(case, text) and "do not know" not in text


def result_is(case: Case, text: str) -> bool:
    """The number behind the first equals sign, else the last number."""
    numbers = re.findall(r"=\s*(-?\d+)", text)[:1] or re.findall(r"\d+", text)[-1:]
    return numbers == [case.want]


def same(case: Case, text: str) -> bool:
    return text == case.answer


def parsed(text: str) -> object | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def calls_exactly(case: Case, text: str) -> bool:
    """Nothing but one call, with the name and the arguments wanted."""
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
    return match is not None and parsed(match[1]) == case.want


def follows(case: Case, text: str) -> bool:
    """The rule of the system prompt is kept, or the fact in it is used."""
    if isinstance(case.want, str):
        return has_value(case, text)
    rule, word = case.want
    kept = {"starts": text.startswith, "ends": text.endswith, "is": lambda w: text.strip(".!") == w}
    return kept[rule](word)


def thinks(right: Check) -> Check:
    """A closed thought, then an answer that is right."""

    def check(case: Case, text: str) -> bool:
        match = re.fullmatch(r"<think>\n(.+)\n</think>\n\n(.+)", text, re.DOTALL)
        return match is not None and right(case, match[2])

    return check


def tells_story(case: Case, text: str) -> bool:
    """Several whole sentences about the hero, and no run of four words twice."""
    words = re.findall(r"\w+", text)
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    whole = text.endswith((".", "!", "?", '"')) and len(words) > 30
    return whole and case.want["hero"] in text and len(set(grams)) == len(grams)


def recall_among_others(rng: Random) -> Case:
    """In half of the cases something else is said between telling and asking."""
    return skills.recall(rng, HELD, segment(rng, HELD) if rng.random() < 0.5 else None)


def held(make: Callable[..., Case], *args: object) -> Callable[[Random], Case]:
    return lambda rng: make(rng, HELD, *args)


ROWS = [
    Row("recall", recall_among_others, recalled, 0.95),
    Row("unknown fact", held(skills.unknown), has_value),
    Row("no idea", held(skills.no_idea), has_value),
    Row("who has what", held(skills.people), has_value),
    Row("addition", held(skills.addition), result_is, 0.90),
    Row("subtraction", held(skills.subtraction), result_is),
    Row("comparing", held(skills.comparing), has_value),
    Row("echo", held(skills.echo), same),
    Row("system prompt", held(skills.follow), follows),
    Row("JSON parses", held(skills.json_answer), lambda c, t: isinstance(parsed(t), dict), 0.98),
    Row("JSON exact", held(skills.json_answer), lambda c, t: parsed(t) == c.want),
    Row("tool call", held(skills.tool_call), calls_exactly, 0.90, 120),
    Row("tool result", held(skills.tool_result), same),
    Row("no tool needed", held(skills.no_tool), lambda c, t: bool(t) and "<tool_call>" not in t),
    Row("thinking: sums", held(arithmetic.addition, True), thinks(result_is), None, 120),
    Row("thinking: two steps", held(skills.two_steps), thinks(lambda c, t: has_value(c, t)), None, 120),
    Row("thinking: recall", held(thinking_recall), thinks(recalled), None, 120),
    Row("small talk", held(skills.small_talk), lambda c, t: t in c.want),
    Row("knowledge", held(skills.knowledge), has_value),
    Row("story", held(skills.story), tells_story, None, 200),
]  # fmt: skip


def score(model: Model, row: Row, num: int, seed: int, show: int = 0) -> Score:
    """Runs one row; prints up to `show` wrong answers."""
    rng = Random(f"{row.name}/{seed}")
    cases = [row.make(rng) for _ in range(num)]
    prompts = [render(c.prompt, c.tools, thinking=c.thinking, source=model.template) for c in cases]
    texts = model.answers(prompts, row.max_new)
    wrong = [i for i in range(num) if not row.right(cases[i], texts[i])]
    for i in wrong[:show]:
        print(f"--- {row.name}, wanted {cases[i].want!r}\n{prompts[i]}{texts[i]}")
    return Score(row.name, num, 1 - len(wrong) / num, row.bar)


def table(scores: list[Score]) -> Table:
    out = Table("skill", "cases", "right", "bar", "met")
    for s in scores:
        bar = "" if s.bar is None else f">= {s.bar:.0%}"
        out.add_row(s.skill, str(s.cases), f"{s.share:.1%}", bar, "" if s.bar is None else "yes" if s.met else "NO")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="an exported folder")
    parser.add_argument("--cases", type=int, default=200, help="cases per skill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show", type=int, default=0, help="print this many wrong answers per skill")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", type=Path, help="write the scores as JSON")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    model = load(args.model)
    scores = [score(model, r, args.cases, args.seed, args.show) for r in ROWS if args.only in r.name]
    Console().print(table(scores))
    print(f"{time.monotonic() - began:.0f} s")
    if args.out:
        args.out.write_text(json.dumps([asdict(s) for s in scores], indent=1))
    return 0 if all(s.met for s in scores) else 1


if __name__ == "__main__":
    raise SystemExit(main())
