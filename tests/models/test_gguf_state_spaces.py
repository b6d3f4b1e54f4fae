"""GGUF files of models with Mamba layers, written with gguf-py as llama.cpp's converters write them, compute what their
folders compute: up to the logarithm of the decay rates, which the files store as rates, and Falcon-H1's multipliers, by
which its converter multiplies the weights."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.gguf_files import add_tensors, converted_by, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

_MIXED = {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]}
_DENSE = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}
_UNGROUPED = {"n_group": 1, "topk_group": 1, "time_step_limit": [0.0, inf]}
_UNLIMITED = {"time_step_limit": [0.0, inf], "position_embedding_type": "nope", "mamba_proj_bias": False}
_UNSCALED = {"time_step_limit": [0.0, inf], "mamba_norm_before_gate": False, "mamba_proj_bias": False}
_ALONE = {"hidden_act": "silu", "use_bias": False}  # what a file cannot express
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-hybrid": ("granitehybrid", {**config_of("granite-hybrid"), **_UNLIMITED}),
    "granite-hybrid-dense": ("granitehybrid", {
        **config_of("granite-hybrid"), **_UNLIMITED, "num_local_experts": 0, "num_experts_per_tok": 0,
    }),
    "bamba": ("granitehybrid", {
        **config_of("bamba"), "time_step_limit": [0.0, inf], "mamba_proj_bias": False,
    }),
    "nemotron-h": ("nemotron_h", {**config_of("nemotron-h"), **_UNGROUPED, **_DENSE}),
    "nemotron-h-moe": ("nemotron_h_moe", {**config_of("nemotron-h"), **_UNGROUPED, **_MIXED}),
    "nemotron-h-latent": ("nemotron_h_moe", {
        **config_of("nemotron-h"), **_UNGROUPED, **_MIXED, "moe_latent_size": 32,
    }),
    "falcon-h1": ("falcon-h1", {**config_of("falcon-h1"), **_UNSCALED}),
    "jamba": ("jamba", {**config_of("jamba"), "mamba_proj_bias": False}),
    "mamba": ("mamba", {**config_of("mamba"), **_ALONE}),
    "falcon-mamba": ("mamba", {**config_of("falcon-mamba"), **_ALONE, "mixer_rms_eps": 1e-3}),
    "mamba2": ("mamba2", {**config_of("mamba2"), "use_bias": False, "time_step_limit": [0.0, inf]}),
}  # fmt: skip

FAST = ("granite-hybrid", "nemotron-h-moe", "mamba")


def add_keys(writer: Any, c: Any) -> None:
    alone = c.model_type in ("mamba", "falcon_mamba", "mamba2")
    writer.add_context_length(2**20 if alone else c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_layer_norm_rms_eps(getattr(c, "rms_norm_eps", None) or c.layer_norm_epsilon)
    if alone:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    writer.add_head_count(c.num_attention_heads)
    kinds = getattr(c, "layers_block_type", None) or getattr(c, "layer_types", None) or []
    attends = [kind in ("attention", "full_attention", "hybrid") for kind in kinds]
    writer.add_head_count_kv([c.num_key_value_heads * a for a in attends])
    if c.model_type != "nemotron_h":
        writer.add_feed_forward_length(c.intermediate_size)


def add_scan(writer: Any, c: Any) -> None:
    def first(*names: str) -> Any:
        return next(getattr(c, name) for name in names if getattr(c, name, None) is not None)

    if c.model_type in ("mamba", "falcon_mamba", "jamba"):
        writer.add_ssm_inner_size(2 * c.hidden_size)
        writer.add_ssm_time_step_rank(first("mamba_dt_rank", "time_step_rank"))
        if c.model_type != "jamba":
            writer.add_ssm_dt_b_c_rms(c.model_type == "falcon_mamba")
    else:
        heads = first("mamba_n_heads", "mamba_num_heads", "num_heads")
        writer.add_ssm_inner_size(heads * first("mamba_d_head", "mamba_head_dim", "head_dim"))
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(first("mamba_n_groups", "n_groups"))
    writer.add_ssm_conv_kernel(first("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(first("mamba_d_state", "ssm_state_size", "state_size"))


def add_granitemoehybrid(writer: Any, c: Any) -> None:
    writer.add_attention_scale(c.attention_multiplier)
    writer.add_embedding_scale(c.embedding_multiplier)
    writer.add_residual_scale(c.residual_multiplier)
    writer.add_logit_scale(c.logits_scaling)
    writer.add_expert_count(c.num_local_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
    writer.add_rope_scaling_finetuned(False)


def add_nemotron_h(writer: Any, c: Any) -> None:
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    kinds, moe = c.layers_block_type, "moe" in c.layers_block_type
    inner = c.moe_intermediate_size if moe else c.intermediate_size
    writer.add_feed_forward_length([inner * (kind in ("mlp", "moe")) for kind in kinds])
    if not moe:
        return
    writer.add_expert_count(c.n_routed_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_group_count(c.n_group)
    if c.moe_latent_size:
        writer.add_moe_latent_size(c.moe_latent_size)


def add_falcon_h1(writer: Any, c: Any) -> None:
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)


def add_jamba(writer: Any, c: Any) -> None:
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)


def add_bamba(writer: Any, c: Any) -> None:
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads // 2)
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_scaling_finetuned(True)


KEYS = {
    "bamba": add_bamba,
    "granitemoehybrid": add_granitemoehybrid,
    "nemotron_h": add_nemotron_h,
    "falcon_h1": add_falcon_h1,
    "jamba": add_jamba,
}


def scaled(name: str, data: np.ndarray, c: Any) -> np.ndarray:
    """A tensor of Falcon-H1 times its multipliers."""
    by_name = {
        "down_proj": c.mlp_multipliers[1],
        "gate_proj": c.mlp_multipliers[0],
        "k_proj": c.key_multiplier * c.attention_in_multiplier,
        "q_proj": c.attention_in_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "mamba.out_proj": c.ssm_out_multiplier,
        "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }
    if "mamba.in_proj.weight" in name:
        shared = c.mamba_n_groups * c.mamba_d_state
        sizes = (c.mamba_d_ssm, c.mamba_d_ssm, shared, shared, c.mamba_n_heads)
        return data * c.ssm_in_multiplier * np.repeat(np.float32(c.ssm_multipliers), sizes)[:, None]
    found = [factor for part, factor in by_name.items() if f".{part}." in f".{name}"]
    return data * np.float32(found[0]) if found else data


def converted(name: str, data: np.ndarray, c: Any) -> dict[str, np.ndarray]:
    """A tensor of a checkpoint as its converter passes it to gguf-py's name table."""
    kind, second = c.model_type, c.model_type not in ("mamba", "falcon_mamba", "jamba")
    name = re.sub(r"^model\.(?=.*mixer)", "backbone.", name)
    if kind == "falcon_h1":
        data = scaled(name, data, c)
    if "conv1d.weight" in name:
        return {name: data.squeeze(1)}
    if name.endswith(".A_log"):
        return {name: -np.exp(data).reshape(*data.shape, *([1] if second else []))}
    if name.endswith(".D") and second:
        return {name: data.reshape(-1, 1)}
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        groups = getattr(c, "mamba_n_groups", None) or c.n_groups
        return {name: data.reshape(groups, -1)}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias" if kind != "nemotron_h" else ".dt.bias"): data}
    if kind in ("bamba", "granitemoehybrid", "nemotron_h") and re.search(r"\.[qk]_proj\.", name):
        heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
        return {name: data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): data}
    layer = re.search(r"layers\.(\d+)\.", name)
    if kind == "granitemoehybrid" and name.endswith("input_linear.weight") and layer:
        gates = np.split(data, 2, axis=-2)
        suffix = "_exps" if "block_sparse" in name else "_shexp" if c.num_local_experts else ""
        return {f"blk.{layer[1]}.ffn_{p}{suffix}.weight": g for p, g in zip(("gate", "up"), gates, strict=True)}
    if kind == "granitemoehybrid" and name.endswith("shared_mlp.output_linear.weight") and layer:
        return {f"blk.{layer[1]}.ffn_down{'_shexp' if c.num_local_experts else ''}.weight": data}
    if ".experts." in name and layer:  # stacked under the names of other models
        return {f"blk.{layer[1]}.ffn_{name.split('.')[-2].removesuffix('_proj')}_exps.weight": data}
    return {name: data}


def write_gguf(hf: Any, path: Path, architecture: str) -> Path:
    c = hf.config
    tensors = {name: np.asarray(array, np.float32) for name, array in converted_by(converted, hf).items()}
    with writing(path, architecture) as writer:
        add_keys(writer, c)
        add_scan(writer, c)
        KEYS.get(c.model_type, lambda writer, c: None)(writer, c)
        add_tensors(writer, names_of(architecture, c.num_hidden_layers), tensors)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_a_file_computes_what_its_folder_computes(tmp_path, name):
    architecture, config = CONFIGS[name]
    config = dict(config)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf", architecture))
    assert type(file) is type(folder)
    ids = random_ids(100, 96)
    assert distance(logits_of(file, ids), logits_of(folder, ids)) < TOLERANCE
