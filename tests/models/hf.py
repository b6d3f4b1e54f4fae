"""Model folders: opens folders with changed configs, and writes transformers' models with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kvasir.layers.tensors import TensorPlace
from kvasir.models.registry import model_class_for
from kvasir.runner.load import open_checkpoint
from kvasir.weights.load import fill
from kvasir.weights.local import find_local
from tests.models.oracle import state_of


def load(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Our model of a folder or GGUF file. `changes` replace fields of its config."""
    config, source = open_checkpoint(find_local(path))
    config |= changes
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    fill(model, source, TensorPlace(dtype))
    return model


def randomized(model: Any, seed: int = 0, gain: float = 1.5) -> Any:
    """The transformers model in eval mode: matrices of deviation gain / sqrt(inputs), lookup tables of 1,
    norms around 1, biases that matter. Knows `Conv1D`, whose inputs come first."""
    generator = torch.Generator().manual_seed(seed)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, value in model.named_parameters():
            kind = type(modules[name.rpartition(".")[0]]).__name__
            value.normal_(generator=generator)
            if value.dim() == 1:
                around = name.endswith("weight") and "Gemma" not in kind  # whose norms add 1 themselves
                value.mul_(0.3).add_(1.0 if around else 0.0)
            elif "Embedding" not in kind:
                value.mul_(gain / value.shape[0 if kind == "Conv1D" else -1] ** 0.5)
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    """Written as transformers does, without its progress bar."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in state_of(model).items()}
    shared = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
    kept = {name: tensor for name, tensor in tensors.items() if shared[tensor.data_ptr()] == name}
    save_file(kept, folder / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
