"""Published configs of models with latent attention, and of MiMo-V2: each gives our config, and the memory of its cache
is known. Checkpoints in FP8 blocks and layers for multi-token prediction are accepted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.cli.config_facts import read_config_facts
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.registry import model_class_for
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.engine.cores import CONFIGS
from tests.models.oracle import random_ids
from tests.program.made import Driver, program_of, random_model

_COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "pretraining_tp": 1,
}  # fmt: skip
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_DEEPSEEK = {
    **_COMMON, "aux_loss_alpha": 0.001, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000, "seq_aux": True, "v_head_dim": 128,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "bos_token_id": 100000,
        "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "topk_group": 1, "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "DeepSeek-V2": {
        **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "bos_token_id": 100000,
        "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6,
        "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 16.0,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "scoring_func": "softmax",
        "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "scoring_func": "sigmoid", "topk_group": 4,
        "topk_method": "noaux_tc", "vocab_size": 129280,
    },
    "GLM-5": {
        **_COMMON, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "ep_size": 1,
        "first_k_dense_replace": 3, "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
        "index_topk": 2048, "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 256, "vocab_size": 154880,
    },
    "Kimi-K2-Instruct": {
        **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "bos_token_id": 163584,
        "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 7168,
        "intermediate_size": 18432, "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_group": 1,
        "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 163840,
    },
    "GLM-4.7-Flash": {
        **_COMMON, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829], "hidden_size": 2048, "intermediate_size": 10240,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "MiniCPM3-4B": {
        **_COMMON, "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "bos_token_id": 1,
        "eos_token_id": [2, 73440], "initializer_range": 0.1, "hidden_size": 2560, "num_hidden_layers": 62,
        "intermediate_size": 6400, "max_position_embeddings": 32768, "num_attention_heads": 40,
        "num_key_value_heads": 40, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 768,
        "kv_lora_rank": 256, "rms_norm_eps": 1e-05, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4,
        "rope_scaling": {
            "type": "longrope", "long_factor": [1.05] * 16, "short_factor": [1.02] * 16,
            "original_max_position_embeddings": 32768,
        },
        "vocab_size": 73448,
    },
    "MiMo-V2-Flash": {
        **_COMMON, "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096,
        "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 192, "v_head_dim": 128, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
        "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "sliding_window": 128,
        "sliding_window_size": 128, "attention_chunk_size": 128, "attention_value_scale": 0.707,
        "hybrid_block_size": None, "hybrid_layer_pattern": [int(i and (i + 1) % 6 != 0) for i in range(48)],
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": None, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1,
        "moe_layer_freq": [0] + [1] * 47, "norm_topk_prob": True, "routed_scaling_factor": None,
        "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 152576,
    },
}  # fmt: skip
PUBLISHED["DeepSeek-V3.2"] = {
    **PUBLISHED["DeepSeek-V3"],
    **{"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
    **{"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
}
# context, numbers in the cache per token and layer, score scale times the square root of a query's dimensions
FACTS = {
    "DeepSeek-V2-Lite": (163840, 576, 1.5896),
    "DeepSeek-V2": (163840, 576, 1.5896),
    "DeepSeek-V3": (163840, 576, 1.8739),
    "DeepSeek-V3.2": (163840, 576, 1.8739),
    "GLM-5": (202752, 576, 1.0),
    "Kimi-K2-Instruct": (131072, 576, 1.8133),
    "GLM-4.7-Flash": (202752, 576, 1.0),
    "MiniCPM3-4B": (32768, 288, 1.0),
}


def our_config(config: dict[str, Any]) -> Any:
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.parametrize("name", FACTS)
def test_a_published_config_is_read(name):
    config, (context, numbers, scale) = our_config(PUBLISHED[name]), FACTS[name]
    assert config.context_length == context
    assert config.kv_rank + config.head_dim == numbers
    assert config.attn_scale * np.sqrt(config.plain_dim + config.head_dim) == pytest.approx(scale, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "selects"),
    [
        ({}, "F" * 78),
        ({"index_topk_pattern": "FFSS" * 19 + "FS"}, "FFSS" * 19 + "FS"),
        ({"indexer_types": ["full", "shared"] * 39}, "FS" * 39),
        ({"index_topk_freq": 4}, "FF" + "SSSF" * 19),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFF" + "SSSF" * 18 + "SSS"),
    ],
)
def test_the_layers_with_indexers_are_read(change, selects):
    config = our_config({**PUBLISHED["GLM-5"], **change})
    assert "".join("SF"[one] for one in config.selects) == selects
    assert (config.indexer.heads, config.indexer.dim, config.indexer.top_k) == (32, 128, 2048)


def test_mimo_v2_flash_is_read():
    config = our_config(PUBLISHED["MiMo-V2-Flash"])
    assert (config.head_dim, config.value_dim, config.rotary_dim, config.value_scale) == (192, 128, 64, 0.707)
    assert config.windows[:7] == (0, 129, 129, 129, 129, 0, 129)
    assert (config.kv_heads, config.window_kv_heads, config.rope_theta, config.window_theta) == (4, 8, 5e6, 1e4)
    assert config.sparse == (False, *[True] * 47) and config.norm_eps == 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "MiniCPM3-4B"])
def test_the_memory_of_each_published_config_is_known(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    facts = read_config_facts(tmp_path / "config.json")
    assert not facts.reason, "the program executor runs it"


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("DeepSeek-V2", {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob"),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, UnsupportedModel, "topk_method"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 63}, ModelFileError, "head_dim"),
        ("DeepSeek-V3", {"kv_lora_rank": 0}, ModelFileError, "kv_lora_rank"),
        ("DeepSeek-V3", {"topk_group": 9}, ModelFileError, "groups"),
        ("DeepSeek-V3", {"index_topk": 2048, "index_head_dim": 128}, UnsupportedModel, "index_head_dim"),
        ("DeepSeek-V3.2", {"index_topk": 0}, ModelFileError, "index_topk"),
        ("DeepSeek-V3.2", {"index_topk": 1 << 20}, ModelFileError, "index_topk"),
        ("DeepSeek-V3.2", {"index_n_heads": -1}, ModelFileError, "index_n_heads"),
        ("DeepSeek-V3.2", {"index_head_dim": 32}, ModelFileError, "index_head_dim"),
        ("DeepSeek-V3.2", {"q_lora_rank": None}, UnsupportedModel, "q_lora_rank"),
        ("DeepSeek-V3.2", {"layer_types": ["full_attention"]}, UnsupportedModel, "layer_types"),
        ("GLM-5", {"indexer_types": ["full"]}, ModelFileError, "indexer_types"),
        ("GLM-5", {"indexer_types": ["shared"] * 78}, ModelFileError, "first layer"),
        ("GLM-5", {"index_topk_pattern": "FSX" * 26}, ModelFileError, "indexer_types"),
        ("GLM-5", {"index_topk_pattern": 3}, ModelFileError, "indexer_types"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, ModelFileError, "mlp_layer_types"),
        ("MiMo-V2-Flash", {"swa_head_dim": 128}, UnsupportedModel, "swa_head_dim"),
        ("MiMo-V2-Flash", {"hybrid_layer_pattern": [2] * 48}, ModelFileError, "hybrid_layer_pattern"),
        ("MiMo-V2-Flash", {"swa_num_key_value_heads": 7}, ModelFileError, "share 7"),
    ],
)
def test_a_bad_config_is_refused_by_name(name, change, error, match):
    with pytest.raises(error, match=match):
        our_config({**PUBLISHED[name], **change})


def test_fp8_blocks_and_drafting_layers_are_accepted(tmp_path):
    """A checkpoint as DeepSeek-V3's: matrices in FP8 with a scale for each 128 x 128 weights, and a layer for
    multi-token prediction at the end. It computes with the bits of the same numbers in bfloat16."""
    config = {**CONFIGS["deepseek-v3"], "num_nextn_predict_layers": 1}
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    for folder in (plain, coded):
        folder.mkdir()
    tensors = load_file(random_model("deepseek-v3", plain) + "/model.safetensors")
    layer = config["num_hidden_layers"]
    tensors |= {f"model.layers.{layer}.eh_proj.weight": torch.randn(64, 128)}
    tensors |= {f"model.layers.{layer}.self_attn.o_proj.weight": torch.randn(64, 64)}
    codes, numbers = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            codes[name] = numbers[name] = tensor.bfloat16()
            continue
        scales = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) * 0.01 + 0.005
        each = scales.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        codes[name] = (tensor / each).to(torch.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = scales
        numbers[name] = (codes[name].float() * each).bfloat16()
    save_file(numbers, plain / "model.safetensors")
    save_file(codes, coded / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    method = PUBLISHED["DeepSeek-V3"]["quantization_config"]
    (coded / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    ids = random_ids(40, 300)
    models = [load_model(find_model(str(f)), "bfloat16", options=LoadOptions("program")) for f in (plain, coded)]
    found = [Driver(program_of(model), ids).logits(0, 40) for model in models]
    assert np.array_equal(found[0], found[1]) and np.isfinite(found[0]).all()
