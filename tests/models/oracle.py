"""transformers as the oracle: tiny models of random weights, and ours filled with the same ones.

Weights are scaled so that scores and logits are of the order of 1 to 10: with the usual deviation of 0.02 all
attention is uniform and errors in rope, scale or windows hide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.tensors import TensorPlace
from kvasir.models.registry import model_class_for
from kvasir.weights.load import fill, spellings
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import DummySource

# max |a - b| / max |b| of float32 logits: both sides sum in their own order, so a few hundred roundings of
# 6e-8.
TOLERANCE = 1e-4
SENSITIVITY = 100 * TOLERANCE
_CHOICE = ("e_score_correction_bias", "expert_bias")  # buffers that take part in the choice of experts


class DictSource:
    """Tensors in memory as a `WeightSource`."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = dict(tensors)

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo(name, tuple(tensor.shape), "F32", tensor.nbytes, Path())

    def array(self, name: str) -> np.ndarray:
        return self.tensors[name].detach().float().numpy()

    def raw(self, name: str) -> np.ndarray:
        return self.tensors[name].numpy().view(np.uint8)

    def drop(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


def randomized(model: Any, seed: int = 0) -> Any:
    """The transformers model in eval mode with weights that make every part of it count."""
    generator = torch.Generator().manual_seed(seed)
    adds_one = re.match("Step3p5|Gemma([23](?!n)|(?!\\d))", type(model).__name__)  # to the weights of its norms
    with torch.no_grad():
        buffers = model.named_buffers()
        weights = ((n, t) for n, t in buffers if n.endswith((*_CHOICE, "layer_scalar")))
        for name, tensor in (*model.named_parameters(), *weights):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(_CHOICE):
                tensor.copy_(noise * 0.1)
            elif tensor.dim() > 1:
                gain = 1.0 if "embed" in name else 1.5 / tensor.shape[-1] ** 0.5
                gain = 4.0 if "modality_router" in name else gain  # whose inputs are divided by their width
                tensor.copy_(noise * gain)
            else:
                around = re.search(r"norm(_\d|s\.\d+)?\.weight$|scale$|scalar$", name) is not None and not adds_one
                tensor.copy_(noise * 0.3 + around)
    return model.eval()


def state_of(model: Any) -> dict[str, Tensor]:
    """The transformers model's tensors as `save_pretrained` writes them: each expert's matrices by themselves."""
    from transformers.core_model_loading import revert_weight_conversion

    if (whole := getattr(model, "whole", None)) is not None:  # of which it is the text part
        texts = ("model.", "lm_head.")
        return {name: tensor for name, tensor in state_of(whole).items() if name.startswith(texts)}
    state = dict(revert_weight_conversion(model, model.state_dict()))
    for q in [name for name in state if name.endswith(".q_conv1d.weight")]:  # transformers cuts in three equal parts
        names = [q.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        sizes = [len(state[name.replace("conv1d", "proj")]) for name in names]
        state |= zip(names, torch.cat([state[name] for name in names]).split(sizes), strict=True)
    return state


def ours(config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """Our model for a transformers config (`to_dict`) and `state_of` its model."""
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    fill(model, DictSource(state), TensorPlace(dtype))
    return model


def distance(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return float((a - b).abs().max() / b.abs().max())


def random_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def dummy(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Our model of a config with random weights, without transformers."""
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    fill(model, dummy_source(model, seed), TensorPlace(dtype))
    return model


def dummy_source(model: Any, seed: int = 0) -> DummySource:
    """Random tensors under the checkpoint's names for a model that is not filled yet."""
    shapes = {}
    for path, leaf in model.walk():
        for name, shape in leaf.expects().items():
            take, stored = spellings(model.names(), f"{path}.{name}")[0]
            assert take is None or not take.transposed, "write the checkpoint's own shape for a transposed tensor"
            if take is not None and take.rows is not None:
                runs = shape[0] // (take.rows[1] - take.rows[0]) if take.every else 0
                shape = (max(runs * take.every or take.rows[1], shapes.get(stored, (0,))[0]), *shape[1:])
            shapes[stored] = shape
    return DummySource(shapes, seed)
