"""The models of the families' table: sizes, names and metadata of published models, as llama.cpp's converters write
them. Some have fewer layers than their originals, so that a file fits into a few gigabytes.

Sources: the models' published config.json; conversion/*.py and src/models/*.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers import random_vocab as vocab
from benchmarks.peers.random_gguf import Tensor, matrix, norm, vector

LOGITS = 3.0  # standard deviation of the logits


@dataclass(frozen=True, slots=True)
class Shape:
    """kind: the type in which such a model is usually run. add: writes the metadata to a GGUFWriter. embeds: whether it
    embeds texts instead of generating."""

    name: str
    architecture: str
    kind: str
    layers: int
    tensors: Callable[[], list[Tensor]]
    add: Callable[[Any], None]
    embeds: bool = False


# --- parts ---------------------------------------------------------------------------------------------


def _attention(block: str, hidden: int, q: int, kv: int, out: int = 0, bias: bool = False) -> list[Tensor]:
    """q, kv, out: widths; out is that of the heads' results, by default q."""
    widths = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, out or q)}
    found = [matrix(f"{block}.{name}", *shape) for name, shape in widths.items()]
    return found + [vector(f"{block}.{name}.bias", shape[0]) for name, shape in widths.items() if bias]


def _mlp(block: str, hidden: int, inner: int, suffix: str = "") -> list[Tensor]:
    gate_up = [matrix(f"{block}.ffn_{name}{suffix}", inner, hidden) for name in ("gate", "up")]
    return [*gate_up, matrix(f"{block}.ffn_down{suffix}", hidden, inner)]


def _experts(block: str, hidden: int, inner: int, count: int) -> list[Tensor]:
    gate_up = [matrix(f"{block}.ffn_{name}_exps", count, inner, hidden) for name in ("gate", "up")]
    return [matrix(f"{block}.ffn_gate_inp", count, hidden), *gate_up,
            matrix(f"{block}.ffn_down_exps", count, hidden, inner)]  # fmt: skip


def _decoder(writer: Any, layers: int, hidden: int, inner: Any, context: int, eps: float) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_layer_norm_rms_eps(eps)


def _decays(random: np.random.Generator, count: int) -> np.ndarray:
    """-exp(A_log), as Mamba 2 initialises it."""
    return -random.uniform(1, 16, count)


def _steps(random: np.random.Generator, count: int) -> np.ndarray:
    """Biases whose softplus is 0.001 to 0.1, spread evenly over the logarithm."""
    steps = np.exp(random.uniform(np.log(0.001), np.log(0.1), count))
    return steps + np.log(-np.expm1(-steps))


# --- Qwen3.5-0.8B --------------------------------------------------------------------------------------


def _qwen35_tensors() -> list[Tensor]:
    hidden, vocabulary, keys, values = 1024, 248320, 2048, 2048
    found = [matrix("token_embd", vocabulary, hidden, gain=LOGITS), *norm("output_norm", hidden)]
    for i in range(24):
        block = f"blk.{i}"
        found += [*norm(f"{block}.attn_norm", hidden), *norm(f"{block}.post_attention_norm", hidden)]
        if (i + 1) % 4 == 0:  # the rows of q include the output's gate
            found += _attention(block, hidden, 2 * 8 * 256, 2 * 256, 8 * 256)
            found += [*norm(f"{block}.attn_q_norm", 256), *norm(f"{block}.attn_k_norm", 256)]
        else:
            found += [
                matrix(f"{block}.attn_qkv", 2 * keys + values, hidden), matrix(f"{block}.attn_gate", values, hidden),
                vector(f"{block}.ssm_conv1d.weight", 2 * keys + values, 4, spread=0.5),
                Tensor(f"{block}.ssm_dt.bias", (16,), draw=_steps), Tensor(f"{block}.ssm_a", (16,), draw=_decays),
                matrix(f"{block}.ssm_beta", 16, hidden), matrix(f"{block}.ssm_alpha", 16, hidden),
                *norm(f"{block}.ssm_norm", 128), matrix(f"{block}.ssm_out", hidden, values),
            ]  # fmt: skip
        found += _mlp(block, hidden, 3584)
    return found


def _qwen35(writer: Any) -> None:
    _decoder(writer, 24, 1024, 3584, 262144, 1e-6)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_key_length(256)
    writer.add_value_length(256)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(64)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(128)
    writer.add_ssm_group_count(16)
    writer.add_ssm_time_step_rank(16)
    writer.add_ssm_inner_size(2048)
    writer.add_full_attention_interval(4)
    specials = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046}
    vocab.byte_level(writer, 248320, "qwen35", specials, eos=248046, pad=248044)


# --- Gemma 4 E2B ---------------------------------------------------------------------------------------

_GEMMA_LAYERS = 35
_GEMMA_SHARED = 20  # of them, the last, which read the keys and values of an earlier one


def _gemma4_tensors() -> list[Tensor]:
    hidden, vocabulary, layers, extra = 1536, 262144, _GEMMA_LAYERS, 256
    found = [
        Tensor("rope_freqs.weight", (256,), draw=lambda _, n: np.where(np.arange(n) < n // 4, 1.0, 1e30)),
        matrix("token_embd", vocabulary, hidden, gain=LOGITS), *norm("output_norm", hidden),
        matrix("per_layer_token_embd", vocabulary, layers * extra, gain=(layers * extra / extra) ** 0.5),
        matrix("per_layer_model_proj", layers * extra, hidden), *norm("per_layer_proj_norm", extra),
    ]  # fmt: skip
    for i in range(layers):
        block, own = f"blk.{i}", i < layers - _GEMMA_SHARED
        dim, inner = 512 if (i + 1) % 5 == 0 else 256, 6144 if own else 12288
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            found += norm(f"{block}.{name}", hidden)
        attention = _attention(block, hidden, 8 * dim, dim)
        found += attention if own else [t for t in attention if "attn_k" not in t.name and "attn_v" not in t.name]
        # Scores are not scaled: with a weight near 1 each token would attend to one other, chosen by rounding errors.
        found += norm(f"{block}.attn_q_norm", dim, scale=2 * dim**-0.5)
        found += norm(f"{block}.attn_k_norm", dim) if own else []
        found += [
            *_mlp(block, hidden, inner), matrix(f"{block}.inp_gate", extra, hidden),
            matrix(f"{block}.proj", hidden, extra),
            Tensor(f"{block}.layer_output_scale.weight", (1,), draw=lambda _, n: np.ones(n)),
        ]  # fmt: skip
    return found


def _gemma4(writer: Any) -> None:
    layers = _GEMMA_LAYERS
    inner = [6144] * (layers - _GEMMA_SHARED) + [12288] * _GEMMA_SHARED
    _decoder(writer, layers, 1536, inner, 131072, 1e-6)
    writer.add_head_count(8)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_key_length(512)
    writer.add_value_length(512)
    writer.add_key_length_swa(256)
    writer.add_value_length_swa(256)
    writer.add_rope_dimension_count(512)
    writer.add_rope_dimension_count_swa(256)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(512)
    writer.add_sliding_window_pattern([(i + 1) % 5 != 0 for i in range(layers)])
    writer.add_shared_kv_layers(_GEMMA_SHARED)
    writer.add_embedding_length_per_layer_input(256)
    specials = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|turn>": 105, "<turn|>": 106}
    vocab.gemma(writer, 262144, specials, pad=0, eos=106, bos=2, unk=3, mask=4)


# --- gpt-oss-20b with 4 of 24 layers -------------------------------------------------------------------


def _gpt_oss_tensors() -> list[Tensor]:
    hidden, vocabulary, experts = 2880, 201088, 32
    found = [matrix("token_embd", vocabulary, hidden, gain=hidden**0.5), *norm("output_norm", hidden)]
    found += [matrix("output", vocabulary, hidden, gain=LOGITS)]
    for i in range(4):
        block = f"blk.{i}"
        found += [*norm(f"{block}.attn_norm", hidden), *norm(f"{block}.post_attention_norm", hidden)]
        found += [*_attention(block, hidden, 64 * 64, 8 * 64, bias=True), vector(f"{block}.attn_sinks.weight", 64)]
        found += [*_experts(block, hidden, hidden, experts), vector(f"{block}.ffn_gate_inp.bias", experts)]
        found += [vector(f"{block}.ffn_{name}_exps.bias", experts, hidden) for name in ("gate", "up", "down")]
    return found


def _gpt_oss(writer: Any) -> None:
    _decoder(writer, 4, 2880, 2880, 131072, 1e-5)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_key_length(64)
    writer.add_value_length(64)
    _yarn(writer, 150000.0, 32.0)
    writer.add_sliding_window(128)
    writer.add_expert_count(32)
    writer.add_expert_used_count(4)
    writer.add_expert_feed_forward_length(2880)
    specials = {"<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|constrain|>": 200003,
                "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008,
                "<|call|>": 200012}  # fmt: skip
    vocab.byte_level(writer, 201088, "gpt-4o", specials, bos=199998, eos=200002, pad=199999)


def _yarn(writer: Any, base: float, factor: float) -> None:
    from gguf import RopeScalingType

    writer.add_rope_freq_base(base)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_rope_scaling_yarn_beta_fast(32.0)
    writer.add_rope_scaling_yarn_beta_slow(1.0)


# --- LFM2-1.2B -----------------------------------------------------------------------------------------

_LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)


def _lfm2_tensors() -> list[Tensor]:
    hidden, vocabulary = 2048, 65536
    found = [matrix("token_embd", vocabulary, hidden, gain=LOGITS), *norm("token_embd_norm", hidden)]
    for i in range(16):
        block = f"blk.{i}"
        found += [*norm(f"{block}.attn_norm", hidden), *norm(f"{block}.ffn_norm", hidden)]
        if i in _LFM2_ATTENTION:
            found += _attention(block, hidden, 32 * 64, 8 * 64)
            found += [*norm(f"{block}.attn_q_norm", 64), *norm(f"{block}.attn_k_norm", 64)]
        else:
            found += [
                vector(f"{block}.shortconv.conv.weight", hidden, 3, spread=0.5),
                matrix(f"{block}.shortconv.in_proj", 3 * hidden, hidden),
                matrix(f"{block}.shortconv.out_proj", hidden, hidden),
            ]
        found += _mlp(block, hidden, 8192)
    return found


def _lfm2(writer: Any) -> None:
    _decoder(writer, 16, 2048, 8192, 128000, 1e-5)
    writer.add_head_count(32)
    writer.add_head_count_kv([8 if i in _LFM2_ATTENTION else 0 for i in range(16)])
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(65536)
    writer.add_shortconv_l_cache(3)
    specials = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}
    vocab.byte_level(writer, 65536, "lfm2", specials, bos=1, eos=7, pad=0)


# --- Granite 4.0 H Tiny with 8 of 40 layers ------------------------------------------------------------

_GRANITE_ATTENTION = (5,)


def _granite_tensors() -> list[Tensor]:
    hidden, vocabulary, inner, state, heads = 1536, 100352, 3072, 128, 48
    scaled = 6 * LOGITS  # the logits are divided by 6
    found = [matrix("token_embd", vocabulary, hidden, gain=scaled), *norm("output_norm", hidden)]
    for i in range(8):
        block = f"blk.{i}"
        found += [*norm(f"{block}.attn_norm", hidden), *norm(f"{block}.ffn_norm", hidden)]
        if i in _GRANITE_ATTENTION:
            found += _attention(block, hidden, 12 * 128, 4 * 128)
        else:
            found += [
                matrix(f"{block}.ssm_in", 2 * inner + 2 * state + heads, hidden),
                vector(f"{block}.ssm_conv1d.weight", inner + 2 * state, 4, spread=0.5),
                vector(f"{block}.ssm_conv1d.bias", inner + 2 * state),
                Tensor(f"{block}.ssm_dt.bias", (heads,), draw=_steps),
                Tensor(f"{block}.ssm_a", (heads, 1), draw=_decays),
                Tensor(f"{block}.ssm_d", (heads, 1), draw=lambda _, n: np.ones(n)),
                Tensor(f"{block}.ssm_norm.weight", (1, inner), draw=lambda random, n: 1 + 0.1 * random.normal(size=n)),
                matrix(f"{block}.ssm_out", hidden, inner),
            ]
        found += [*_experts(block, hidden, 512, 64), *_mlp(block, hidden, 1024, "_shexp")]
    return found


def _granite(writer: Any) -> None:
    _decoder(writer, 8, 1536, 512, 2**20, 1e-5)
    writer.add_head_count(12)
    writer.add_head_count_kv([4 if i in _GRANITE_ATTENTION else 0 for i in range(8)])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(128)
    writer.add_rope_scaling_finetuned(False)
    writer.add_vocab_size(100352)
    writer.add_attention_scale(0.0078125)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(6.0)
    writer.add_expert_count(64)
    writer.add_expert_used_count(6)
    writer.add_expert_shared_feed_forward_length(1024)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(128)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(3072)
    writer.add_ssm_time_step_rank(48)
    specials = {"<|pad|>": 100256, "<|end_of_text|>": 100257, "<|start_of_role|>": 100264, "<|end_of_role|>": 100265}
    vocab.byte_level(writer, 100352, "dbrx", specials, bos=100257, eos=100257, pad=100256)


# --- DeepSeek-V2-Lite with 4 of 27 layers --------------------------------------------------------------


def _deepseek_tensors() -> list[Tensor]:
    hidden, vocabulary, heads, latent, plain, turning = 2048, 102400, 16, 512, 128, 64
    found = [matrix("token_embd", vocabulary, hidden, gain=hidden**0.5), *norm("output_norm", hidden)]
    found += [matrix("output", vocabulary, hidden, gain=LOGITS)]
    for i in range(4):
        block = f"blk.{i}"
        found += [
            *norm(f"{block}.attn_norm", hidden), *norm(f"{block}.ffn_norm", hidden),
            matrix(f"{block}.attn_q", heads * (plain + turning), hidden),
            matrix(f"{block}.attn_kv_a_mqa", latent + turning, hidden), *norm(f"{block}.attn_kv_a_norm", latent),
            matrix(f"{block}.attn_k_b", heads, latent, plain, gain=(plain / latent) ** 0.5),
            matrix(f"{block}.attn_v_b", heads, 128, latent),
            matrix(f"{block}.attn_output", hidden, heads * 128),
        ]  # fmt: skip
        if i == 0:
            found += _mlp(block, hidden, 10944)
        else:
            found += [*_experts(block, hidden, 1408, 64), *_mlp(block, hidden, 2816, "_shexp")]
    return found


def _deepseek(writer: Any) -> None:
    """q_lora_rank is 0: only for files with 27 layers does llama.cpp know that there is no such matrix."""
    _decoder(writer, 4, 2048, 10944, 163840, 1e-6)
    writer.add_head_count(16)
    writer.add_head_count_kv(1)
    _yarn(writer, 10000.0, 40.0)
    writer.add_rope_scaling_yarn_log_mul(0.0707)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(102400)
    writer.add_q_lora_rank(0)
    writer.add_kv_lora_rank(512)
    writer.add_key_length(576)
    writer.add_value_length(512)
    writer.add_key_length_mla(192)
    writer.add_value_length_mla(128)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(64)
    writer.add_expert_used_count(6)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_expert_feed_forward_length(1408)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.0)
    specials = {"<｜begin▁of▁sentence｜>": 100000, "<｜end▁of▁sentence｜>": 100001}
    vocab.byte_level(writer, 102400, "deepseek-llm", specials, bos=100000, eos=100001, pad=100001)


# --- encoders ------------------------------------------------------------------------------------------


def _bge_tensors() -> list[Tensor]:
    hidden, vocabulary = 1024, 250002
    found = [matrix("token_embd", vocabulary, hidden, gain=hidden**0.5), *norm("token_embd_norm", hidden, bias=True)]
    found += [vector("position_embd.weight", 8192, hidden), vector("token_types.weight", 1, hidden)]
    for i in range(24):
        block = f"blk.{i}"
        found += _attention(block, hidden, hidden, hidden, bias=True)
        for name, shape in {"ffn_up": (4096, hidden), "ffn_down": (hidden, 4096)}.items():
            found += [matrix(f"{block}.{name}", *shape), vector(f"{block}.{name}.bias", shape[0])]
        found += [t for name in ("attn", "layer") for t in norm(f"{block}.{name}_output_norm", hidden, bias=True)]
    return found


def _encoder(writer: Any, layers: int, hidden: int, inner: int, heads: int, context: int, eps: float) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(eps)
    writer.add_causal_attention(False)


def _bge(writer: Any) -> None:
    from gguf import PoolingType

    _encoder(writer, 24, 1024, 4096, 16, 8192, 1e-5)
    writer.add_pooling_type(PoolingType.CLS)
    writer.add_token_type_count(1)
    specials = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 250001}
    vocab.unigram(writer, 250002, specials, unknown=3, bos=0, eos=2, sep=2, pad=1, mask=250001)


def _nomic_tensors() -> list[Tensor]:
    hidden, vocabulary = 768, 30522
    found = [matrix("token_embd", vocabulary, hidden, gain=hidden**0.5), *norm("token_embd_norm", hidden, bias=True)]
    found += [vector("token_types.weight", 2, hidden)]
    for i in range(12):
        block = f"blk.{i}"
        found += [matrix(f"{block}.attn_qkv", 3 * hidden, hidden), matrix(f"{block}.attn_output", hidden, hidden)]
        found += _mlp(block, hidden, 3072)
        found += [t for name in ("attn", "layer") for t in norm(f"{block}.{name}_output_norm", hidden, bias=True)]
    return found


def _nomic(writer: Any) -> None:
    from gguf import PoolingType

    _encoder(writer, 12, 768, 3072, 12, 2048, 1e-12)
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_rope_freq_base(1000.0)
    writer.add_token_type_count(2)
    specials = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
    vocab.wordpiece(writer, 30522, specials, unk=100, sep=102, pad=0, mask=103)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3.5-0.8b", "qwen35", "Q4_K_M", 24, _qwen35_tensors, _qwen35),
        Shape("gemma-4-e2b", "gemma4", "Q4_K_M", 35, _gemma4_tensors, _gemma4),
        Shape("gpt-oss-4", "gpt-oss", "MXFP4", 4, _gpt_oss_tensors, _gpt_oss),
        Shape("lfm2-1.2b", "lfm2", "Q4_K_M", 16, _lfm2_tensors, _lfm2),
        Shape("granite-4-tiny-8", "granitehybrid", "Q4_K_M", 8, _granite_tensors, _granite),
        Shape("deepseek-v2-lite-4", "deepseek2", "Q4_K_M", 4, _deepseek_tensors, _deepseek),
        Shape("bge-m3", "bert", "Q8_0", 24, _bge_tensors, _bge, embeds=True),
        Shape("nomic-embed-v1.5", "nomic-bert", "Q8_0", 12, _nomic_tensors, _nomic, embeds=True),
    )
}
