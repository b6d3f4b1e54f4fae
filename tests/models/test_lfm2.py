"""LFM2: its published configs, what its layers remember, and its experts in both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvasir.caches import State
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import Attention
from kvasir.layers.convolution import ShortConvolution
from kvasir.layers.moe import Routing
from kvasir.models.registry import model_class_for
from kvasir.weights.stacks import ExpertsView
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.oracle import DictSource, dummy, ours, random_ids

# As published in July 2025, with the fields of the training code.
LFM2_350M = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 1024, "conv_dim_out": 1024, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 16,
    "num_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
LFM2_700M = {
    **LFM2_350M, "block_dim": 1536, "block_ff_dim": 10240, "conv_dim": 1536, "conv_dim_out": 1536, "hidden_size": 1536,
    "num_attention_heads": 24, "num_heads": 24,
}  # fmt: skip
LFM2_1_2B = {
    **LFM2_350M, "block_dim": 2048, "block_ff_dim": 12288, "conv_dim": 2048, "conv_dim_out": 2048, "hidden_size": 2048,
    "num_attention_heads": 32, "num_heads": 32,
}  # fmt: skip
_ATTENTION_2_6B = (2, 5, 9, 12, 15, 18, 21, 24)
LFM2_2_6B = {
    **{key: value for key, value in LFM2_1_2B.items() if key != "full_attn_idxs"}, "block_ff_dim": 10752,
    "intermediate_size": 10752, "num_hidden_layers": 30, "theta": 1000000.0, "tie_embedding": True,
    "layer_types": ["full_attention" if i in _ATTENTION_2_6B else "conv" for i in range(30)],
}  # fmt: skip
LFM2_8B_A1B = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "transformers_version": "4.57.0.dev0", "use_cache": True,
    "use_expert_bias": True, "vocab_size": 65536,
}  # fmt: skip


def read(config: dict[str, Any], **changes: Any):
    config = {**config, **changes}
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.parametrize(
    ("config", "inner", "attention"),
    [
        (LFM2_350M, 4608, (2, 5, 8, 10, 12, 14)),
        (LFM2_700M, 6912, (2, 5, 8, 10, 12, 14)),
        (LFM2_1_2B, 8192, (2, 5, 8, 10, 12, 14)),
        (LFM2_2_6B, 7168, _ATTENTION_2_6B),
        (LFM2_8B_A1B, 7168, (2, 6, 10, 14, 18, 21)),
    ],
    ids=("350M", "700M", "1.2B", "2.6B", "8B-A1B"),
)
def test_a_published_config_is_read(config, inner, attention):
    c = read(config)
    assert (c.inner, c.head_dim, c.kv_heads, c.taps, c.tied) == (inner, 64, 8, 3, True)
    assert (c.norm_eps, c.rope_theta) == (1e-5, 1e6)
    assert tuple(i for i, convolves in enumerate(c.convolves) if not convolves) == attention


def test_the_experts_of_the_published_config():
    c = read(LFM2_8B_A1B)
    assert c.routing == Routing(4, "sigmoid", epsilon=1e-6)
    assert (c.num_experts, c.expert_inner, c.biased_choice) == (32, 1792, True)
    assert c.sparse == (False,) * 2 + (True,) * 22


def test_defaults_are_those_of_transformers(transformers):
    few = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 32, "num_hidden_layers": 4}
    few["max_position_embeddings"] = 64
    theirs = transformers.Lfm2Config(**few)
    model = transformers.Lfm2Model(transformers.Lfm2Config(**few, intermediate_size=100, block_multiple_of=32))
    c = read({"model_type": "lfm2", **few})
    assert (c.taps, c.kv_heads, c.norm_eps, c.conv_bias, c.tied) == (
        theirs.conv_L_cache, theirs.num_key_value_heads, theirs.norm_eps, theirs.conv_bias, theirs.tie_word_embeddings,
    )  # fmt: skip
    assert c.rope_theta == theirs.rope_parameters["rope_theta"] and not any(c.convolves)
    assert c.inner == 8192 and read(
        {"model_type": "lfm2", **few}, intermediate_size=100, block_multiple_of=32
    ).inner == (model.layers[0].feed_forward.w1.out_features)
    theirs = transformers.Lfm2MoeConfig(**few, layer_types=["conv"] * 4)
    c = read({"model_type": "lfm2_moe", **few, "layer_types": ["conv"] * 4})
    assert (c.inner, c.expert_inner, c.num_experts, c.routing.top_k, sum(c.sparse), c.biased_choice) == (
        theirs.intermediate_size, theirs.moe_intermediate_size, theirs.num_experts, theirs.num_experts_per_tok,
        4 - theirs.num_dense_layers, theirs.use_expert_bias,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "inner"),
    [
        ({"block_auto_adjust_ff_dim": False}, 6656),
        ({"block_ffn_dim_multiplier": None}, 4437),
        ({"block_ffn_dim_multiplier": 1.5}, 6656),
        ({"block_multiple_of": 1000}, 5000),
    ],
)
def test_the_rule_of_the_inner_width(change, inner):
    assert read(LFM2_350M, **change).inner == inner


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["conv"]},
        {"layer_types": "conv"},
        {"full_attn_idxs": [16]},
        {"full_attn_idxs": 3},
        {"conv_L_cache": 9},
        {"conv_L_cache": 0},
        {"block_ffn_dim_multiplier": 64.5},
        {"block_ffn_dim_multiplier": 0},
    ],
)
def test_bad_fields_are_refused(change):
    with pytest.raises(ModelFileError, match=r"layer_types|full_attn_idxs|conv_L_cache|block_ffn|inner width"):
        read(LFM2_350M, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["conv"] * 15 + ["mamba"]},
        {"block_use_swiglu": False},
        {"conv_dim": 2048},
        {"use_pos_enc": False},
    ],
)
def test_what_has_no_code_is_refused(change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read(LFM2_350M, **change)


def test_each_layer_has_its_kind_and_cache():
    model = dummy(config_of("lfm2"))
    kinds = [type(layer.attn) for layer in model.layers]
    assert kinds == [ShortConvolution, Attention, ShortConvolution, ShortConvolution]
    spec = model.cache_spec()
    assert spec[0] == State((0,), 64, 3) and spec[0].block_bytes(16, 2) == 4 * (3 + 16) * 64


def test_experts_may_be_stacked():
    config = config_of("lfm2-moe")
    apart = dummy(config)
    tensors = {name: value for name, value in _tensors_of(apart).items() if ".experts." not in name}
    prefix = "model.layers.{}.feed_forward.experts."
    for layer in (1, 2, 3):
        mine = [
            [torch.tensor(_tensors_of(apart)[f"{prefix.format(layer)}{i}.{w}.weight"]) for i in range(6)]
            for w in ("w1", "w3", "w2")
        ]
        gate, up, down = map(torch.stack, mine)
        tensors[prefix.format(layer) + "gate_up_proj"] = torch.cat([gate, up], 1).numpy()
        tensors[prefix.format(layer) + "down_proj"] = down.numpy()
    source = ExpertsView(DictSource({name: torch.tensor(value) for name, value in tensors.items()}))
    stacked = ours(config, {name: torch.tensor(source.array(name)) for name in source.names()})
    ids = random_ids(20, 96)
    assert torch.equal(logits_of(stacked, ids), logits_of(apart, ids))


def _tensors_of(model: Any) -> dict[str, Any]:
    from tests.models.oracle import dummy_source

    source = dummy_source(model)
    return {name: source.array(name) for name in source.names()}
