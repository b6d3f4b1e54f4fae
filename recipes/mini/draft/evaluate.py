"""How often the target accepts what a drafter drafts, on held-out conversations, one row per skill.

    python -m recipes.mini.draft.evaluate --cases 50
    python -m recipes.mini.draft.evaluate --only story --drafter recipes/mini/work/eagle3

The target answers greedily, then at temperature 1 with noise that is a function of seed, position and id; drafters draw
with the same noise (a Gumbel coupling). Columns 1 to 5: of the drafts whose earlier ones in a row were accepted, the
share accepted. Columns k = 1 to 5: ids per step of the target when k are drafted each time; 1 without a drafter. No
engine is involved: this is the recipe's own forward, with the folder's weights.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..chat import encode, render
from ..data import Batch
from ..eval import FOLDER, ROWS, Row
from ..generate import Model, load
from ..model import Mini
from ..train import WORK
from .answers import answer, gumbel
from .folders import read
from .heads import Head
from .train import KINDS
from .unroll import drafts, said, target_rows

STEPS = 5


@dataclass
class Held:
    """Held-out prompts of one skill with the target's answers, one a row. seeds: of each row's noise, None if greedy."""

    batch: Batch
    seeds: list[int] | None

    def noise(self, vocab: int) -> Tensor | None:
        """[n, V] of the ids after the positions marked in `learn`; None if greedy."""
        if self.seeds is None:
            return None
        where = self.batch.learn.nonzero().tolist()
        return gumbel([(self.seeds[row], position + 1) for row, position in where], vocab)


@dataclass
class Counts:
    """Of one drafter and skill. reached, accepted: drafts by position. ids, steps: of the target, by k drafts a step."""

    reached: list[int]
    accepted: list[int]
    ids: list[int]
    steps: list[int]

    @staticmethod
    def none() -> "Counts":
        return Counts(*([0] * STEPS for _ in range(4)))

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Counts(*([a + b for a, b in zip(*pair, strict=True)] for pair in pairs))

    def rates(self) -> list[float]:
        return [a / max(r, 1) for a, r in zip(self.accepted, self.reached, strict=True)]

    def speeds(self) -> list[float]:
        return [i / max(s, 1) for i, s in zip(self.ids, self.steps, strict=True)]


def held_out(model: Model, row: Row, num: int, seed: int, drawn: bool) -> Held:
    """`num` cases of a skill, answered by the target."""
    rng = Random(f"{row.name}/{seed}")
    cases = [row.make(rng) for _ in range(num)]
    seeds = [rng.getrandbits(40) for _ in cases]
    texts = [render(c.prompt, c.tools, thinking=c.thinking, source=model.template) for c in cases]
    prompts = [encode(model.tokenizer, t) for t in texts]
    chosen: list[int | None] = [s if drawn else None for s in seeds]
    new = answer(model, prompts, chosen, row.max_new)
    size = max(len(p) + len(n) for p, n in zip(prompts, new, strict=True))
    ids, docs, learn = (torch.zeros(num, size, dtype=kind) for kind in (torch.long, torch.long, torch.bool))
    docs -= 1
    for i, (p, n) in enumerate(zip(prompts, new, strict=True)):
        ids[i, : len(p) + len(n)], docs[i, : len(p) + len(n)] = torch.tensor(p + n), 0
        learn[i, len(p) - 1 : len(p) + len(n) - 1] = True
    return Held(Batch(ids, docs, learn), seeds if drawn else None)


@torch.inference_mode()
def matches(drafter: Mini | Head, target: Mini, held: Held) -> Tensor:
    """Bool [STEPS, B, S]: whether the draft so many ids after a position is right, given that those before it are."""
    batch = held.batch
    all_said = said(target, batch, target_rows(target, batch))
    noise, after = held.noise(target.config.vocab), batch.ids.roll(-1, 1)[batch.learn]
    right = torch.zeros(STEPS, *batch.ids.shape, dtype=torch.bool)
    for step, draft in enumerate(drafts(drafter, target.embed, all_said, STEPS)):
        vocab = drafter.vocab if isinstance(drafter, Head) else torch.arange(draft.logits.shape[1])
        own_noise = 0.0 if noise is None else noise[draft.at][:, vocab]
        drawn = vocab[(draft.logits + own_noise).argmax(-1)]
        right[step, draft.row, draft.anchor] = drawn == after[draft.at]
    if not isinstance(drafter, Head):
        for step in range(1, STEPS):
            right[step, :, :-step] = right[0, :, step:]
    return right


def count(right: Tensor, learn: Tensor) -> Counts:
    """Follows each answer from its first id, which no drafter can guess: the prompt's own step samples it."""
    total = Counts.none()
    run = right.cumprod(0).sum(0).tolist()  # how many drafts in a row are right, from each position
    for row, marked in zip(run, learn, strict=True):
        where = marked.nonzero()[:, 0].tolist()
        first, last = where[0] + 1, where[-1] + 1  # the answer's first and last id
        for at in range(first, last):
            for i in range(min(STEPS, last - at)):
                total.reached[i] += row[at] >= i
                total.accepted[i] += row[at] > i
        for k in range(1, STEPS + 1):
            at = first
            while at < last:
                at = min(at + 1 + min(row[at], k), last)
                total.steps[k - 1] += 1
            total.ids[k - 1] += last - first
    return total


def table(title: str, found: dict[str, Counts]) -> Table:
    out = Table("skill", *map(str, range(1, STEPS + 1)), *(f"k={k}" for k in range(1, STEPS + 1)), title=title)
    whole = Counts.none()
    for counts in found.values():
        whole += counts
    for name, counts in (found | {"all": whole}).items():
        out.add_row(name, *(f"{r:.1%}" for r in counts.rates()), *(f"{s:.2f}" for s in counts.speeds()))
    return out


def evaluate(model: Model, drafters: dict[str, Mini | Head], args: argparse.Namespace) -> dict[str, dict[str, Counts]]:
    """Per drafter and temperature, per skill."""
    found: dict[str, dict[str, Counts]] = {f"{name}, {how}": {} for how in HOW for name in drafters}
    began = time.monotonic()
    for row in (r for r in ROWS if args.only in r.name):
        for how, drawn in HOW.items():
            held = held_out(model, row, args.cases, args.seed, drawn)
            for name, drafter in drafters.items():
                found[f"{name}, {how}"][row.name] = count(matches(drafter, model.mini, held), held.batch.learn)
        print(f"{row.name}: {time.monotonic() - began:.0f} s", flush=True)
    return found


HOW = {"greedy": False, "temperature 1": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, nargs="*", help="folders; by default those in the work folder")
    parser.add_argument("--cases", type=int, default=50, help="cases per skill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="skills whose name contains this")
    parser.add_argument("--model", type=Path, default=FOLDER, help="the target, an exported folder")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load(args.model)
    places = args.drafter or [args.work / kind for kind in KINDS if (args.work / kind).exists()]
    if not places:
        parser.error(f"no drafter in {args.work}: run python -m recipes.mini.draft.train first")
    found = evaluate(model, {p.name: read(p, model.mini) for p in places}, args)
    for title, counts in found.items():
        Console(width=150).print(table(title, counts))
    if args.out:
        plain = {title: {name: asdict(c) for name, c in counts.items()} for title, counts in found.items()}
        args.out.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
