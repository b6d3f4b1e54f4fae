"""Trains drafters on the target's own probabilities and writes each as a folder.

    python -m recipes.mini.draft.train draft eagle3 mtp --seconds 600

`--seconds` count the processor's time, of one thread, so that busy neighbours take nothing away; with `--steps` a run is
the same each time. Heads draft several ids in a row while they are trained, each from the hidden state that the one
before computed. What drafters read of the target is computed in the first round through the data, and kept.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ..data import Batch
from ..eval import FOLDER
from ..generate import load
from ..model import Mini
from ..train import WORK
from . import answers, folders
from .heads import Eagle3, Head, HeadConfig, Mtp
from .optimizers import Optimizers
from .unroll import Said, distilled, drafts, said, target_rows

KINDS = ("draft", "eagle3", "mtp")
ROWS = 2  # of a batch: many small steps
FADE = 0.8  # weight of a draft's loss against the draft's before it, as in EAGLE-3
WARMUP = 50  # steps


class Reader:
    """Batches in a random order, round after round, with the target's side computed once and kept in float16."""

    def __init__(self, target: Mini, data: Batch) -> None:
        self.target, self.data = target, data
        self.kept: dict[int, list[Tensor]] = {}

    def rounds(self, seed: int) -> Iterator[Said]:
        rng, order = Random(seed), list(range(len(self.data.ids)))
        while True:
            rng.shuffle(order)
            for at in range(0, len(order) - ROWS + 1, ROWS):
                yield self.read(order[at : at + ROWS])

    def read(self, some: list[int]) -> Said:
        batch = Batch(self.data.ids[some], self.data.docs[some], self.data.learn[some])
        if any(i not in self.kept for i in some):
            rows = target_rows(self.target, batch)
            self.kept |= {i: [r[n].half() for r in rows] for n, i in enumerate(some)}
        rows = [torch.stack(parts).float() for parts in zip(*(self.kept[i] for i in some), strict=True)]
        return said(self.target, batch, rows)


def loss_of(drafter: Mini | Head, target: Mini, all_said: Said, steps: int) -> tuple[Tensor, list[float]]:
    """The weighted mean over the drafts in a row, and each draft's own loss."""
    vocab = drafter.vocab if isinstance(drafter, Head) else None
    found = [distilled(d, all_said.logits, vocab) for d in drafts(drafter, target.embed, all_said, steps)]
    weights = [FADE**i for i in range(len(found))]
    total = torch.stack([w * x for w, x in zip(weights, found, strict=True)]).sum() / sum(weights)
    return total, [x.item() for x in found]


def frequent(found: list[answers.Answered], size: int, vocab: int) -> Tensor:
    """The `size` most frequent ids of the answers, in ascending order."""
    counts = torch.zeros(vocab, dtype=torch.long)
    for a in found:
        ids = [i for first, last in a.answers for i in a.ids[first : last + 1]]
        counts += torch.bincount(torch.tensor(ids), minlength=vocab)
    kept = counts.argsort(descending=True, stable=True)[:size].sort().values
    print(f"{size} of {vocab} ids are {counts[kept].sum() / counts.sum():.3%} of the answers", flush=True)
    return kept


@torch.no_grad()
def small(target: Mini, args: argparse.Namespace) -> Mini:
    """A draft model whose table begins as the target's, in the directions that hold most of it."""
    config = folders.draft_config(target.config, args.width, args.layers, args.ffn or 2 * args.width, args.heads, args.kv_heads)  # fmt: skip
    model = Mini(config).init(args.seed)
    _, _, directions = torch.linalg.svd(target.embed, full_matrices=False)
    model.embed.copy_(target.embed @ directions[: config.hidden].T)
    return model


def made(kind: str, args: argparse.Namespace, target: Mini, found: list[answers.Answered]) -> Mini | Head:
    """The drafter before training, or as far as it has been trained."""
    if args.further:
        return folders.read(args.work / kind, target).requires_grad_(True)
    if kind == "draft":
        return small(target, args)
    if kind == "mtp":
        return Mtp(target).init(args.seed)
    config = HeadConfig(args.ffn or HeadConfig.ffn, args.draft_vocab, tuple(args.aux))
    vocab = frequent(found, config.draft_vocab, target.config.vocab)
    return Eagle3(target.config, config, vocab).init(target, args.seed)


def fit(drafter: Mini | Head, reader: Reader, args: argparse.Namespace) -> None:
    """Steps until the time is spent or so many are done; the rate warms up and falls to zero over the last half."""
    drafter.train()
    optimizers = Optimizers(drafter, args.rate)
    rounds = reader.rounds(args.seed)
    began, step, losses = time.process_time(), 0, []
    while (done := step / args.steps if args.steps else (time.process_time() - began) / args.seconds) < 1.0:
        total, each = loss_of(drafter, reader.target, next(rounds), args.drafts)
        total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizers.step(min((step + 1) / WARMUP, 1.0, (1.0 - done) / 0.5))
        step += 1
        losses.append(each)
        if step % 50 == 0:
            means = " ".join(f"{sum(x) / len(x):.4f}" for x in zip(*losses, strict=True))
            print(f"step {step} losses {means} seconds {time.process_time() - began:.0f}", flush=True)
            losses = []
    drafter.eval()


def arguments() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("kinds", nargs="+", choices=KINDS, help="the drafters to train, one after the other")
    add("--seconds", type=float, default=600.0, help="processor time to spend on each")
    add("--steps", type=int, default=0, help="end after this many steps; 0: by the clock")
    add("--further", action="store_true", help="begin with the drafters that are in the work folder")
    add("--seed", type=int, default=1)
    add("--rate", type=float, default=8e-3, help="full learning rate")
    add("--drafts", type=int, default=5, help="drafts in a row that a head is trained on")
    add("--width", type=int, default=96, help="of the draft model")
    add("--layers", type=int, default=2, help="of the draft model")
    add("--heads", type=int, default=3, help="of the draft model")
    add("--kv-heads", type=int, default=1, help="of the draft model")
    add("--ffn", type=int, default=0, help="inner width of the draft model's or the EAGLE-3 head's MLP; 0: the default")
    add("--draft-vocab", type=int, default=HeadConfig.draft_vocab, help="ids that the EAGLE-3 head can draft")
    add("--aux", type=int, nargs=3, default=list(HeadConfig.aux), help="target layers that the head reads, from 0")
    add("--model", type=Path, default=FOLDER, help="the target, an exported folder")
    add("--work", type=Path, default=WORK, help="folder of answers.safetensors, and of the drafters")
    return parser


def train(args: argparse.Namespace) -> None:
    """Trains each drafter and writes its folder, of the kind's name."""
    target = load(args.model).mini.requires_grad_(False)
    found = answers.read(args.work / "answers.safetensors")
    reader = Reader(target, answers.packed(found))
    whole = sum(p.numel() for p in target.parameters())
    for kind in args.kinds:
        drafter = made(kind, args, target, found)
        count = sum(p.numel() for p in drafter.parameters())
        print(f"{kind}: {count} parameters, {count / whole:.3f} of the target's", flush=True)
        fit(drafter, reader, args)
        print(f"{args.work / kind}: {folders.write(drafter, args.work / kind, args.model)} bytes", flush=True)


if __name__ == "__main__":
    options = arguments().parse_args()
    torch.set_num_threads(1)
    train(options)
