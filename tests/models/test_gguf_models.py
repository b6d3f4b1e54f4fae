"""GGUF models compute what the folders that they were made from compute.

First llama.cpp's own files, then files of each architecture, written by gguf-py from random models.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests._shared import need
from tests.models.driver import greedy, logits_of
from tests.models.gguf_files import add_tensors, converted_by, gguf, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

# --- llama.cpp's files ------------------------------------------------------------------------------


def prompts(folder: str) -> list[dict]:
    return json.loads(need("models", folder, "expected.json").read_text())["cases"]


def both(name: str, folder: str):
    return load(need("models", "gguf", f"{name}.gguf")), load(need("models", folder))


@pytest.mark.parametrize(
    ("name", "folder"), [("stories260K-F32", "stories260K"), ("TinyStories-656K-BF16", "TinyStories-656K")]
)
def test_the_same_weights_give_the_same_bits(name, folder):
    found, expected = both(name, folder)
    ids = random_ids(200, 512)
    assert torch.equal(logits_of(found, ids), logits_of(expected, ids))


# About twice what was found; a wrong scale or a wrong order of rows gives 1 and more.
@pytest.mark.parametrize(("kind", "bound"), [("F16", 1e-6), ("Q8_0", 0.025), ("Q4_0", 0.4)])
def test_rounded_weights_give_logits_nearby(kind, bound):
    found, expected = both(f"TinyStories-656K-{kind}", "TinyStories-656K")
    ids = random_ids(200, 2048)
    assert distance(logits_of(found, ids), logits_of(expected, ids)) < bound


def test_greedy_tokens_are_those_of_transformers():
    case = json.loads(need("models", "stories260K", "expected.json").read_text())["cases"][0]
    model = load(need("models", "gguf", "stories260K-F32.gguf"))
    expected = case["greedy_ids"]
    assert greedy(model, case["prompt_ids"], len(expected)) == expected


# --- files of every architecture --------------------------------------------------------------------

DECODER = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GPT2 = {"vocab_size": 101, "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 256}
QWEN3_MOE = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
             "norm_topk_prob": True}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
MODELS = {
    "llama": transformers.LlamaConfig(**DECODER),
    "llama-3": transformers.LlamaConfig(**DECODER, rope_theta=100.0, rope_scaling=LLAMA3),
    "llama-biased": transformers.LlamaConfig(**DECODER, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**DECODER, sliding_window=20, head_dim=32),
    "qwen2": transformers.Qwen2Config(**DECODER, rope_scaling=YARN),
    "qwen3": transformers.Qwen3Config(**DECODER, head_dim=32, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(**GPT2),
    "mixtral": transformers.MixtralConfig(**DECODER, num_local_experts=4, sliding_window=20),
    "qwen3-moe": transformers.Qwen3MoeConfig(**DECODER, **QWEN3_MOE),
    "gemma2": transformers.Gemma2Config(**DECODER, **GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=20.0),
    "gemma2-uncapped": transformers.Gemma2Config(
        **DECODER, **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **{**DECODER, "num_hidden_layers": 7}, **GEMMA, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ),
    "phi3": transformers.Phi3Config(**DECODER, pad_token_id=0, partial_rotary_factor=0.75, sliding_window=20),
    "phi3-longrope": transformers.Phi3Config(
        **DECODER, pad_token_id=0, original_max_position_embeddings=200, rope_scaling=LONGROPE
    ),
}


def to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of a Llama's q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def rope_factors(config, dim: int) -> np.ndarray:
    """The divisors that llama.cpp's converter stores for Llama 3's scaling."""
    s = config.rope_parameters
    waves = 2 * math.pi * s["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    share = s["original_max_position_embeddings"] / waves - s["low_freq_factor"]
    share = np.clip(share / (s["high_freq_factor"] - s["low_freq_factor"]), 0.0, 1.0)
    return (1 / ((1 - share) / s["factor"] + share)).astype(np.float32)


def converted(name: str, data: np.ndarray, c) -> dict[str, np.ndarray]:
    """A tensor of a checkpoint as its converter passes it to gguf-py's name table."""
    architecture = architecture_of(c)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return {name: data + 1.0}
    if architecture == "llama" and "q_proj" in name:
        return {name: to_pairs(data, c.num_attention_heads)}
    if architecture == "llama" and "k_proj" in name:
        return {name: to_pairs(data, c.num_key_value_heads)}
    if architecture == "gpt2" and name.endswith(("attn.weight", "proj.weight", "fc.weight")):
        return {name: data.T}
    return {name: data}


def architecture_of(c) -> str:
    others = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
    return others.get(c.model_type, c.model_type)


def write_gguf(hf, path: Path) -> Path:
    """The file as the converter writes it: its keys, gguf-py's names, and its changes to the tensors."""
    c, architecture = hf.config, architecture_of(hf.config)
    with writing(path, architecture) as writer:
        writer.add_context_length(c.max_position_embeddings)
        writer.add_embedding_length(c.hidden_size)
        writer.add_block_count(c.num_hidden_layers)
        writer.add_head_count(c.num_attention_heads)
        if architecture == "gpt2":
            writer.add_feed_forward_length(c.n_inner)
            writer.add_layer_norm_eps(c.layer_norm_epsilon)
        else:
            add_decoder_keys(writer, c)
        add_tensors(writer, names_of(architecture, c.num_hidden_layers), converted_by(converted, hf))
    return path


def add_decoder_keys(writer, c) -> None:
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    scaling = c.rope_parameters
    if c.model_type == "gemma3_text":
        writer.add_sliding_window(c.sliding_window)
        scaling = scaling["full_attention"]
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(scaling["rope_theta"])
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(c, head_dim))
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if c.model_type in ("mistral", "mixtral", "gemma2"):
        writer.add_sliding_window(c.sliding_window)
    if c.model_type == "gemma2":
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping or 0.0)
        writer.add_final_logit_softcapping(c.final_logit_softcapping or 0.0)
    if c.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(c.num_local_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
    if c.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if c.model_type == "phi3":
        add_phi3_keys(writer, c, head_dim)


def add_phi3_keys(writer, c, head_dim: int) -> None:
    scaling, original = c.rope_parameters, c.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(scaling["partial_rotary_factor"] * head_dim))
    writer.add_sliding_window(c.sliding_window or 0)
    if scaling["rope_type"] == "longrope":
        growth = max(1.0, c.max_position_embeddings / original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(growth) / math.log(original)))
        for kind in ("short", "long"):
            factors = np.array(scaling[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


@pytest.mark.parametrize("original", [64, 128, 8192])
def test_a_longrope_file_keeps_its_own_original_context(tmp_path, original):
    """By it the factors are chosen."""
    config = transformers.Phi3Config(
        **DECODER, pad_token_id=0, original_max_position_embeddings=original, rope_scaling=LONGROPE
    )
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    folder, file = load(save(hf, tmp_path / "folder")), load(write_gguf(hf, tmp_path / "model.gguf"))
    assert file.config.context_length == folder.config.context_length == 256
    assert file.config.rope_scaling.original_max_position == original
    ids = random_ids(file.config.context_length, 101)
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    for model in (file, folder):
        assert distance(logits_of(model, ids), expected) < TOLERANCE


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_computes_what_its_folder_computes(tmp_path, name):
    hf = randomized(transformers.AutoModelForCausalLM.from_config(MODELS[name]))
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf"))
    assert type(file) is type(folder)
    ids = random_ids(200, 101)
    found, expected = logits_of(file, ids), logits_of(folder, ids)
    if name in ("llama-3", "phi3-longrope"):  # their factors went through float32
        assert distance(found, expected) < TOLERANCE
    else:
        assert torch.equal(found, expected)
