"""Kimi Linear: its published config, and what its layers remember."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.caches import Latent, State
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.gated_delta import KimiDelta
from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.moe import Routing
from kvasir.models.kimi_linear import KimiLinearConfig
from kvasir.ops.gated_delta import Heads
from tests.models.families import config_of
from tests.models.oracle import dummy

# moonshotai/Kimi-Linear-48B-A3B-Instruct
FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
        "full_attn_layers": FULL, "head_dim": 128, "kda_layers": [i for i in range(1, 28) if i not in FULL],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "transformers_version": "4.56.2", "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip


def read(**changes: Any) -> KimiLinearConfig:
    return KimiLinearConfig.from_hf({**PUBLISHED, **changes})


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**PUBLISHED["linear_attn_config"], **changes}}


def test_the_published_config_is_read():
    c = read()
    assert (c.num_layers, c.width, c.heads, c.plain_dim, c.head_dim, c.value_dim) == (27, 2304, 32, 128, 64, 128)
    assert (c.kv_rank, c.q_rank, c.max_position) == (512, 0, 1 << 20) and not any(c.rotates)
    assert c.delta == Heads(32, 32, 128, 128, decays=128) and c.taps == 4
    assert [i + 1 for i, recurrent in enumerate(c.recurrent) if not recurrent] == FULL
    assert c.routing == Routing(8, "sigmoid", scale=2.446, best_of_group=2)
    assert (c.num_experts, c.expert_inner, c.shared_inner) == (256, 1024, 1024) and c.sparse == (False,) + (True,) * 26


def test_defaults_are_those_of_transformers(transformers):
    theirs = transformers.KimiLinearConfig(num_hidden_layers=6)
    given = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    c = KimiLinearConfig.from_hf({**{name: getattr(theirs, name) for name in given}, "num_hidden_layers": 6})
    assert [*c.recurrent] == [kind == "linear_attention" for kind in theirs.layer_types]
    assert [*c.sparse] == [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert (c.delta.v, c.delta.dim, c.taps) == (
        theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim,
    )  # fmt: skip
    assert (c.kv_rank, c.plain_dim, c.head_dim, c.value_dim) == (
        theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim,
    )  # fmt: skip
    assert (c.num_experts, c.expert_inner, c.routing.top_k, c.routing.scale) == (
        theirs.num_local_experts, theirs.moe_intermediate_size, theirs.num_experts_per_tok,
        theirs.routed_scaling_factor,
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        linear(kda_layers=[1]),
        linear(full_attn_layers="4"),
        linear(kda_layers=[{}] * 20),
        linear(short_conv_kernel_size=9),
        linear(head_dim=0),
        {"linear_attn_config": 3},
        {"mlp_layer_types": ["sparse"]},
        {"layer_types": "x"},
    ],
)
def test_bad_fields_are_refused(change):
    with pytest.raises(ModelFileError, match=r"kda_layers|short_conv|head_dim|linear_attn|layer_types"):
        read(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"mla_use_nope": False},
        {"moe_router_activation_func": "softmax"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"layer_types": ["mamba"] * 27},
        linear(use_full_rank_gate=True),  # of Kimi K3
        linear(gate_lower_bound=-5.0),
    ],
)
def test_what_has_no_code_is_refused(change):
    with pytest.raises(UnsupportedModel):
        read(**change)


def test_each_layer_has_its_kind_and_cache():
    model = dummy(config_of("kimi-linear"))
    assert [type(layer.attn) for layer in model.layers] == [KimiDelta, LatentAttention, KimiDelta, KimiDelta]
    spec = model.cache_spec()
    assert spec[0] == State((5, 12, 12), 3 * 5 * 12 + 5 + 5 * 12, 3) and spec[1] == Latent(40, 32)
