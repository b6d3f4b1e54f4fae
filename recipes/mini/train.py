"""Trains the model on a CPU: `python -m recipes.mini.train --minutes 60`.

The run ends by wall clock (`--minutes`, counted over all resumed parts) or by `--steps`. The rate warms up,
stays, and falls to zero over the last part. Everything lies in `work/`: a checkpoint (safetensors and JSON) and
a log of JSON lines. A run started again continues from the checkpoint: same weights, same optimizer state, same
data. Workers are processes of one thread each; they lose less to busy neighbours than threads that wait for
one another in every matrix product.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .data import Batch, Encoder, batch
from .model import Mini, MiniConfig

WORK = Path(__file__).with_name("work")
PARTS = 2  # batches accumulated per step
WARMUP = 100  # steps


@dataclass
class Progress:
    """What a resumed run must know besides weights and optimizer state."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    seed: int = 1
    config: dict = field(default_factory=dict)


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""

    def __init__(self, model: Mini, rate: float) -> None:
        named = dict(model.named_parameters())
        matrices = [p for n, p in named.items() if p.dim() == 2 and n != "embed"]
        others = [p for n, p in named.items() if p.dim() == 1 or n == "embed"]
        self.rate = rate
        self.all = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    def step(self, share: float) -> None:
        """One update at `share` of the full rate."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"optimizer.{i}.{p}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
            for i, optimizer in enumerate(self.all)
            for p, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        for i, optimizer in enumerate(self.all):
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                if name.startswith(f"optimizer.{i}."):
                    _, _, p, key = name.split(".")
                    state.setdefault(int(p), {})[key] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def read(path: Path) -> tuple[dict[str, Tensor], Progress]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, Progress(**json.loads(file.metadata()["progress"]))


def load_model(model: Mini, tensors: dict[str, Tensor]) -> None:
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})


def schedule(step: int, done: float, fall: float) -> float:
    """Share of the full rate: up over the first steps, flat, down over the last `fall` of the run."""
    return min((step + 1) / WARMUP, 1.0, max(1.0 - done, 0.0) / fall)


def loss_of(model: Mini, hidden: Callable[..., Tensor], data: Batch) -> Tensor:
    """Mean cross-entropy over the learned positions."""
    positions = torch.arange(data.ids.shape[1])[None]
    with torch.autocast("cpu", torch.bfloat16):
        states = hidden(data.ids, data.mask(), positions)
        logits = model.logits(states[data.learn])
    targets = data.ids.roll(-1, 1)[data.learn]
    return F.cross_entropy(logits.float(), targets)


class Trainer:
    """One worker's model, data and optimizer state. All workers hold the same and take the same steps."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.encoder = Encoder(Tokenizer.from_file(str(args.work / "tokenizer.json")))
        self.model = Mini(MiniConfig()).init(args.seed)
        self.optimizers = Optimizers(self.model, args.rate)
        self.progress = Progress(seed=args.seed, config=self.model.config.to_json())
        self.checkpoint = args.work / "checkpoint.safetensors"
        if self.checkpoint.exists():
            self.resume()
        self.hidden = torch.compile(self.model, dynamic=False) if args.compile else self.model

    def resume(self) -> None:
        tensors, self.progress = read(self.checkpoint)
        load_model(self.model, tensors)
        self.optimizers.load(tensors)
        if self.rank == 0:
            print(f"resumes at step {self.progress.step}, {self.progress.seconds / 60:.1f} minutes", flush=True)

    def save(self) -> None:
        """Writes the checkpoint beside the old one, then swaps, so that a kill leaves a whole one."""
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        new = self.checkpoint.with_suffix(".new")
        save_file(tensors | self.optimizers.tensors(), new, {"progress": json.dumps(asdict(self.progress))})
        os.replace(new, self.checkpoint)

    def done(self) -> float:
        """The share of the run that lies behind, by the clock or by steps."""
        by_clock = self.progress.seconds / 60 / self.args.minutes
        return max(by_clock, self.progress.step / self.args.steps if self.args.steps else 0.0)

    def step(self) -> tuple[float, float]:
        """One update over all workers' parts; returns the loss and the share of the rate, 0 at the end."""
        loss, tokens = 0.0, 0
        for part in range(self.rank, PARTS, self.args.workers):
            data = batch(self.encoder, self.progress.seed, self.progress.step, part)
            part_loss = loss_of(self.model, self.hidden, data) / PARTS
            part_loss.backward()
            loss += part_loss.item()
            tokens += int((data.docs >= 0).sum())
        share = schedule(self.progress.step, self.done(), self.args.fall)
        loss, tokens, share = self.agree(loss, tokens, share)
        if share > 0.0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizers.step(share)
            self.progress.step += 1
            self.progress.tokens += int(tokens)
        return loss, share

    def agree(self, loss: float, tokens: float, share: float) -> tuple[float, float, float]:
        """Sums gradients, loss and tokens of all workers; the rate, which may hang on a clock, is the first's."""
        if self.args.workers == 1:
            return loss, tokens, share
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        facts = torch.tensor([loss, tokens, share if self.rank == 0 else 0.0])
        flat = torch.cat([facts, *(g.flatten() for g in grads)])
        torch.distributed.all_reduce(flat)
        sums = flat[3:].split([g.numel() for g in grads])
        for grad, total in zip(grads, sums, strict=True):
            grad.copy_(total.view_as(grad))
        loss, tokens, share = flat[:3].tolist()
        return loss, tokens, share

    def run(self) -> None:
        """Steps until the share of the rate has fallen to nothing; the first worker logs and saves.

        A worker whose parent is gone stops, since a killed run must not leave workers behind.
        """
        parent = os.getppid()
        saved = last = time.monotonic()
        losses: list[float] = []
        share = 1.0 if self.done() < 1.0 else 0.0
        while share > 0.0 and os.getppid() == parent:
            loss, share = self.step()
            now = time.monotonic()
            self.progress.seconds, last = self.progress.seconds + now - last, now
            losses.append(loss)
            if self.rank == 0 and self.progress.step % 20 == 0:
                self.log(sum(losses) / len(losses), share)
                losses = []
            if self.rank == 0 and now - saved > self.args.save_every * 60:
                self.save()
                saved = now
        if self.rank == 0 and share == 0.0:
            self.save()
            print(f"finished: {self.progress}", flush=True)

    def log(self, loss: float, share: float) -> None:
        p = self.progress
        minutes = round(p.seconds / 60, 2)
        line = {"step": p.step, "loss": round(loss, 4), "rate": round(share, 3)}
        line |= {"tokens": p.tokens, "minutes": minutes}
        with (self.args.work / "loss.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(*(f"{k} {v}" for k, v in line.items()), flush=True)


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One worker, on its own threads; workers meet at a file."""
    torch.set_num_threads(args.threads)
    if args.workers > 1:
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.workers)
    Trainer(args, rank).run()
    if args.workers > 1:
        torch.distributed.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Runs the workers: one in this process, more in processes of their own."""
    args.work.mkdir(parents=True, exist_ok=True)
    if PARTS % args.workers:
        raise ValueError(f"--workers {args.workers}: must divide the {PARTS} parts of a step")
    if args.workers == 1:
        work(0, args, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        torch.multiprocessing.spawn(work, (args, meeting), nprocs=args.workers)


def arguments() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--minutes", type=float, default=90.0, help="wall clock of the whole run, resumed parts included")
    add("--steps", type=int, default=0, help="end after this many steps; 0: by the clock alone")
    add("--rate", type=float, default=3e-3, help="full learning rate")
    add("--fall", type=float, default=0.3, help="share of the run in which the rate falls to zero")
    add("--seed", type=int, default=1)
    add("--workers", type=int, default=2, help="processes that share each step's batches")
    add("--threads", type=int, default=1, help="threads of each worker")
    add("--save-every", type=float, default=4.0, help="minutes between checkpoints")
    add("--compile", action="store_true", help="compile the forward (needs a C++ compiler)")
    add("--work", type=Path, default=WORK, help="folder of tokenizer.json, checkpoint and log")
    return parser


if __name__ == "__main__":
    train(arguments().parse_args())
