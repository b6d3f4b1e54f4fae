"""GGUF files of the families with other settings, written with gguf-py as llama.cpp's converters write them, give the
bits of the folders that they were made from."""

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
from tests.models.family_parts import DEEPSEEK_MOE, PLAIN, SIZES
from tests.models.gguf_files import add_tensors, converted_by, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "rope_theta": 100.0},
    **{"short_mscale": 1.25, "long_mscale": 1.25, "original_max_position_embeddings": 64},
}
RECURRENT = {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
# What a file cannot express is left out: each architecture has fixed settings in llama.cpp.
CONFIGS: dict[str, dict[str, Any]] = {
    "olmo2": config_of("olmo2"),
    "olmo3": config_of("olmo3"),
    "smollm3": {**SIZES, "model_type": "smollm3", "num_hidden_layers": 5},
    "seed_oss": config_of("seed-oss"),
    "arcee": config_of("arcee"),
    "granite": config_of("granite"),
    "granitemoe": {**config_of("granite-moe"), "model_type": "granitemoe", "shared_intermediate_size": 0},
    "granitemoeshared": config_of("granite-moe"),
    "exaone4": config_of("exaone4"),
    "glm4": config_of("glm4"),
    "ernie4_5": config_of("ernie4-5"),
    "cohere2": config_of("cohere2"),
    "starcoder2": {**config_of("starcoder2"), "sliding_window": None},
    "nemotron": config_of("nemotron"),
    "gpt_neox": config_of("gpt-neox"),
    "stablelm": config_of("stablelm"),
    "hunyuan_v1_dense": {**SIZES, "model_type": "hunyuan_v1_dense", "rope_parameters": PLAIN},
    "gpt_oss": config_of("gpt-oss"),
    "qwen2_moe": {**config_of("qwen2-moe"), "mlp_only_layers": [], "use_sliding_window": False},
    "olmoe": config_of("olmoe"),
    "glm4_moe": {**config_of("glm4-moe"), **NO_GROUPS},
    "dots1": {**SIZES, **DEEPSEEK_MOE, **NO_GROUPS, "model_type": "dots1", "sliding_window": None},
    "ernie4_5_moe": config_of("ernie4-5-moe"),
    "hunyuan_v1_moe": config_of("hunyuan-moe"),
    "minimax_m2": config_of("minimax-m2"),
    "lfm2": {**config_of("lfm2"), "conv_bias": False},
    "lfm2_moe": {**config_of("lfm2-moe"), "conv_bias": False, "routed_scaling_factor": 1.0},
    "apertus": config_of("apertus") | {"rope_scaling": None, "rope_parameters": PLAIN},
    "cohere": config_of("cohere"),
    "falcon": config_of("falcon") | {"ffn_hidden_size": 256},
    "falcon-grouped": config_of("falcon-grouped"),
    "gemma": config_of("gemma"),
    "glm": config_of("glm"),
    "llama4": {
        **config_of("llama4"),
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "rope_parameters": PLAIN},
    },
    "olmo": config_of("olmo"),
    "phi": config_of("phi") | {"qk_layernorm": False, "num_key_value_heads": 4},
    "phimoe": {**config_of("phimoe"), "router_jitter_noise": 0.01, "rope_parameters": LONGROPE},
    "qwen3_next": {**config_of("qwen3-next"), **RECURRENT, "mlp_only_layers": []},
    "qwen3_5": {**config_of("qwen3-5"), **RECURRENT},
    "qwen3_5_even": {**config_of("qwen3-5"), **RECURRENT, "linear_num_key_heads": 4, "linear_key_head_dim": 6},
    "qwen3_5_moe": {**config_of("qwen3-5-moe"), **RECURRENT},
}
ARCHITECTURES = {
    **{"olmo3": "olmo2", "gpt_neox": "gptneox", "hunyuan_v1_dense": "hunyuan-dense", "gpt_oss": "gpt-oss"},
    **{"qwen2_moe": "qwen2moe", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "minimax_m2": "minimax-m2"},
    **{"hunyuan_v1_moe": "hunyuan-moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35"},
    **{"qwen3_5_moe_text": "qwen35moe", "lfm2_moe": "lfm2moe", "cohere": "command-r", "glm": "chatglm"},
    **{"granitemoeshared": "granitemoe", "phi": "phi2", "llama4_text": "llama4"},
}
# Their converters order the rows of q and k in pairs.
PAIRED = ("smollm3", "arcee", "granite", "granitemoe", "granitemoeshared", "olmo")


# --- keys -------------------------------------------------------------------------------------------


def add_decoder_keys(writer: Any, c: Any) -> None:
    eps = {"cohere2": "layer_norm_eps", "starcoder2": "norm_epsilon", "nemotron": "norm_eps"}
    eps |= dict.fromkeys(("gpt_neox", "stablelm", "cohere", "phi"), "layer_norm_eps") | {"falcon": "layer_norm_epsilon"}
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    kv_heads = getattr(c, "num_key_value_heads", c.num_attention_heads)
    if c.model_type in ("lfm2", "lfm2_moe"):  # 0 in a convolution
        kv_heads = [0 if kind == "conv" else kv_heads for kind in c.layer_types]
    writer.add_head_count_kv(c.num_kv_heads if c.model_type == "falcon" else kv_heads)
    if c.model_type == "falcon":
        writer.add_feed_forward_length(c.ffn_hidden_size)
    elif c.model_type == "llama4_text":
        writer.add_feed_forward_length(c.intermediate_size_mlp)
    elif hasattr(c, "intermediate_size") and c.model_type != "lfm2":
        writer.add_feed_forward_length(c.intermediate_size)
    if c.model_type != "gpt_neox":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if c.model_type in eps:
        writer.add_layer_norm_eps(getattr(c, eps[c.model_type]))
    elif c.model_type == "olmo":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(getattr(c, "norm_eps", None) or c.rms_norm_eps)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_window(writer: Any, c: Any) -> None:
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])


def add_granite(writer: Any, c: Any) -> None:
    writer.add_attention_scale(c.attention_multiplier)
    writer.add_embedding_scale(c.embedding_multiplier)
    writer.add_residual_scale(c.residual_multiplier)
    writer.add_logit_scale(c.logits_scaling)
    if c.model_type != "granite":
        add_experts(writer, c)
        if shared := c.shared_intermediate_size if c.model_type == "granitemoeshared" else 0:
            writer.add_expert_shared_feed_forward_length(shared)


def add_experts(writer: Any, c: Any) -> None:
    writer.add_expert_count(c.num_local_experts if hasattr(c, "num_local_experts") else c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    if hasattr(c, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)


def add_cohere2(writer: Any, c: Any) -> None:
    add_window(writer, c)
    writer.add_logit_scale(c.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def add_parallel(writer: Any, c: Any) -> None:
    writer.add_parallel_residual(c.use_parallel_residual)


def add_cohere(writer: Any, c: Any) -> None:
    writer.add_logit_scale(c.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def add_llama4(writer: Any, c: Any) -> None:
    writer.add_expert_count(c.num_local_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_interleave_moe_layer_step(c.interleave_moe_layer_step)
    writer.add_expert_feed_forward_length(c.intermediate_size)


def add_olmo(writer: Any, c: Any) -> None:
    writer.add_clamp_kqv(c.clip_qkv)


def add_phimoe(writer: Any, c: Any) -> None:
    add_experts(writer, c)
    rope = c.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(rope["short_mscale"])
    for kind in ("short", "long"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def add_hunyuan(writer: Any, c: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(256 * 1024)


def add_hunyuan_moe(writer: Any, c: Any) -> None:
    add_hunyuan(writer, c)
    writer.add_expert_shared_feed_forward_length(c.intermediate_size)
    writer.add_expert_feed_forward_length(c.intermediate_size)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.moe_topk)
    writer.add_expert_shared_count(1)


def add_gpt_oss(writer: Any, c: Any) -> None:
    writer.add_sliding_window(c.sliding_window)
    add_experts(writer, c)
    writer.add_expert_feed_forward_length(c.intermediate_size)


def add_qwen2_moe(writer: Any, c: Any) -> None:
    add_experts(writer, c)
    writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)


def add_sigmoid_experts(writer: Any, c: Any) -> None:
    add_experts(writer, c)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    if c.model_type == "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_ernie_moe(writer: Any, c: Any) -> None:
    writer.add_expert_count(c.moe_num_experts)
    writer.add_expert_used_count(c.moe_k)
    writer.add_interleave_moe_layer_step(c.moe_layer_interval)
    writer.add_leading_dense_block_count(c.moe_layer_start_index)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_count(c.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(c.intermediate_size // c.num_key_value_heads)


def add_minimax(writer: Any, c: Any) -> None:
    add_experts(writer, c)
    writer.add_expert_feed_forward_length(c.intermediate_size)


def add_lfm2(writer: Any, c: Any) -> None:
    writer.add_shortconv_l_cache(c.conv_L_cache)
    if c.model_type == "lfm2":
        inner, multiple = int(2 * c.intermediate_size / 3), c.block_multiple_of
        writer.add_feed_forward_length(-(-inner // multiple) * multiple)
        return
    add_experts(writer, c)
    writer.add_leading_dense_block_count(c.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_delta(writer: Any, c: Any) -> None:
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_value_head_dim * c.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    if c.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if c.model_type != "qwen3_5_text":
        add_qwen2_moe(writer, c)


KEYS: dict[str, Callable[[Any, Any], None]] = {
    "olmo3": add_window,
    "granite": add_granite,
    "granitemoe": add_granite,
    "granitemoeshared": add_granite,
    "cohere": add_cohere,
    "llama4_text": add_llama4,
    "olmo": add_olmo,
    "phimoe": add_phimoe,
    "exaone4": add_window,
    "cohere2": add_cohere2,
    "gpt_neox": add_parallel,
    "stablelm": add_parallel,
    "hunyuan_v1_dense": add_hunyuan,
    "hunyuan_v1_moe": add_hunyuan_moe,
    "gpt_oss": add_gpt_oss,
    "qwen2_moe": add_qwen2_moe,
    "olmoe": add_experts,
    "glm4_moe": add_sigmoid_experts,
    "dots1": add_sigmoid_experts,
    "ernie4_5_moe": add_ernie_moe,
    "minimax_m2": add_minimax,
    "lfm2": add_lfm2,
    "lfm2_moe": add_lfm2,
    "qwen3_next": add_delta,
    "qwen3_5_text": add_delta,
    "qwen3_5_moe_text": add_delta,
}


# --- tensors ----------------------------------------------------------------------------------------


def converted(name: str, data: np.ndarray, c: Any) -> dict[str, np.ndarray]:
    """A tensor of a checkpoint as its converter passes it to gguf-py's name table."""
    kind = c.model_type
    if kind in PAIRED and "_proj" in name and re.search(r"\.[qk]_proj\.", name):
        heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
        return {name: data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)}
    if kind in ("nemotron", "gemma") and name.endswith("norm.weight"):
        return {name: data + 1.0}
    if kind == "gpt_neox" and "query_key_value" in name:
        heads = c.num_attention_heads
        return {name: data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)}
    if kind == "falcon" and "query_key_value" in name:
        groups = c.num_kv_heads if c.new_decoder_architecture else 1
        parts = data.reshape(groups, c.num_attention_heads // groups + 2, -1, *data.shape[1:])
        return {name: np.concatenate([p.reshape(-1, *data.shape[1:]) for p in np.split(parts, [-2, -1], axis=1)])}
    if kind == "llama4_text" and ".experts." in name:
        rows, part = data.swapaxes(1, 2), name.split(".")[2]
        if name.endswith("down_proj"):
            return {f"blk.{part}.ffn_down_exps.weight": rows}
        return {f"blk.{part}.ffn_{p}_exps.weight": r for p, r in zip(("gate", "up"), np.split(rows, 2, 1), strict=True)}
    if name.endswith("e_score_correction_bias"):
        return {f"{name.removesuffix('_bias')}.bias": data.reshape(-1)}
    if name.endswith("expert_bias"):
        return {f"{name}.bias": data}
    if "feed_forward.experts." in name:
        return {name.removeprefix("model."): data}
    if "conv.conv" in name:
        return {name: data.squeeze(1)}
    if name.endswith("shared_expert_gate.weight"):
        return {name: data.reshape(-1)}
    if name.endswith("sinks"):
        return {f"{name}.weight": data}
    if kind == "gpt_oss" and ".experts." in name:
        part, bias = name.removesuffix("_bias"), name.endswith("_bias")
        rows, suffix = data if bias else data.swapaxes(1, 2), ".bias" if bias else ".weight"
        if part.endswith("down_proj"):
            return {part + suffix: rows}
        return {part.replace("gate_up", p) + suffix: rows[:, i::2] for i, p in enumerate(("gate", "up"))}
    if kind.startswith("granitemoe") and name.endswith("input_linear.weight"):
        axis, layer, stack = data.ndim - 2, name.split(".")[2], "shexp" if "shared" in name else "exps"
        gate_up = np.split(data, 2, axis=axis)
        return {f"blk.{layer}.ffn_{p}_{stack}.weight": rows for p, rows in zip(("gate", "up"), gate_up, strict=True)}
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return of_delta(name, data, c)
    return {name: data}


def of_delta(name: str, data: np.ndarray, c: Any) -> dict[str, np.ndarray]:
    """A tensor of Qwen3-Next, or of Qwen3.5, whose heads of v the converter orders by their place within a group."""
    heads, groups = c.linear_num_value_heads, c.linear_num_key_heads
    keys, e = groups * c.linear_key_head_dim, c.linear_value_head_dim
    tiled = c.model_type != "qwen3_next"

    def reordered(rows: np.ndarray, axis: int = 0) -> np.ndarray:
        if not tiled:
            return rows
        first = np.moveaxis(rows, axis, 0)
        groups_first = first.reshape(groups, heads // groups, -1, *first.shape[1:])
        return np.moveaxis(groups_first.swapaxes(0, 1).reshape(first.shape), 0, axis)

    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: data + 1.0}
    if "in_proj_qkvz" in name:
        d, share = c.linear_key_head_dim, heads // groups * e
        parts = np.split(data.reshape(groups, -1, data.shape[1]), np.cumsum([d, d, share]), axis=1)
        q, k, v, z = (part.reshape(-1, data.shape[1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
    if name.endswith(".A_log"):
        return {name: reordered(-np.exp(data))}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): reordered(data)}
    if "conv1d" in name or "in_proj_qkv." in name:
        rows = data.squeeze(1) if "conv1d" in name else data
        return {name: np.concatenate([rows[: 2 * keys], reordered(rows[2 * keys :])])}
    if "linear_attn.out_proj" in name:
        return {name: reordered(data, 1)}
    if any(part in name for part in ("in_proj_z.", "in_proj_a.", "in_proj_b.")):
        return {name: reordered(data)}
    return {name: data}


def write_gguf(hf: Any, path: Path) -> Path:
    c = hf.config
    architecture = ARCHITECTURES.get(c.model_type, c.model_type)
    tensors = converted_by(converted, hf)
    with writing(path, architecture) as writer:
        add_decoder_keys(writer, c)
        KEYS.get(c.model_type, lambda writer, c: None)(writer, c)
        activations: dict[str, list[float]] = {}
        for name in [name for name in tensors if ".act_fn." in name]:
            activations.setdefault(name.rpartition(".")[2], []).append(tensors.pop(name).item())
        for parameter, values in activations.items():
            getattr(writer, f"add_xielu_{parameter}")(values)
        add_tensors(writer, names_of(architecture, c.num_hidden_layers), tensors)
    return path


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_computes_what_its_folder_computes(tmp_path, name):
    config = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf"))
    assert type(file) is type(folder)
    ids = random_ids(200, 96)
    found, expected = logits_of(file, ids), logits_of(folder, ids)
    if name.startswith("qwen3_"):  # the logarithm of the decay rates, and another order of heads
        assert distance(found, expected) < TOLERANCE
    else:
        assert torch.equal(found, expected)
