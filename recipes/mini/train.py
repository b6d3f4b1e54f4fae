"""Trains the model on a CPU: `python -m recipes.mini.train --minutes 60`.

The run ends by wall clock (`--minutes`, counted over all resumed parts) or by `--steps`. The rate warms up, stays, and
falls to zero over the last part. Everything lies in `work/`: a checkpoint (safetensors and JSON), and a log of JSON lines.
A run started again continues from the checkpoint: same weights, same optimizer state, same data.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
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
            optimizer.load_state_dict(
                {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
            )


def save(folder: Path, model: Mini, optimizers: Optimizers, progress: Progress) -> None:
    """Writes the checkpoint beside the old one, then swaps, so that a kill leaves a whole one."""
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()} | optimizers.tensors()
    path = folder / "checkpoint.safetensors"
    save_file(tensors, path.with_suffix(".new"), metadata={"progress": json.dumps(progress.__dict__)})
    os.replace(path.with_suffix(".new"), path)


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


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(Tokenizer.from_file(str(args.work / "tokenizer.json")))
    config = MiniConfig()
    model = Mini(config).init(args.seed)
    optimizers = Optimizers(model, args.rate)
    progress = Progress(seed=args.seed, config=config.to_json())
    checkpoint = args.work / "checkpoint.safetensors"
    if checkpoint.exists():
        tensors, progress = read(checkpoint)
        load_model(model, tensors)
        optimizers.load(tensors)
        print(f"resumes at step {progress.step}, {progress.seconds / 60:.1f} minutes", flush=True)
    hidden = torch.compile(model, dynamic=False) if args.compile else model
    with (args.work / "loss.jsonl").open("a") as log:
        _loop(args, model, hidden, optimizers, encoder, progress, log)


def _loop(args, model, hidden, optimizers, encoder, progress, log) -> None:
    saved = last = time.monotonic()
    recent: list[float] = []
    while True:
        done = max(progress.seconds / 60 / args.minutes, progress.step / args.steps if args.steps else 0.0)
        if done >= 1.0:
            break
        total = 0.0
        for part in range(PARTS):
            data = batch(encoder, progress.seed, progress.step, part)
            loss = loss_of(model, hidden, data) / PARTS
            loss.backward()
            total += loss.item()
            progress.tokens += int((data.docs >= 0).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = schedule(progress.step, done, args.fall)
        optimizers.step(share)
        progress.step += 1
        now = time.monotonic()
        progress.seconds, last = progress.seconds + now - last, now
        recent.append(total)
        if progress.step % 20 == 0:
            line = {"step": progress.step, "loss": round(sum(recent) / len(recent), 4), "rate": round(share, 3),
                    "tokens": progress.tokens, "minutes": round(progress.seconds / 60, 2)}  # fmt: skip
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(*(f"{k} {v}" for k, v in line.items()), flush=True)
            recent = []
        if now - saved > args.save_every * 60:
            save(args.work, model, optimizers, progress)
            saved = now
    save(args.work, model, optimizers, progress)
    print(f"finished: {progress.step} steps, {progress.tokens} tokens, {progress.seconds / 60:.1f} minutes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=75.0, help="wall clock of the whole run, resumed parts included"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="end after this many steps; 0: by the clock alone"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="full learning rate")
    parser.add_argument(
        "--fall", type=float, default=0.3, help="share of the run in which the rate falls to zero"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=float, default=4.0, help="minutes between checkpoints")
    parser.add_argument("--compile", action="store_true", help="compile the forward (needs a C++ compiler)")
    parser.add_argument(
        "--work", type=Path, default=WORK, help="folder of tokenizer.json, checkpoint and log"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
