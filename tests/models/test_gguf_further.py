"""GGUF files of further decoders, written with gguf-py as llama.cpp's converters write them, give the bits of the
folders that they were made from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import random_ids, state_of

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

Tensors = dict[str, np.ndarray]


def stacked(state: Tensors) -> Tensors:
    """The tensors by name, those of a layer's experts, or of its heads' norms, as one."""
    found: Tensors = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in state.items():
        match = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\..*)", name)
        if match is None:
            found[name] = array
        else:
            parts.setdefault(match[1].removesuffix(".norms") + match[3], {})[int(match[2])] = array
    return found | {name: np.stack([own[i] for i in sorted(own)]) for name, own in parts.items()}


# --- keys and tensors of the families -----------------------------------------------------------------


def add_sizes(writer: Any, c: Any) -> None:
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * c.rope_parameters.get("partial_rotary_factor", 1.0)))
    if getattr(c, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def add_stablelm(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_eps(c.layer_norm_eps)
    writer.add_parallel_residual(c.use_parallel_residual)


def add_jais2(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_eps(c.layer_norm_eps)


def add_afmoe(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(c.num_shared_experts)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_leading_dense_block_count(c.num_dense_layers)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c.route_scale)
    writer.add_sliding_window(c.sliding_window)


def add_dbrx(writer: Any, c: Any) -> None:
    attn, ffn = c.attn_config, c.ffn_config
    writer.add_block_count(c.n_layers)
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(ffn.ffn_hidden_size)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(attn.kv_n_heads)
    writer.add_rope_freq_base(attn.rope_theta)
    writer.add_clamp_kqv(attn.clip_qkv)
    writer.add_expert_count(ffn.moe_num_experts)
    writer.add_expert_used_count(ffn.moe_top_k)
    writer.add_layer_norm_eps(1e-5)


def of_dbrx(name: str, data: np.ndarray, c: Any) -> Tensors:
    if "experts.mlp" not in name:
        return {name: data}
    stack = data.reshape(c.ffn_config.moe_num_experts, -1, data.shape[1])
    return {f"{name}.weight": stack.swapaxes(1, 2) if name.endswith("w2") else stack}


def add_exaone_moe(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(c.vocab_size)
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_count(c.num_shared_experts)
    writer.add_expert_shared_feed_forward_length(c.moe_intermediate_size * c.num_shared_experts)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_leading_dense_block_count(c.mlp_layer_types.count("dense"))
    writer.add_nextn_predict_layers(0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def with_bias_of_choice(name: str, data: np.ndarray, c: Any) -> Tensors:
    name = name.replace("correction_bias", "correction.bias")
    return {f"{name}.bias" if name.endswith("expert_bias") else name: data}


def same(name: str, data: np.ndarray, c: Any) -> Tensors:
    return {name: data}


# architecture, keys, tensors
FAMILIES: dict[str, tuple[str, Callable[[Any, Any], None], Callable[[str, np.ndarray, Any], Tensors]]] = {
    "afmoe": ("afmoe", add_afmoe, with_bias_of_choice),
    "dbrx": ("dbrx", add_dbrx, of_dbrx),
    "exaone-moe": ("exaone-moe", add_exaone_moe, with_bias_of_choice),
    "jais2": ("jais2", add_jais2, same),
    "stablelm-12b": ("stablelm", add_stablelm, same),
}


# What llama.cpp fixes.
CHANGES: dict[str, dict[str, Any]] = {"afmoe": {"num_hidden_layers": 5, "layer_types": None}}


# --- files --------------------------------------------------------------------------------------------


def write_gguf(hf: Any, path: Path, family: str) -> Path:
    architecture, keys, converted = FAMILIES[family]
    number = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, hf.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    keys(writer, hf.config)
    for name, data in stacked({name: tensor.numpy() for name, tensor in state_of(hf).items()}).items():
        if name == "lm_head.weight" and hf.config.tie_word_embeddings:
            continue
        for new, array in converted(name, data, hf.config).items():
            found = names.get_name(new, (".weight", ".bias"))
            assert found is not None, f"gguf-py has no name for {new}"
            writer.add_tensor(found, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_computes_what_its_folder_computes(tmp_path, family):
    config = config_of(family) | CHANGES.get(family, {})
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf", family))
    assert type(file) is type(folder)
    ids = random_ids(200, 96)
    assert torch.equal(logits_of(file, ids), logits_of(folder, ids))
