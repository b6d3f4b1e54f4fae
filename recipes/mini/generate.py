"""Answers by the recipe's own forward, greedy or drawn, many prompts at a time.

It shares nothing with the engine, so the one can judge the other.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from .chat import encode
from .model import Cache, Mini, MiniConfig, from_hf

# (logits [R, V], the rows' prompts by number, how many ids are written) -> the rows' next ids
Choose = Callable[[Tensor, list[int], int], list[int]]


def greedy(logits: Tensor, rows: list[int], step: int) -> list[int]:
    return logits.argmax(-1).tolist()


@dataclass
class Model:
    """An exported folder, ready to answer."""

    mini: Mini
    tokenizer: Tokenizer
    template: str
    ends: list[int]

    @torch.inference_mode()
    def answers(self, prompts: list[str], max_new: int, batch: int = 50) -> list[str]:
        """The greedy continuation of each rendered prompt, without the end token."""
        ids = [encode(self.tokenizer, p) for p in prompts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        out: dict[int, str] = {}
        for at in range(0, len(order), batch):
            some = order[at : at + batch]
            new = self.continuations([ids[i] for i in some], max_new)
            out |= {i: self.tokenizer.decode(t, skip_special_tokens=True) for i, t in zip(some, new, strict=True)}
        return [out[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def continuations(self, prompts: list[list[int]], max_new: int, choose: Choose = greedy) -> list[list[int]]:
        """At most `max_new` ids after each prompt, an end token included."""
        longest = max(map(len, prompts))
        pads = [longest - len(p) for p in prompts]
        cache = Cache(self.mini.config, pads)
        ids = torch.tensor([[0] * pad + p for pad, p in zip(pads, prompts, strict=True)])
        new: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        for step in range(max_new):
            hidden = self.mini(ids, *cache.begin(ids.shape[1]), cache)
            tokens = choose(self.mini.logits(hidden[:, -1]), rows, step)
            for row, token in zip(rows, tokens, strict=True):
                new[row].append(token)
            keep = [i for i, t in enumerate(tokens) if t not in self.ends]
            if not keep:
                break
            rows = [rows[i] for i in keep]
            cache.keep(torch.tensor(keep))
            ids = torch.tensor([[tokens[i]] for i in keep])
        return new


def load(folder: Path) -> Model:
    """Reads a folder written by the export step."""
    config = MiniConfig.from_hf(json.loads((folder / "config.json").read_text()))
    mini = from_hf(config, load_file(folder / "model.safetensors")).eval()
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return Model(mini, Tokenizer.from_file(str(folder / "tokenizer.json")), template, ends)
