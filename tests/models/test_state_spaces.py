"""Families with Mamba layers: published configs are read, sizes that do not fit are refused, each layer has its cache,
and an executor without kernels refuses them by name."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest

from kvasir.caches import State
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.graph.fold import fold
from kvasir.layers.batch import Batch
from kvasir.layers.ssm import Mamba1, Mamba2, head_share
from kvasir.models.config import read_hf_config
from kvasir.models.registry import model_class_for
from kvasir.ops.graph import CannotTrace
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.oracle import dummy
from tests.program.made import loaded

_INFINITE = {"__float__": "Infinity"}
_MAMBA = {
    "bos_token_id": 0, "conv_kernel": 4, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "num_hidden_layers": 64, "rescale_prenorm_residual": False,
    "residual_in_fp32": True, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "time_step_scale": 1.0, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True,
}  # fmt: skip
_GRANITE = {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "embedding_multiplier": 12, "eos_token_id": 100257, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "num_attention_heads": 12, "num_key_value_heads": 4, "position_embedding_type": "nope",
    "rms_norm_eps": 1e-05, "rope_theta": 10000, "rope_scaling": None, "normalization_function": "rmsnorm",
    "tie_word_embeddings": True, "vocab_size": 100352,
}  # fmt: skip
_NEMOTRON = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "chunk_size": 128,
    "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-05, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8, "num_logits_to_keep": 1, "residual_in_fp32": False,
    "rescale_prenorm_residual": True, "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
    "vocab_size": 131072,
}  # fmt: skip
# name -> the values of its config, and the layers, width and vocabulary that we read
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "granite-4.0-h-tiny": ({
        **_GRANITE, "attention_multiplier": 0.0078125, "hidden_size": 1536, "intermediate_size": 512,
        "logits_scaling": 6, "mamba_d_head": 64, "max_position_embeddings": 131072, "num_experts_per_tok": 6,
        "num_hidden_layers": 40, "num_local_experts": 64, "residual_multiplier": 0.22, "shared_intermediate_size": 1024,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    }, (40, 1536, 100352)),
    "granite-4.0-h-350m": ({
        **_GRANITE, "attention_multiplier": 0.015625, "hidden_size": 768, "intermediate_size": 2048,
        "logits_scaling": 3, "mamba_d_head": 32, "max_position_embeddings": 32768, "num_experts_per_tok": 0,
        "num_hidden_layers": 32, "num_local_experts": 0, "residual_multiplier": 0.246,
        "shared_intermediate_size": 2048,
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    }, (32, 768, 100352)),
    "NVIDIA-Nemotron-Nano-9B-v2": ({
        **_NEMOTRON, "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40,
        "num_key_value_heads": 8, "attention_head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80,
        "num_hidden_layers": 56, "max_position_embeddings": 131072,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "time_step_limit": [0.0, _INFINITE],
    }, (56, 4480, 131072)),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": ({
        **_NEMOTRON, "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64,
        "num_hidden_layers": 52, "max_position_embeddings": 262144, "moe_intermediate_size": 1856,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_routed_experts": 128,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 6, "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "topk_group": 1, "time_step_limit": [0.0, math.inf], "mamba_ssm_cache_dtype": "float32", "norm_eps": 1e-05,
    }, (52, 2688, 131072)),
    "Falcon-H1-1.5B": ({
        "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "num_hidden_layers": 24,
        "hidden_size": 2048, "intermediate_size": 4608, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 65537, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_rms_norm": False,
        "mamba_norm_before_gate": False, "mamba_use_mlp": True, "max_position_embeddings": 131072,
        "rope_theta": 1e11, "mlp_expansion_factor": 8, "tie_word_embeddings": False,
    }, (24, 2048, 65537)),
    "falcon-mamba-7b": ({
        **_MAMBA, "model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"], "expand": 16,
        "state_size": 16, "vocab_size": 65024, "eos_token_id": 11, "pad_token_id": 11,
    }, (64, 4096, 65024)),
    "Mamba-Codestral-7B": ({
        **_MAMBA, "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "expand": 2, "chunk_size": 256,
        "head_dim": 64, "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "rms_norm": True,
        "state_size": 128, "time_step_limit": [0.0, "Infinity"], "vocab_size": 32768,
    }, (64, 4096, 32768)),
    "AI21-Jamba-1.5-Mini": ({
        "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4,
        "attn_layer_period": 8, "bos_token_id": 1, "eos_token_id": [2, 518], "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False, "max_position_embeddings": 262144,
        "model_type": "jamba", "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "output_router_logits": False,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_mamba_kernels": False,
        "vocab_size": 65536,
    }, (32, 4096, 65536)),
}  # fmt: skip


def read(config: dict[str, Any]) -> Any:
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name, tmp_path):
    config, sizes = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    c = read(read_hf_config(tmp_path))
    assert (c.num_layers, c.width, c.vocab_size) == sizes


def test_what_the_published_configs_mean():
    tiny, nano = (read(PUBLISHED[name][0]) for name in ("granite-4.0-h-tiny", "NVIDIA-Nemotron-3-Nano-30B-A3B"))
    assert (tiny.mamba.sizes.inner, tiny.mamba.sizes.channels, tiny.num_experts) == (3072, 3328, 64)
    assert [i for i, recurrent in enumerate(tiny.recurrent) if not recurrent] == [5, 15, 25, 35]
    kinds = [nano.kinds.count(kind) for kind in ("mamba", "moe", "attention", "mlp")]
    assert kinds == [23, 23, 6, 0] and (nano.routing.top_k, nano.shared_inner) == (6, 3712)
    assert nano.mamba.sizes.high == math.inf and read(PUBLISHED["NVIDIA-Nemotron-Nano-9B-v2"][0]).head_dim == 128
    falcon = read(PUBLISHED["falcon-mamba-7b"][0])
    assert (falcon.mamba.inner, falcon.mamba.rank, falcon.mamba.eps) == (8192, 256, 1e-6)  # expand is wrong there


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("granite-hybrid", {"mamba_n_heads": 7}, "mamba_n_heads"),
        ("granite-hybrid", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("granite-hybrid", {"mamba_d_state": 257}, "mamba_d_state"),
        ("granite-hybrid", {"mamba_d_conv": 9}, "mamba_d_conv"),
        ("granite-hybrid", {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        ("granite-hybrid", {"time_step_limit": [math.nan, 1]}, "time_step_limit"),
        ("granite-hybrid", {"time_step_limit": {"__float__": 3}}, "time_step_limit"),
        ("granite-hybrid", {"layer_types": ["mamba"]}, "layer_types"),
        ("nemotron-h", {"layers_block_type": []}, "layers_block_type"),
        ("nemotron-h", {"mamba_head_dim": 512}, "mamba_head_dim"),
        ("nemotron-h", {"num_experts_per_tok": 7}, "experts"),
        ("bamba", {"attn_layer_indices": [1.5]}, "attn_layer_indices"),
        ("bamba", {"attn_rotary_emb": 4}, "attn_rotary_emb"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers"),
        ("falcon-h1", {"ssm_multipliers": [1.0] * 4 + ["1"]}, "ssm_multipliers"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset"),
        ("mamba", {"state_size": 0}, "state_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, change, message):
    with pytest.raises(ModelFileError, match=message):
        read({**config_of(name), **change})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("granite-hybrid", {"layer_types": ["mamba", "sliding_attention", "mamba"]}),
        ("granite-hybrid", {"position_embedding_type": "alibi"}),
        ("granite-hybrid", {"mamba_dt_scale": 2.0}),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M?"}),
        ("nemotron-h", {"sliding_window": 128}),
        ("mamba2", {"rms_norm": False}),
        ("jamba", {"mamba_inner_layernorms": False}),
    ],
)
def test_features_without_code_are_refused(name, change):
    with pytest.raises(UnsupportedModel):
        read({**config_of(name), **change})


def test_each_layer_has_its_cache():
    falcon, nemotron = dummy(config_of("falcon-h1")), dummy(config_of("nemotron-h"))
    assert [kind.needs for kind in falcon.cache_spec()] == ["attention"] * 2 + ["recurrent layers"] * 2
    assert [kind.needs for kind in nemotron.cache_spec()] == ["recurrent layers", "attention"]
    mamba2, mamba = nemotron.layers[0].attn, dummy(config_of("mamba")).layers[0].attn
    assert isinstance(mamba2, Mamba2) and isinstance(mamba, Mamba1)
    assert mamba2.cache() == State((6, 16, 12), 96 + 2 * 3 * 12 + 6, 2)
    assert mamba.cache() == State((2, 64, 6), 128 + 128 + 6, 3)


@pytest.mark.parametrize(("name", "layers"), [("nemotron-h", [2]), ("zamba2", [0, 2])])
def test_attention_weights_are_named_by_the_models_layers(name, layers, monkeypatch):
    """Other layers have no cache, or two."""
    model, found = dummy(config_of(name)), []
    monkeypatch.setattr(Batch, "note_weights", lambda batch, layer, cache, *inputs: found.append((layer, cache)))
    logits_of(model, [1, 2, 3])
    assert [layer for layer, _ in found] == layers
    assert all(model.cache_spec()[cache].needs == "attention" for _, cache in found)


@pytest.mark.parametrize(("inner", "share"), [(8192, 64), (1536, 64), (96, 48), (70, 35), (13, 13), (251, 1)])
def test_the_channels_that_are_scanned_together(inner, share):
    assert head_share(inner) == share and inner % share == 0


def test_blocks_of_one_kind_are_counted_from_letters():
    pattern = "M-M*"
    c = read({**config_of("nemotron-h"), "layers_block_type": None, "hybrid_override_pattern": pattern})
    assert c.kinds == ("mamba", "mlp", "mamba", "attention") and all(a != b for a, b in pairwise(c.kinds))


@pytest.mark.parametrize("name", ["granite-hybrid", "mamba"])
def test_the_graph_executor_refuses_them_by_name(name, tmp_path):
    pytest.importorskip("transformers", reason="transformers makes this test's model")
    traced = loaded(name, tmp_path).trace
    assert traced is not None
    with pytest.raises(CannotTrace, match="no Triton kernel for causal_convolution"):
        fold(traced)
