"""Greedy answers by the recipe's own forward, many prompts at a time.

It shares nothing with the engine, so the one can judge the other.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .chat import encode
from .model import Cache, Mini, MiniConfig, from_hf


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
            new = self._batch([ids[i] for i in some], max_new)
            out |= {i: self.tokenizer.decode(t, skip_special_tokens=True) for i, t in zip(some, new, strict=True)}
        return [out[i] for i in range(len(prompts))]

    def _batch(self, prompts: list[list[int]], max_new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        pads = [longest - len(p) for p in prompts]
        cache = Cache(self.mini.config, pads)
        ids = torch.tensor([[0] * pad + p for pad, p in zip(pads, prompts, strict=True)])
        new: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        for _ in range(max_new):
            hidden = self.mini(ids, *cache.begin(ids.shape[1]), cache)
            tokens = self.mini.logits(hidden[:, -1]).argmax(-1).tolist()
            keep = [i for i, t in enumerate(tokens) if t not in self.ends]
            for i in keep:
                new[rows[i]].append(tokens[i])
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
