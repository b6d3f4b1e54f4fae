"""GGUF files of RWKV-7, written with gguf-py as llama.cpp's converter writes them, compute what the folders that they
were made from compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import save_file  # noqa: E402

from kvasir.errors import ModelFileError, UnsupportedModel  # noqa: E402
from kvasir.weights.local import find_local  # noqa: E402
from tests.models.driver import logits_of  # noqa: E402
from tests.models.gguf_files import add_tensors, names_of, writing  # noqa: E402
from tests.models.hf import load  # noqa: E402
from tests.models.oracle import random_ids  # noqa: E402
from tests.models.rwkv7_plain import random_weights, rwkv7_name  # noqa: E402
from tests.models.test_rwkv7 import TINY  # noqa: E402

IDS = random_ids(40, 96)


def add_keys(writer: Any, c: dict[str, Any]) -> None:
    writer.add_context_length(1048576)
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_layer_norm_eps(c["norm_eps"])
    writer.add_wkv_head_size(c["head_dim"])
    writer.add_decay_lora_rank(c["decay_low_rank_dim"])
    writer.add_iclr_lora_rank(c["a_low_rank_dim"])
    writer.add_value_residual_mix_lora_rank(c["v_low_rank_dim"])
    writer.add_gate_lora_rank(c["gate_low_rank_dim"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(0)


def converted(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as the converter passes them to gguf-py's name table."""
    found: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        layer = ".".join(name.split(".")[:3])
        if ".attn.x_" in name:
            mixes = np.stack([weights[f"{layer}.attn.x_{part}"] for part in "rwkvag"])
            found[f"blk.{name.split('.')[2]}.time_mix_lerp_fused.weight"] = mixes
            continue
        name, array = rwkv7_name(name), array.squeeze()
        array = array.reshape(-1) if name.endswith("r_k") else array
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        if layer == "model.layers.0" and ".attention.a" in name:  # dummies, which the loader asks for
            found[name.replace(".attention.a", ".attention.v")] = array
        found[name] = array
    return found


def write(config: dict[str, Any], weights: dict[str, np.ndarray], path: Path, **changes: Any) -> Path:
    """changes: keys of the architecture to set besides."""
    with writing(path, "rwkv7") as writer:
        add_keys(writer, config)
        for key, value in changes.items():
            writer.add_uint32(f"rwkv7.{key}", value)
        add_tensors(writer, names_of("rwkv7", config["num_hidden_layers"]), converted(weights))
    return path


def folder_of(config: dict[str, Any], weights: dict[str, np.ndarray], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_file_computes_what_its_folder_computes_rwkv7(tmp_path):
    weights = random_weights(TINY)
    folder = load(folder_of(TINY, weights, tmp_path / "folder"))
    file = load(write(TINY, weights, tmp_path / "model.gguf"))
    assert file.config == folder.config
    assert torch.equal(logits_of(file, IDS), logits_of(folder, IDS))


def test_a_program_of_a_file_computes_what_that_of_its_folder_computes_rwkv7(tmp_path):
    from kvasir.runner.load import LoadOptions, load_model
    from tests.program.made import Driver, program_of

    weights = random_weights(TINY)
    found = []
    for path in (folder_of(TINY, weights, tmp_path / "folder"), write(TINY, weights, tmp_path / "model.gguf")):
        loaded = load_model(find_local(path), "float32", options=LoadOptions("program"))
        found.append(Driver(program_of(loaded), IDS).logits(0, len(IDS)))
    assert np.array_equal(*found)


def test_hostile_shapes_are_refused(tmp_path):
    weights = random_weights(TINY)
    name = "blk.1.time_mix_lerp_fused.weight"
    made = converted(weights)
    made[name] = made[name][:5]
    with writing(tmp_path / "model.gguf", "rwkv7") as writer:
        add_keys(writer, TINY)
        add_tensors(writer, names_of("rwkv7", 3), made)
    with pytest.raises(ModelFileError, match=r"lerp_fused.*expected a stack of 6"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "change", [{"token_shift_count": 1}, {"rescale_every_n_layers": 6}, {"attention.head_count_kv": 2}]
)
def test_what_has_no_code_is_refused(tmp_path, change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        load(write(TINY, random_weights(TINY), tmp_path / "model.gguf", **change))


@pytest.mark.parametrize("architecture", ["rwkv6", "arwkv7", "rwkv6qwen2"])
def test_other_versions_are_refused_by_name(tmp_path, architecture):
    with writing(tmp_path / "model.gguf", architecture) as writer:
        writer.add_block_count(1)
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    with pytest.raises(UnsupportedModel, match=rf"{architecture}(.|\n)*rwkv7"):
        load(tmp_path / "model.gguf")
