"""From a model's files to a model that computes: its config, the class of its architecture, its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvasir.models.config import read_hf_config
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import HFView
from kvasir.models.pooling import read_pooling
from kvasir.models.registry import model_class_for
from kvasir.weights.find import ModelFiles
from kvasir.weights.load import Progress, choose_dtype, fill
from kvasir.weights.source import GGUFSource, SafetensorsSource, WeightSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. config: as of Hugging Face, also for a GGUF file. bytes: of the weights'
    files."""

    model: Any
    config: Mapping[str, Any]
    architecture: str
    dtype: torch.dtype
    num_parameters: int
    bytes: int


def load_model(
    files: ModelFiles,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Reads config and weights. dtype: "auto", "float32", "bfloat16" or (on a GPU) "float16".

    Raises UnsupportedModel, ModelFileError, or ConfigError for the dtype.
    """
    config, source = open_checkpoint(files)
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    weights_dtype = choose_dtype(dtype, source, torch.device(device).type)
    parameters = fill(model, source, weights_dtype, device, progress)
    size = sum(path.stat().st_size for path in files.weights)
    return LoadedModel(model, config, kind.__name__, weights_dtype, parameters, size)


def open_checkpoint(files: ModelFiles) -> tuple[dict[str, Any], WeightSource]:
    """The config and the tensors under Hugging Face's names, whatever the container."""
    if files.kind == "gguf":
        source = GGUFSource(files.weights[0])
        metadata = source.model.metadata
        config = hf_config_from_gguf(metadata, source)
        return config, HFView(source, config, str(metadata["general.architecture"]))
    assert files.config is not None, "a folder of safetensors has a config.json"
    config = {**read_hf_config(files.config), **read_pooling(files.root)}
    return config, SafetensorsSource(files.root)
