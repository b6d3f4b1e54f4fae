"""The decoders against transformers: equal logits, and every field of a config makes a difference to them."""

import re
from functools import cache
from typing import Any

import pytest
import torch

from tests.models.driver import logits_of
from tests.models.families import FAMILIES, FEW, SWITCHED, config_of
from tests.models.families_further import FURTHER_CHANGES
from tests.models.family_parts import LATENT, LLAMA3, LONGROPE, PLAIN, YARN
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, ours, random_ids, randomized, state_of
from tests.models.step3p5_text import Step3p5ForCausalLM

LENGTH = 100  # beyond every window and original rope length in `families`


@cache
def oracle(transformers: Any, name: str) -> Any:
    config = config_of(name)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return randomized(causal_model(transformers, config))


def causal_model(transformers: Any, config: Any) -> Any:
    if config.model_type == "mistral4":  # of no Auto class: it is the text part of another model
        return transformers.Mistral4ForCausalLM._from_config(config, attn_implementation="eager")
    if config.model_type == "step3p5":
        return Step3p5ForCausalLM(config)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@cache
def unchanged(transformers: Any, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[int], torch.Tensor]:
    """Config, weights, ids, and the logits of all three."""
    model, ids = oracle(transformers, name), random_ids(LENGTH, 96)
    config, state = model.config.to_dict(), state_of(model)
    return config, state, ids, logits_of(ours(config, state), ids)


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree(transformers, name):
    _, _, ids, logits = unchanged(transformers, name)
    expected = reference_logits(oracle(transformers, name), ids)
    assert 1 < expected.abs().max() < 100, "the weights' scale hides errors"
    assert distance(logits, expected) < TOLERANCE * (10 if name.startswith("zamba2") else 1)  # see test_float64


@pytest.mark.filterwarnings("ignore")
def test_longrope_uses_the_short_factors_where_no_longer_context_is_served(transformers):
    """transformers chooses by the length of the prompt."""
    model, ids = oracle(transformers, "phi3-longrope"), random_ids(64, 96)
    served = ours(model.config.to_dict(), state_of(model))
    longer = logits_of(served, ids)
    served.rope.serve(64)
    assert distance(logits_of(served, ids), reference_logits(model, ids)) < TOLERANCE
    assert distance(longer, reference_logits(model, ids)) > SENSITIVITY


def scaled(scaling: dict[str, Any], theta: float, **changes: Any) -> list[dict[str, Any]]:
    """The rope settings with one change each."""
    whole = {**scaling, "rope_theta": theta}
    return [{"rope_parameters": {**whole, key: value}} for key, value in changes.items()]


LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
LOCAL = {"rope_type": "default", "rope_theta": 20.0}
FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0, "factor": 2.0}
MIMO_ROPE = FAMILIES["mimo-v2-flash"]["rope_parameters"]["sliding_attention"]
# Each entry changes the config that our model reads, and nothing else: the logits must notice.
CHANGES: dict[str, list[dict[str, Any]]] = {
    **FURTHER_CHANGES,
    "llama": [
        {"rms_norm_eps": 1e-1},
        {"hidden_act": "gelu"},
        {"hidden_act": "relu"},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ],
    "llama-3": [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        *scaled(LLAMA3, 500.0, factor=4.0, low_freq_factor=0.5, high_freq_factor=2.0),
        *scaled(LLAMA3, 500.0, original_max_position_embeddings=64, rope_theta=600.0),
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 25}],
    "qwen2-windows": [
        {"layer_types": ["full_attention"] * 3},
        {"sliding_window": 21},
        {"layer_types": ["sliding_attention"] * 3},
    ],
    "qwen2-yarn": [
        *scaled(YARN, 100.0, factor=8.0, original_max_position_embeddings=128, attention_factor=1.0),
        *scaled(YARN, 100.0, beta_fast=4.0, beta_slow=0.5, truncate=False),
    ],
    "qwen3": [{"rms_norm_eps": 1e-1}],
    "gemma2": [
        {"rms_norm_eps": 1e-1},
        {"hidden_activation": "silu"},
        {"query_pre_attn_scalar": 48},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"sliding_window": 21},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    ],
    "gemma3": [
        {"rms_norm_eps": 1e-1},
        {"query_pre_attn_scalar": 48},
        {"final_logit_softcapping": 20.0},
        {"sliding_window": 21},
        {"layer_types": ["full_attention"] * 4},
        {"rope_parameters": {"full_attention": {**LINEAR, "factor": 4.0}, "sliding_attention": LOCAL}},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 5000.0}, "sliding_attention": LOCAL}},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**LOCAL, "rope_theta": 30.0}}},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**LINEAR, "rope_theta": 20.0}}},
    ],
    "gemma3n": [
        {"rms_norm_eps": 1e-1},
        {"hidden_activation": "silu"},
        {"final_logit_softcapping": 20.0},
        {"sliding_window": 25},
        {"activation_sparsity_pattern": [0.7, 0.0, 0.5, 0.0]},
        {"activation_sparsity_pattern": 0.7},
        {"altup_active_idx": 0},
        {"altup_correct_scale": False},
        {"rope_parameters": {"full_attention": {**LOCAL, "rope_theta": 5000.0}, "sliding_attention": LOCAL}},
        {
            "rope_parameters": {
                "full_attention": {**LOCAL, "rope_theta": 500.0},
                "sliding_attention": {**LOCAL, "rope_theta": 30.0},
            }
        },
    ],
    "gemma4": [
        {"rms_norm_eps": 1e-1},
        {"hidden_activation": "silu"},
        {"final_logit_softcapping": None},
        {"sliding_window": 25},
        *[
            {"rope_parameters": {"full_attention": {**FULL, **change}, "sliding_attention": LOCAL}}
            for change in (
                {"rope_theta": 5000.0},
                {"partial_rotary_factor": 0.25},
                {"factor": 4.0},
                {"rope_type": "default", "factor": None, "partial_rotary_factor": None},
            )
        ],
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": {**LOCAL, "rope_theta": 30.0}}},
    ],
    "gemma4-moe": [{"top_k_experts": 2}, {"hidden_activation": "silu"}, {"rms_norm_eps": 1e-1}],
    "phi3": [
        {"rms_norm_eps": 1e-1},
        {"sliding_window": 25},
        {"sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.75}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ],
    "phi3-longrope": [
        {"original_max_position_embeddings": 500, "rope_parameters": {**LONGROPE, "factor": 1.0}},
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.0}},
        {"rope_parameters": {**LONGROPE, "factor": 32.0}},
        {"rope_parameters": {**LONGROPE, "long_factor": [1.0] * 8}},
        {"rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.5}},
        {"max_position_embeddings": 4096},
    ],
    "mixtral": [
        {"sliding_window": 25},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"hidden_act": "gelu"},
    ],
    "qwen3-moe": [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 2},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 20},
    ],
    "qwen3-next": [
        {"rms_norm_eps": 1e-1},
        {"hidden_act": "gelu"},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        {"linear_num_key_heads": 4, "linear_key_head_dim": 6},
    ],
    "qwen3-5": [
        {"rms_norm_eps": 1e-1},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        {"linear_num_key_heads": 4, "linear_key_head_dim": 6},
    ],
    "olmo2": [{"rms_norm_eps": 1e-1}, {"hidden_act": "gelu"}],
    "olmo3": [
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 100.0}, "sliding_attention": LOCAL}},
        {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": {**LOCAL, "rope_theta": 100.0}}},
        {"layer_types": ["full_attention"] * 4},
        {"sliding_window": 25},
    ],
    "smollm3": [
        {"no_rope_layers": [1, 1, 1]},
        {
            "use_sliding_window": True,
            "sliding_window": 25,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
    ],
    "seed-oss": [{"rms_norm_eps": 1e-1}],
    "bitnet": [{"hidden_act": "silu"}, {"rms_norm_eps": 1e-1}],
    "arcee": [{"hidden_act": "relu"}, {"rms_norm_eps": 1e-1}],
    "granite": [
        {"embedding_multiplier": 1.0},
        {"attention_multiplier": 1.0},
        {"residual_multiplier": 1.0},
        {"logits_scaling": 1.0},
    ],
    "exaone4": [
        {"sliding_window": None},
        {"sliding_window": 25},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": None, "sliding_window_pattern": "LG"},
        {"layer_types": None, "sliding_window_pattern": 3},
    ],
    "glm4": [
        {"rms_norm_eps": 1e-1},
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 0.5}},
    ],
    "ernie4-5": [{"rms_norm_eps": 1e-1}, {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}],
    "cohere2": [
        {"layer_norm_eps": 1e-1},
        {"logit_scale": 1.0},
        {"sliding_window": 25},
        {"layer_types": None, "sliding_window_pattern": 2},
        {"layer_types": ["sliding_attention"] * 4},
    ],
    "starcoder2": [{"norm_epsilon": 1e-1}, {"hidden_act": "silu"}, {"sliding_window": None}],
    "nemotron": [
        {"norm_eps": 1e-1},
        {"hidden_act": "relu"},
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    ],
    "gpt-neox": [
        {"layer_norm_eps": 1e-1},
        {"use_parallel_residual": False},
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    ],
    "stablelm": [{"layer_norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}],
    "qwen2-moe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}],
    "olmoe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}],
    "hunyuan": [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 5.0, "rope_theta": 100.0}},
        {"rms_norm_eps": 1e-1},
    ],
    "gpt-oss": [
        {"num_experts_per_tok": 3},
        {"sliding_window": 25},
        {"layer_types": ["full_attention"] * 3},
        *scaled({**YARN, "truncate": False}, 100.0, truncate=True),
    ],
    "lfm2": [
        {"norm_eps": 1e-1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
    ],
    "lfm2-moe": [
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
    ],
    "kimi-linear": [
        {"rms_norm_eps": 1e-1},
        {"moe_renormalize": False},
        {"routed_scaling_factor": 1.0},
        {"num_experts_per_token": 2},
        {"topk_group": 3},
        {"num_expert_group": 2, "topk_group": 1},
        {"hidden_act": "gelu"},
    ],
    "lfm3": [
        {"norm_eps": 1e-1},
        {"sliding_window": 25},
        {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
    ],
    "olmo-hybrid": [
        {"linear_allow_neg_eigval": False},
        {"rms_norm_eps": 1e-1},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"linear_num_key_heads": 4, "linear_key_head_dim": 6},
    ],
    "ministral3": [
        *scaled({**YARN, "llama_4_scaling_beta": 0.5}, 100.0, llama_4_scaling_beta=0.0, factor=8.0),
        {"sliding_window": 25},
    ],
    "glm4-moe": [
        {"num_experts_per_tok": 2},
        {"n_group": 2, "topk_group": 1},
        {"topk_group": 3},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    ],
    "deepseek-v2": [
        {"num_experts_per_tok": 2},
        {"topk_method": "greedy"},
        {"n_group": 2, "topk_group": 1},
        {"routed_scaling_factor": 1.0},
        *scaled(LATENT["rope_parameters"], 100.0, mscale=0.1, mscale_all_dim=1.0, factor=8.0, rope_theta=200.0),
    ],
    "deepseek-v3": [
        {"num_experts_per_tok": 2},
        {"topk_group": 3},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"rope_interleave": False},
    ],
    "deepseek-v32": [{"index_topk": 12}, {"rope_interleave": False}],
    "glm-moe-dsa": [{"index_topk": 20}, {"topk_group": 3}, {"routed_scaling_factor": 1.0}],
    "glm4-moe-lite": [{"rope_interleave": False}, {"norm_topk_prob": False}],
    "mistral4": [
        *scaled({**LATENT["rope_parameters"], "llama_4_scaling_beta": 0.5}, 100.0, llama_4_scaling_beta=0.0),
        {"norm_topk_prob": False},
        {"rope_interleave": False},
    ],
    "mimo-v2-flash": [
        {"sliding_window": 26},
        {"attention_value_scale": 1.0},
        {"sliding_window_size": 23},
        {"rope_parameters": {"full_attention": MIMO_ROPE, "sliding_attention": {**MIMO_ROPE, "rope_theta": 20.0}}},
        {"rope_parameters": {"full_attention": {**MIMO_ROPE, "rope_theta": 200.0}, "sliding_attention": MIMO_ROPE}},
    ],
    "minicpm3": [{"scale_emb": 6}, {"scale_depth": 0.7}, {"dim_model_base": 64}, {"rms_norm_eps": 1e-1}],
    "dots1": [{"sliding_window": 25}, {"layer_types": ["full_attention"] * 3}, {"norm_topk_prob": False}],
    "minimax-m2": [{"num_experts_per_tok": 2}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}],
    "ernie4-5-moe": [{"moe_k": 2}],
    "hunyuan-moe": [{"moe_topk": 2}],
    "granite-hybrid": [
        {"rms_norm_eps": 1e-1},
        {"hidden_act": "gelu"},
        {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"},
        {"time_step_limit": [0.0, 2.0]},
        {"time_step_limit": [0.1, 0.5]},
        {"mamba_n_groups": 1, "mamba_d_state": 24},
        {"residual_multiplier": 1.0},
        {"num_experts_per_tok": 2},
    ],
    "nemotron-h": [
        {"layer_norm_epsilon": 1e-1},
        {"mamba_hidden_act": "gelu"},
        {"time_step_limit": [0.5, 1.0]},
        {"n_groups": 1, "ssm_state_size": 36},
        {"num_experts_per_tok": 2},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"n_group": 1, "topk_group": 1},
    ],
    "bamba": [
        {"rms_norm_eps": 1e-1},
        {"time_step_limit": [0.0, 2.0]},
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    ],
    "falcon-h1": [
        {"rms_norm_eps": 1e-1},
        {"mamba_norm_before_gate": False},
        {"key_multiplier": 1.0},
        {"attention_in_multiplier": 1.0},
        {"attention_out_multiplier": 1.0},
        {"ssm_in_multiplier": 1.0},
        {"ssm_out_multiplier": 1.0},
        {"lm_head_multiplier": 1.0},
        {"embedding_multiplier": 1.0},
        *({"mlp_multipliers": pair} for pair in ([1.0, 1.5], [0.7, 1.0])),
        *(
            {"ssm_multipliers": [1.0 if i == j else m for j, m in enumerate([0.7, 1.4, 0.8, 1.2, 0.6])]}
            for i in range(5)
        ),
    ],
    "falcon-mamba": [{"mixer_rms_eps": 1.0}, {"layer_norm_epsilon": 1e-1}],
    "jamba": [{"rms_norm_eps": 1e-1}, {"num_experts_per_tok": 1}, {"hidden_act": "gelu"}],
    "mamba": [{"layer_norm_epsilon": 1e-1}, {"hidden_act": "silu"}],
    "zamba2": [
        {"rms_norm_eps": 1e-1},
        {"use_mem_rope": False},
        {"hidden_act": "relu"},
        {"time_step_limit": [0.5, 1.0]},
    ],
    "mamba2": [
        {"layer_norm_epsilon": 1e-1},
        {"hidden_act": "gelu"},
        {"n_groups": 1, "state_size": 24},
        {"time_step_limit": [0.1, 0.5]},
    ],
    "granite-moe": [{"num_experts_per_tok": 2}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "apertus": [{"rms_norm_eps": 1e-1}],
    "cohere": [
        {"layer_norm_eps": 1e-1},
        {"logit_scale": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
    ],
    "falcon": [{"layer_norm_epsilon": 1e-1}, {"activation": "relu"}],
    "falcon-grouped": [{"layer_norm_epsilon": 1e-1}],
    "gemma": [{"hidden_act": "silu"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}],
    "glm": [{"rms_norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}],
    "llama4": [
        {"attention_chunk_size": 25},
        {"layer_types": ["full_attention"] * 4},
        {"no_rope_layers": [1, 1, 1, 1]},
        {"floor_scale": 32},
        {"attn_scale": 0.1},
        {"attn_temperature_tuning": False},
        {"use_qk_norm": False},
        {"num_experts_per_tok": 2},
    ],
    "helium": [{"rms_norm_eps": 1e-1}],
    "internlm3": [{"rms_norm_eps": 1e-1}],
    "ministral": [{"sliding_window": 25}, {"layer_types": ["full_attention"] * 3}],
    "vaultgemma": [{"query_pre_attn_scalar": 48}, {"attn_logit_softcapping": None}, {"sliding_window": 21}],
    "cohere2-moe": [
        {"layer_norm_eps": 1e-1},
        {"rms_norm_eps": 1e-3},
        {"num_experts_per_tok": 2},
        {"expert_selection_fn": "softmax"},
        {"norm_topk_prob": False},
        {"shared_expert_combination_strategy": "sum"},
        {"layer_types": ["sliding_attention"] * 4},
        {"prefix_dense_sliding_window_pattern": 2},
    ],
    "olmo": [{"clip_qkv": None}, {"clip_qkv": 1.0}],
    "phi": [{"layer_norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}],
    "phimoe": [
        {"router_jitter_noise": 0.01},
        {"rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.4}},
    ],
    "qwen3-5-moe": [{"num_experts_per_tok": 2}, {"hidden_act": "gelu"}],
}


@pytest.mark.few(25)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(n, c, id=f"{n}-{i}", marks=[pytest.mark.slow] if n in SWITCHED and n not in FEW else [])
        for n, changes in CHANGES.items()
        for i, c in enumerate(changes)
    ],
)
def test_every_field_moves_the_logits(transformers, name, change):
    config, state, ids, logits = unchanged(transformers, name)
    assert distance(logits_of(ours(config | change, state), ids), logits) > SENSITIVITY


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "phi3",  # a weight that is not used is found by all of test_logits_agree, too
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-biased-tied", "gemma2", "gemma3")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe-mixed", "qwen3-next")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-5", *SWITCHED)),
    ],
)
def test_every_weight_moves_the_logits(transformers, name):
    config, state, ids, logits = unchanged(transformers, name)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    again = ours(config, state).ignored  # the weights of blocks that several layers share
    state = {name: state[name] for name in state.keys() - tied if not any(re.fullmatch(p, name) for p in again)}
    for name, tensor in state.items():
        if name.endswith("k_layernorm.bias"):
            continue  # but for dimensions that rotate, it adds the same to all scores of a query
        axis = next((i for i, size in enumerate(tensor.shape) if size > 1), None)
        turned = tensor - 5.0 if axis is None else tensor.flip(axis)
        changed = state | {name: turned}  # not scaled: the next norm would undo it
        moved = distance(logits_of(ours(config, changed), ids), logits)
        assert moved > SENSITIVITY, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mistral", "phi3", "mixtral", "gemma2"])
def test_with_a_window_of_1_a_token_sees_itself_alone(transformers, name):
    config = config_of(name) | {"sliding_window": 1}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model, ids = randomized(model), random_ids(LENGTH, 96)
    logits = logits_of(ours(model.config.to_dict(), state_of(model)), ids, chunks=(17, 1, 30))
    assert distance(logits, reference_logits(model, ids)) < TOLERANCE
