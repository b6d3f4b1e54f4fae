"""Each published config of a decoder is accepted at its stated sizes, with the details that decide."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import KvasirError, UnsupportedModel
from kvasir.models.registry import model_class_for
from tests.models import published_dense as dense
from tests.models import published_mixtures as mixtures
from tests.models import published_recurrent as recurrent

# layers, width, heads, heads of keys, width of a head, context
SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Phi-3.5-MoE": (mixtures.PHI_3_5_MOE, (32, 4096, 32, 8, 128, 131072)),
    "falcon-7b": (dense.FALCON_7B, (32, 4544, 71, 1, 64, 2048)),
    "falcon-40b": (dense.FALCON_40B, (60, 8192, 128, 8, 64, 2048)),
    "Apertus-8B": (dense.APERTUS_8B, (32, 4096, 32, 8, 128, 65536)),
    "BitNet-2B-4T": (dense.BITNET_2B, (30, 2560, 20, 5, 128, 4096)),
    "Llama-4-Scout": (mixtures.LLAMA_4_SCOUT, (48, 5120, 40, 8, 128, 10485760)),
    "command-r": (dense.COMMAND_R, (40, 8192, 64, 64, 128, 131072)),
    "gemma-2b": (dense.GEMMA_2B, (18, 2048, 8, 1, 256, 8192)),
    "phi-2": (dense.PHI_2, (32, 2560, 32, 32, 80, 2048)),
    "OLMo-1B": (dense.OLMO_1B, (16, 2048, 16, 16, 128, 2048)),
    "glm-4-9b": (dense.GLM_4_9B, (40, 4096, 32, 2, 128, 131072)),
    "LFM2-350M": (dense.LFM2_350M, (16, 1024, 16, 8, 64, 128000)),
    "LFM2-8B-A1B": (mixtures.LFM2_8B_A1B, (24, 2048, 32, 8, 64, 128000)),
    "LFM2.5-8B-A1B": (mixtures.LFM2_5_8B_A1B, (24, 2048, 32, 8, 64, 128000)),
    "GLM-4.5-Air": (mixtures.GLM_4_5_AIR, (46, 4096, 96, 8, 128, 131072)),
    "MiniMax-M2.5": (mixtures.MINIMAX_M2, (62, 3072, 48, 8, 128, 204800)),
    "Seed-OSS-36B": (dense.SEED_OSS_36B, (64, 5120, 80, 8, 128, 524288)),
    "K-EXAONE-236B": (mixtures.K_EXAONE, (48, 6144, 64, 8, 128, 262144)),
    "Trinity-Nano": (mixtures.TRINITY_NANO, (56, 1024, 8, 2, 128, 131072)),
    "dbrx": (mixtures.DBRX, (40, 6144, 48, 8, 128, 32768)),
    "stablelm-2-12b": (dense.STABLELM_2_12B, (40, 5120, 32, 8, 160, 4096)),
    "Trinity-Mini": (mixtures.TRINITY_MINI, (32, 2048, 32, 4, 128, 131072)),
    "cwm": (dense.CWM, (64, 6144, 48, 8, 128, 131072)),
    "SmolLM3-3B": (dense.SMOLLM3_3B, (36, 2048, 16, 4, 128, 65536)),
    "Olmo-3-7B": (dense.OLMO_3_7B, (32, 4096, 32, 32, 128, 65536)),
    "tiny-aya": (dense.TINY_AYA, (4, 2048, 16, 4, 128, 8192)),
    "gpt-oss-20b": (mixtures.GPT_OSS_20B, (24, 2880, 64, 8, 64, 131072)),
    "Qwen3-Coder-Next": (mixtures.QWEN3_NEXT, (48, 2048, 16, 2, 256, 262144)),
    "ERNIE-4.5-21B-A3B": (mixtures.ERNIE_21B_A3B, (28, 2560, 20, 4, 128, 131072)),
    "Hunyuan-A13B": (mixtures.HUNYUAN_A13B, (32, 4096, 32, 8, 128, 32768)),
    "granite-4.0-h-350m": (recurrent.GRANITE_4_H_350M, (32, 768, 12, 4, 64, 32768)),
    "Falcon-H1-0.5B": (recurrent.FALCON_H1_500M, (36, 1024, 8, 2, 64, 16384)),
    "Nemotron-3-Nano": (recurrent.NEMOTRON_3_NANO, (52, 2688, 32, 2, 128, 262144)),
    "FlexOlmo-7x7B": (mixtures.FLEX_OLMO, (32, 4096, 32, 32, 128, 4096)),
}


def read(config: dict[str, Any]) -> Any:
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_config_is_accepted(name):
    config, sizes = SIZES[name]
    c = read(config)
    assert (c.num_layers, c.width, c.heads, c.kv_heads, c.head_dim, c.context_length) == sizes


def test_the_rotations_that_decide():
    assert read(mixtures.MINIMAX_M2).rotary_dim == 64 and read(mixtures.GLM_4_5_AIR).rotary_dim == 64
    assert read(dense.PHI_2).rotary_dim == 32 and read(dense.STABLELM_2_12B).rotary_dim == 40
    assert read(mixtures.LFM2_5_8B_A1B).rope_theta == 5e6 and read(mixtures.LFM2_8B_A1B).rope_theta == 1e6
    nano, exaone = read(mixtures.TRINITY_NANO), read(mixtures.K_EXAONE)
    assert nano.rotates == (True, True, True, False) * 14 and nano.windows == (2048, 2048, 2048, 0) * 14
    assert exaone.windows == (128, 128, 128, 0) * 12 and exaone.rotates == (True, True, True, False) * 12
    assert exaone.rope_theta == 1e6
    moe = read(mixtures.PHI_3_5_MOE)
    assert set(moe.windows) == {0} and moe.rope_scaling.served(131072).attention_factor == 1.243163121016122


def test_the_details_that_decide():
    scout = read(mixtures.LLAMA_4_SCOUT)
    assert scout.rotates == (True, True, True, False) * 12 and scout.chunks == (8192, 8192, 8192, 0) * 12
    assert scout.growth == (0.1, 8192, 1) and all(scout.sparse) and (scout.expert_inner, scout.inner) == (8192, 16384)
    assert read(dense.GEMMA_2B).act == "gelu_pytorch_tanh"
    dbrx = read(mixtures.DBRX)
    assert (dbrx.rope_theta, dbrx.qkv_clip, dbrx.num_experts, dbrx.routing.top_k) == (500000.0, 8.0, 16, 4)
    trinity = read(mixtures.TRINITY_MINI)
    assert trinity.rotates == (True, True, True, False) * 8 and trinity.embed_scale == 2048**0.5
    assert trinity.sparse == (False, False) + (True,) * 30 and trinity.shared_inner == 1024
    exaone = read(mixtures.K_EXAONE)
    assert exaone.sparse == (False,) + (True,) * 47 and exaone.routing.scale == 2.5


def test_the_details_that_decide_of_further_models():
    olmo, aya, oss = read(dense.OLMO_3_7B), read(dense.TINY_AYA), read(mixtures.GPT_OSS_20B)
    assert olmo.windows == (4096, 4096, 4096, 0) * 8 and olmo.rope_scaling.attention_factor == 1.2079441541679836
    assert aya.windows == (4096, 4096, 4096, 0) and aya.rotates == (True, True, True, False)
    assert oss.windows == (128, 0) * 12 and not oss.rope_scaling.truncate and oss.routing.top_k == 4
    assert read(dense.SMOLLM3_3B).rotates == (True, True, True, False) * 9
    following, ernie = read(mixtures.QWEN3_NEXT), read(mixtures.ERNIE_21B_A3B)
    assert (following.rotary_dim, following.num_experts, following.routing.top_k) == (64, 512, 10)
    assert ernie.sparse == (False,) + (True,) * 27 and ernie.shared_inner == 3072
    hunyuan = read(mixtures.HUNYUAN_A13B)
    assert (hunyuan.routing.top_k, hunyuan.shared_inner, hunyuan.tied) == (8, 3072, True)
    assert hunyuan.rope_theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    granite, nemotron = read(recurrent.GRANITE_4_H_350M), read(recurrent.NEMOTRON_3_NANO)
    assert not any(granite.rotates) and (granite.embed_scale, granite.residual_scale) == (12.0, 0.246)
    assert nemotron.kinds[:7] == ("mamba", "moe", "mamba", "moe", "mamba", "attention", "moe")
    assert (nemotron.routing.top_k, nemotron.routing.scale) == (6, 2.5)


def test_alibi_is_refused_by_name():
    rw = {**dense.FALCON_7B, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    with pytest.raises(UnsupportedModel, match="alibi"):
        read(rw)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**mixtures.DBRX, "rope_parameters": {"rope_theta": 10000.0}}, "rope_theta"),
        ({**mixtures.DBRX, "ffn_config": {**mixtures.DBRX["ffn_config"], "moe_top_k": 17}}, "moe_top_k"),
        (
            {**mixtures.DBRX, "ffn_config": {**mixtures.DBRX["ffn_config"], "moe_normalize_expert_weights": 2}},
            "moe_normalize",
        ),
        (
            {**mixtures.DBRX, "ffn_config": {**mixtures.DBRX["ffn_config"], "ffn_act_fn": {"name": "mish"}}},
            "ffn_act_fn",
        ),
        ({**mixtures.DBRX, "attn_config": 3}, "attn_config"),
        ({**mixtures.DBRX, "attn_config": {"new_scale": 2.0}}, "new_scale"),
        ({**mixtures.K_EXAONE, "is_moe_layer": [True]}, "is_moe_layer"),
        ({**mixtures.TRINITY_MINI, "num_expert_groups": 2}, "num_expert_groups"),
        ({**mixtures.TRINITY_MINI, "score_func": "softmax"}, "score_func"),
    ],
)
def test_values_without_code_are_refused_by_name(config, words):
    with pytest.raises(KvasirError, match=words):
        read(config)
