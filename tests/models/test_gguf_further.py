"""GGUF files of further decoders, written with gguf-py as llama.cpp's converters write them, give the bits of the
folders that they were made from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.models.registry import MODELS
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.family_parts import PLAIN, YARN
from tests.models.gguf_files import Tensors, add_tensors, converted_by, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import random_ids
from tests.models.test_encoders import hidden_of

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

# --- keys and tensors of the families -----------------------------------------------------------------


def add_sizes(writer: Any, c: Any) -> None:
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    if hasattr(c, "intermediate_size"):
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


def add_llama(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)


def add_llama_embed(writer: Any, c: Any) -> None:
    add_llama(writer, c)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def add_ministral3(writer: Any, c: Any) -> None:
    add_llama(writer, c)
    rope = c.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def add_mellum(writer: Any, c: Any) -> None:
    full, sliding = (c.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_float32("mellum.rope.freq_base_swa", sliding["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(full["factor"])
    writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])


def add_solar_open(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_expert_count(c.n_routed_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.norm_topk_prob)


def add_cohere2_moe(writer: Any, c: Any) -> None:
    add_sizes(writer, c)
    writer.add_layer_norm_eps(c.layer_norm_eps)
    writer.add_logit_scale(c.logit_scale)
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    writer.add_vocab_size(c.vocab_size)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.intermediate_size)
    writer.add_leading_dense_block_count(c.mlp_layer_types.count("dense"))
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(c.num_shared_experts)
    writer.add_expert_shared_feed_forward_length(c.intermediate_size * c.num_shared_experts)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def add_hy_v3(writer: Any, c: Any) -> None:
    add_llama(writer, c)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.moe_intermediate_size * c.num_shared_experts)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c.router_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def of_hy_v3(name: str, data: np.ndarray, c: Any) -> Tensors:
    """Under the published names; the bias of the choice without a suffix."""
    if name.endswith("expert_bias"):
        return {f"blk.{name.split('.')[2]}.exp_probs_b": data}
    return {name: data}


def in_pairs(name: str, data: np.ndarray, c: Any) -> Tensors:
    """The rows of q and k in pairs."""
    if not re.search(r"\.[qk]_proj\.", name):
        return {name: data}
    heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
    return {name: data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)}


def with_bias_of_choice(name: str, data: np.ndarray, c: Any) -> Tensors:
    name = name.replace("correction_bias", "correction.bias")
    return {f"{name}.bias" if name.endswith("expert_bias") else name: data}


def same(name: str, data: np.ndarray, c: Any) -> Tensors:
    return {name: data}


# architecture, keys, tensors
FAMILIES: dict[str, tuple[str, Callable[[Any, Any], None], Callable[[str, np.ndarray, Any], Tensors]]] = {
    "afmoe": ("afmoe", add_afmoe, with_bias_of_choice),
    "cohere2-moe": ("cohere2moe", add_cohere2_moe, same),
    "dbrx": ("dbrx", add_dbrx, of_dbrx),
    "exaone-moe": ("exaone-moe", add_exaone_moe, with_bias_of_choice),
    "hy-v3": ("hy_v3", add_hy_v3, of_hy_v3),
    "internlm3": ("llama", add_llama, in_pairs),
    "iquestcoder": ("llama", add_llama, in_pairs),
    "jais2": ("jais2", add_jais2, same),
    "mellum": ("mellum", add_mellum, same),
    "ministral3": ("mistral3", add_ministral3, in_pairs),
    "solar-open": ("glm4moe", add_solar_open, with_bias_of_choice),
    "stablelm-12b": ("stablelm", add_stablelm, same),
}


EMBEDDERS = {"llama-embed": ("llama-embed", add_llama_embed, in_pairs)}
# Their files are those of other families.
SEEN_AS = ("internlm3", "iquestcoder", "solar-open")
# What llama.cpp fixes.
_ROPE = config_of("ministral3")["rope_parameters"]
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_hidden_layers": 5, "layer_types": None},
    "mellum": {
        "mlp_layer_types": None,
        "rope_parameters": {"full_attention": {**YARN, "rope_theta": 500.0}, "sliding_attention": PLAIN},
    },
    "ministral3": {"rope_parameters": {**_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5}},
}
# Architectures that gguf-py has no names for, and another one with the same names.
NAMED_AS: dict[str, str] = {"cohere2moe": "glm4moe", "hy_v3": "exaone-moe", "mellum": "qwen3moe"}


# --- files --------------------------------------------------------------------------------------------


def write_gguf(hf: Any, path: Path, family: str) -> Path:
    architecture, keys, converted = {**FAMILIES, **EMBEDDERS}[family]
    with writing(path, architecture) as writer:
        keys(writer, hf.config)
        name_of = names_of(NAMED_AS.get(architecture, architecture), hf.config.num_hidden_layers)
        add_tensors(writer, name_of, converted_by(converted, hf))
    return path


def save_published(hf: Any, folder: Path) -> Path:
    """Saved with the published name of the class; transformers' own is another for Llamas of other names."""
    save(hf, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = list(MODELS[config["model_type"]][2][:1])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_computes_what_its_folder_computes(tmp_path, family):
    config = config_of(family) | CHANGES.get(family, {})
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    folder = load(save_published(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf", family))
    assert type(file) is type(folder) or family in SEEN_AS
    ids = random_ids(200, 96)
    assert torch.equal(logits_of(file, ids), logits_of(folder, ids))


def test_a_file_of_llama_bidirec(tmp_path):
    """A Llama that attends in both directions, without a head."""
    config = transformers.AutoConfig.for_model(**config_of("llama"))
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    published = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}
    folder = load(save(hf, tmp_path / "folder"), **published)
    file = load(write_gguf(hf, tmp_path / "model.gguf", "llama-embed"))
    assert type(file) is type(folder) and file.bidirectional and file.config.pooling.kind == "mean"
    ids = random_ids(60, 96)
    assert torch.equal(hidden_of(file, [ids])[0], hidden_of(folder, [ids])[0])
