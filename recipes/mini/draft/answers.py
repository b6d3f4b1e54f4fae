"""Writes what drafters are trained on: conversations, of which one in four ends with an answer of the target's own.

    python -m recipes.mini.draft.answers --seconds 240

Half of these answers are greedy, half drawn at temperature 1. The others are the generators', which take no time and
differ little, since the target has learned them. `--seconds` count the processor's time, of one thread.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..chat import encode, render, render_case
from ..data import Batch, Encoder, pack
from ..eval import FOLDER
from ..generate import Model, load
from ..skills import Case, dialogue
from ..train import WORK

SIZE = 512  # positions of a row
MAX_NEW = 160
BATCH, OTHERS = 64, 192  # conversations with the target's answer in a step, and with the generators'
MAX_POSITION = 1 << 20


@dataclass
class Answered:
    """One conversation: its ids, and the first and last id of each answer that the target may have given."""

    ids: list[int]
    answers: list[tuple[int, int]]


def gumbel(keys: list[tuple[int, int]], vocab: int) -> Tensor:
    """[len(keys), vocab] standard Gumbel noise, each row a function of its (seed, position)."""
    out, generator = torch.empty(len(keys), vocab), torch.Generator()
    for row, (seed, position) in zip(out, keys, strict=True):
        row.exponential_(generator=generator.manual_seed(seed * MAX_POSITION + position))
    return out.log_().neg_()


def answer(model: Model, prompts: list[list[int]], seeds: list[int | None], max_new: int) -> list[list[int]]:
    """The target's answers, greedy where the seed is None, else drawn with the noise of seed and position."""

    def choose(logits: Tensor, rows: list[int], step: int) -> list[int]:
        drawn = [i for i, row in enumerate(rows) if seeds[row] is not None]
        keys = [(seeds[rows[i]] or 0, len(prompts[rows[i]]) + step) for i in drawn]
        logits[drawn] += gumbel(keys, logits.shape[1])
        return logits.argmax(-1).tolist()

    return model.continuations(prompts, max_new, choose)


def answered(model: Model, encoder: Encoder, cases: list[Case], seeds: list[int | None]) -> list[Answered]:
    """The cases with the target's answers in place of their own, greedy where the seed is None."""
    texts = [render(c.prompt, c.tools, thinking=c.thinking, source=model.template) for c in cases]
    prompts = [encode(model.tokenizer, t) for t in texts]
    out = []
    for case, prompt, new in zip(cases, prompts, answer(model, prompts, seeds, MAX_NEW), strict=True):
        earlier = [] if case.thinking else encoder.answers(prompt[: -len(encoder.assistant) - 1])
        out.append(Answered(prompt + new, [*earlier, (len(prompt), len(prompt) + len(new) - 1)]))
    return out


def unanswered(encoder: Encoder, case: Case) -> Answered:
    """A case with its own answers, most of which the target would give, too."""
    ids = encode(encoder.tokenizer, render_case(case))[:-1]  # without the last newline
    return Answered(ids, encoder.answers(ids)[-1 if case.thinking else 0 :])


def generate(model: Model, seconds: float, steps: int, seed: int) -> list[Answered]:
    """Batches of conversations, until the time is spent or so many batches are done."""
    encoder, found, began, step = Encoder(model.tokenizer), [], time.process_time(), 0
    while time.process_time() - began < seconds if not steps else step < steps:
        rng = Random(f"answers/{seed}/{step}")
        cases = [dialogue(rng, int(SIZE * rng.choice((0.2, 0.4, 0.7)))) for _ in range(BATCH + OTHERS)]
        seeds = [None if i % 2 else rng.getrandbits(40) for i in range(BATCH)]
        found += answered(model, encoder, cases[:BATCH], seeds)
        found += [unanswered(encoder, c) for c in cases[BATCH:]]
        step += 1
        ids = sum(len(a.ids) for a in found)
        print(f"step {step} conversations {len(found)} ids {ids} seconds {time.process_time() - began:.0f}", flush=True)
    return found


def save(path: Path, found: list[Answered]) -> None:
    """One tensor of all ids, one of the conversations' lengths, one of rows (conversation, first, last)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spans = [(c, *span) for c, a in enumerate(found) for span in a.answers]
    tensors = {
        "ids": torch.tensor([i for a in found for i in a.ids], dtype=torch.int16),
        "lengths": torch.tensor([len(a.ids) for a in found], dtype=torch.int32),
        "answers": torch.tensor(spans, dtype=torch.int32),
    }
    save_file(tensors, path)


def read(path: Path) -> list[Answered]:
    """The inverse of `save`. Raises FileNotFoundError, with the remedy, where there is none."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: run python -m recipes.mini.draft.answers first")
    tensors = load_file(path)
    parts = tensors["ids"].tolist()
    found, at = [], 0
    for length in tensors["lengths"].tolist():
        found.append(Answered(parts[at : at + length], []))
        at += length
    for c, first, last in tensors["answers"].tolist():
        found[c].answers.append((first, last))
    return found


def packed(found: list[Answered], size: int = SIZE) -> Batch:
    """Rows of `size` positions, first fit, longest first; conversations that are longer are left out.

    `learn` marks the positions whose next token is an answer's.
    """
    rows: list[list[tuple[list[int], list[bool]]]] = []
    room: list[int] = []
    for a in sorted((a for a in found if len(a.ids) <= size), key=lambda a: -len(a.ids)):
        learn = [False] * len(a.ids)
        for first, last in a.answers:
            learn[first - 1 : last] = [True] * (last - first + 1)
        row = next((r for r, left in enumerate(room) if left >= len(a.ids)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(size)
        rows[row].append((a.ids, learn))
        room[row] -= len(a.ids)
    return pack(rows, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="processor time to spend")
    parser.add_argument("--steps", type=int, default=0, help="batches of conversations; 0: by the clock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=FOLDER, help="the target, an exported folder")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of answers.safetensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = generate(load(args.model), args.seconds, args.steps, args.seed)
    save(args.work / "answers.safetensors", found)


if __name__ == "__main__":
    main()
