"""Adapters and models for tests: written in each form, and merged into the weights of the eager executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.numpy import save_file

from kvasir.layers.tensors import TensorPlace
from kvasir.lora import Adapter, bind, read_adapter
from kvasir.models.registry import model_class_for
from kvasir.runner.load import open_checkpoint
from kvasir.weights.find import find_model
from kvasir.weights.load import fill

PREFIX = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def empty(config: dict[str, Any]) -> Any:
    """A model without weights."""
    kind = model_class_for(config)
    return kind(kind.Config.from_hf(config))  # type: ignore[attr-defined]


def bound(adapter: Path, config: dict[str, Any]) -> Adapter:
    return bind(read_adapter(adapter), empty(config), config)


def write_peft(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """tensors: without the prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(
        {PREFIX + name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def write_mlx(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "adapters.safetensors")
    return folder


def write_gguf(path: Path, tensors: dict[str, np.ndarray], alpha: float, architecture: str, **more: Any) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in more.items():
        writer.add_array(key.replace("__", "."), value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged_model(base: Path, adapter: Adapter | None) -> Any:
    """The eager model with an adapter merged into its weights, float32."""
    config, source = open_checkpoint(find_model(base))
    model, place = empty(config), TensorPlace(torch.float32, "cpu")
    paths = {id(leaf): path for path, leaf in model.walk()}
    used: set[str] = set()

    def hold(leaf: Any, name: str, source: Any, stored: str, take: Any) -> bool:
        array = source.array(stored)
        array = np.array(take.of(array) if take else array, np.float32)
        if adapter:
            array = _changed(f"{paths[id(leaf)]}.{name}", array, adapter, used)
        leaf.put(name, array, place)
        return True

    fill(model, source, place, hold=hold)
    if adapter:
        full = {f"{slot}.weight" for slot in (*adapter.matrices, *adapter.tables, *adapter.tokens)} | {*adapter.saved}
        assert used == full, "a change that was not merged"
    return model


def _changed(name: str, array: np.ndarray, adapter: Adapter, used: set[str]) -> np.ndarray:
    slot = name.removesuffix(".weight")
    if name in adapter.saved:
        used.add(name)
        array = adapter.saved[name].astype(np.float32)
    if slot in adapter.tokens:
        used.add(name)
        rows = adapter.tokens[slot]
        array[list(rows.ids)] = rows.rows
    if slot in adapter.matrices:
        used.add(name)
        assert adapter.matrices[slot].bias is None
        array = adapter.matrices[slot].merged(array)
    if slot in adapter.tables:
        used.add(name)
        array = np.ascontiguousarray(adapter.tables[slot].merged(array.T).T)
    return array
