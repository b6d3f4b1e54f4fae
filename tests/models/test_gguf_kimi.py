"""GGUF files of Kimi Linear, written with gguf-py as llama.cpp's converter writes them, compute what the folders that
they were made from compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.gguf_files import add_tensors, converted_by, gguf, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

# A file has one number of heads, and dense layers only at the beginning.
OF_A_FILE = {"linear_num_heads": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]}


def add_keys(writer: Any, c: Any) -> None:
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in c.layer_types])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(72)
    writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_kda_head_dim(c.linear_head_dim)
    writer.add_expert_count(c.num_local_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(c.routed_scaling_factor)


def write(hf: Any, path: Path, trimmed: bool) -> Path:
    """trimmed: without leading dimensions of size 1, as quantized files have them."""
    tensors = converted_by(converted, hf)
    if trimmed:
        tensors = {name: array[0] if array.ndim == 4 else array for name, array in tensors.items()}
    with writing(path, "kimi-linear") as writer:
        add_keys(writer, hf.config)
        add_tensors(writer, names_of("kimi-linear", hf.config.num_hidden_layers), tensors)
    return path


def converted(name: str, data: np.ndarray, c: Any) -> dict[str, np.ndarray]:
    """A tensor of a checkpoint as the converter passes it to gguf-py's name table."""
    if "block_sparse_moe" in name and "shared" not in name and "gate.w" not in name and "experts" not in name:
        name = name.replace("block_sparse_moe.gate_proj", "mlp.gate_proj").replace("block_sparse_moe.up", "mlp.up")
        name = name.replace("block_sparse_moe.down_proj", "mlp.down_proj")
    if ".experts." in name:
        layer, part = name.split(".")[2], {"w1": "gate", "w3": "up", "w2": "down"}[name.split(".")[-2]]
        return {f"model.layers.{layer}.mlp.experts.{part}_proj.weight": data}
    if name.endswith("e_score_correction_bias"):
        return {f"{name.removesuffix('_bias')}.bias": data}
    if name.endswith("conv1d.weight"):
        return {name: data.reshape(1, len(data), 1, -1)}
    if name.endswith("A_log"):
        return {name: -np.exp(data)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): data}
    if not name.endswith("kv_b_proj.weight"):
        return {name: data}
    keys, values = np.split(data.reshape(c.num_attention_heads, -1, data.shape[1]), [c.qk_nope_head_dim], axis=1)
    return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trimmed", [False, True], ids=("converted", "quantized"))
def test_a_file_computes_what_its_folder_computes(tmp_path, transformers, trimmed):
    config = {**config_of("kimi-linear"), **OF_A_FILE}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    folder, file = load(save(hf, tmp_path / "folder")), load(write(hf, tmp_path / "model.gguf", trimmed))
    assert type(file) is type(folder)
    ids = random_ids(60, 96)  # the file has the logarithm of the decay rates
    assert distance(logits_of(file, ids), logits_of(folder, ids)) < TOLERANCE
