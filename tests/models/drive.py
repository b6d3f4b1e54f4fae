"""Models driven by hand: made from a folder or a source, fed with slices over a cache, without runner or engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.batch import Slice, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.models.config import read_hf_config
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import HFView
from kvasir.models.pooling import read_pooling
from kvasir.models.registry import model_class_for
from kvasir.weights.load import fill
from kvasir.weights.source import GGUFSource, SafetensorsSource


def load(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of a folder or GGUF file. `changes` replace fields of its config."""
    if path.suffix == ".gguf":
        gguf = GGUFSource(path)
        config = hf_config_from_gguf(gguf.model.metadata, gguf)
        source = HFView(gguf, config, gguf.model.metadata["general.architecture"])
    else:
        config = read_hf_config(path) | read_pooling(path)
        source = SafetensorsSource(path)
    config |= changes
    cls = model_class_for(config)
    model = cls(cls.Config.from_hf(config))
    fill(model, source, dtype)
    return model


class Sequences:
    """Texts that are computed step by step over one cache, with block ids in disorder and NaN in what is unwritten."""

    def __init__(
        self,
        model: Any,
        texts: Sequence[Sequence[int]],
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
    ):
        self.model, self.causal = model, causal
        self.texts = [np.asarray(text, np.int32) for text in texts]
        self.done = [0] * len(texts)
        self.rows: list[list[Tensor]] = [[] for _ in texts]
        need = [-(-len(text) // block_size) for text in self.texts]
        order = np.random.default_rng(0).permutation(sum(need)).astype(np.int32) + 1
        self.tables = np.split(order, np.cumsum(need)[:-1])
        spec = model.cache_spec()
        groups = len(set(spec))
        self.cache = KVCache(spec, [sum(need) + 1] * groups, block_size, dtype)
        self.cache.fill_(float("nan"))

    def step(self, counts: dict[int, int]) -> None:
        """Computes the next `counts[i]` tokens of text i, all in one batch."""
        slices = []
        for i, count in counts.items():
            ids = self.texts[i][self.done[i] : self.done[i] + count]
            tables = (self.tables[i],) * len(self.cache.groups)
            slices.append(Slice(ids, self.done[i], tables, self.causal))
        with torch.inference_mode():
            batch = make_batch(slices, self.cache)
            hidden = self.model.forward(batch.tokens_T, batch)
        for (i, count), start in zip(counts.items(), batch.starts, strict=False):
            self.rows[i].append(hidden[int(start) : int(start) + count])
            self.done[i] += count

    def hidden(self) -> list[Tensor]:
        """float32 [tokens, D] of each text so far."""
        return [torch.cat(rows) for rows in self.rows]

    def logits(self) -> list[Tensor]:
        with torch.inference_mode():
            return [self.model.logits(rows) for rows in self.hidden()]


def whole(model: Any, texts: Sequence[Sequence[int]], **options: Any) -> list[Tensor]:
    """Hidden rows of each text, each computed alone and at once."""
    found = []
    for text in texts:
        run = Sequences(model, [text], **options)
        run.step({0: len(text)})
        found += run.hidden()
    return found


def difference(found: Tensor, expected: Tensor) -> float:
    """max |a - b| / max |b|"""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
