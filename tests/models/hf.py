"""transformers as the oracle: tiny random models whose weights are large enough for mistakes to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvasir.models.config import read_hf_config
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import HFView
from kvasir.models.pooling import read_pooling
from kvasir.models.registry import model_class_for
from kvasir.weights.load import fill
from kvasir.weights.source import GGUFSource, SafetensorsSource

TOLERANCE = 1e-4
MOVED = 100 * TOLERANCE  # what a flipped field of the config must do to the result


def load(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Our model of a folder or GGUF file. `changes` replace fields of its config."""
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


def randomized(model: Any, seed: int = 0, gain: float = 1.0) -> Any:
    """The transformers model with new weights: matrices of deviation gain / sqrt(inputs), lookup tables of deviation
    1, norms around 1, biases that matter. The usual deviation of 0.02 would hide soft-caps and wrong angles."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(generator=generator)
            if value.dim() > 1 and id(value) not in tables:
                inputs = value.shape[0] if _is_conv1d(model, name) else value.shape[1]
                value.mul_(gain / inputs**0.5)
            elif value.dim() == 1:
                value.mul_(0.3).add_(1.0 if name.endswith("weight") else 0.0)
    return model.eval()


def _is_conv1d(model: Any, name: str) -> bool:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"


def save(model: Any, folder: Path, **changes: Any) -> Path:
    """The model as a folder; `changes` replace fields of its config.json, None takes one out."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def difference(found: Tensor, expected: Tensor) -> float:
    """max |a - b| / max |b|"""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def random_ids(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
