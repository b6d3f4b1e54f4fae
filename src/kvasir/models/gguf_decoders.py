"""Converts the metadata of GGUF files of further decoders to the `config.json` that our classes read, as `gguf_llamas`
does."""

from __future__ import annotations

from typing import Any

from kvasir.errors import ModelFileError
from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields, is_number
from kvasir.models.gguf_fields import Shapes, read_decoder, read_expert_counts, read_vocab_size, rows_of

Config = dict[str, Any]


def _has_bias(shapes: Shapes, module: str) -> bool:
    return any(name.endswith(f".{module}.bias") for name in shapes)


def _apertus(f: Fields, architecture: str, shapes: Shapes) -> Config:
    config = read_decoder(f, shapes) | {"model_type": "apertus", "attention_bias": _has_bias(shapes, "attn_q")}
    layers = config["num_hidden_layers"]
    return config | {
        "xielu": [_of_layers(f, f"xielu.{name}", layers) for name in ("alpha_p", "alpha_n", "beta", "eps")]
    }


def _of_layers(f: Fields, name: str, layers: int) -> list[float]:
    """One number per layer; a file where all are equal is read as one number."""
    given = f.get(name)
    values = [given] * layers if is_number(given) else given
    if not isinstance(values, list) or len(values) != layers:
        raise ModelFileError(f"{f.where}: {name} is not a list of {layers} numbers", "is the file complete?")
    return values


def _command_r(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes, eps="layer_norm_eps") | {
        "model_type": "cohere",
        "logit_scale": f.number("logit_scale", 1e-6, 1e6, 0.0625),
        "attention_bias": _has_bias(shapes, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _falcon(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The number of heads of keys follows from the fused matrix: files of models with one head state any number."""
    f.get("tensor_data_layout")
    config = read_decoder(f, shapes, eps="layer_norm_epsilon")
    dim, heads = config.pop("head_dim"), config["num_attention_heads"]
    grouped = rows_of(shapes, "blk.0.attn_qkv.weight") // dim - heads
    del config["num_key_value_heads"]
    return config | {
        "model_type": "falcon",
        "ffn_hidden_size": config.pop("intermediate_size"),
        "num_kv_heads": grouped // 2,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in shapes else 1,
        "bias": _has_bias(shapes, "attn_qkv"),
    }


def _gemma(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _glm(f: Fields, architecture: str, shapes: Shapes) -> Config:
    bias = _has_bias(shapes, "attn_q") or _has_bias(shapes, "attn_qkv")
    return read_decoder(f, shapes, partial=True) | {"model_type": "glm", "attention_bias": bias}


def _llama4(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """As in llama.cpp, the chunks and the growth of queries have the published sizes, and only the model with 128
    experts has no head norms."""
    f.expect("leading_dense_block_count", 0)
    for known in ("expert_gating_func", "expert_shared_count"):
        f.get(known)
    config, experts = read_decoder(f, shapes), read_expert_counts(f)
    return config | experts | {
        "model_type": "llama4_text",
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "interleave_moe_layer_step": f.integer("interleave_moe_layer_step", 1, MAX_LAYERS),
        "attention_chunk_size": 8192 if f.flag("expert_swa", True) else None,
        "use_qk_norm": experts["num_local_experts"] != 128,
        "attention_bias": _has_bias(shapes, "attn_q"),
    }  # fmt: skip


def _olmo(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.expect("attention.layer_norm_epsilon", 1e-5)
    config = read_decoder(f, shapes, eps="layer_norm_eps")
    del config["layer_norm_eps"]
    clip = f.number("attention.clamp_kqv", 0.0, 1e6, 0.0) or None
    return config | {"model_type": "olmo", "clip_qkv": clip, "attention_bias": _has_bias(shapes, "attn_q")}


def _phi2(f: Fields, architecture: str, shapes: Shapes) -> Config:
    config = read_decoder(f, shapes, eps="layer_norm_eps", partial=True)
    return config | {"model_type": "phi", "hidden_act": "gelu_new"}


def _phimoe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """llama.cpp has no SparseMixer: a file does not state how close logits count."""
    window = f.get("attention.sliding_window")
    return read_decoder(f, shapes) | read_expert_counts(f) | {
        "model_type": "phimoe",
        "sliding_window": window or None,
        "attention_bias": _has_bias(shapes, "attn_q"),
        "lm_head_bias": "output.bias" in shapes,
    }  # fmt: skip


def _starcoder(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.expect("attention.head_count_kv", 1)
    return {
        "model_type": "gpt_bigcode",
        "vocab_size": read_vocab_size(f, shapes),
        "n_embd": f.integer("embedding_length", 1, MAX_WIDTH),
        "n_inner": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "n_layer": f.integer("block_count", 1, MAX_LAYERS),
        "n_head": f.integer("attention.head_count", 1, MAX_HEADS),
        "n_positions": f.integer("context_length", 1, MAX_POSITIONS),
        "layer_norm_epsilon": f.number("attention.layer_norm_epsilon", 0.0, 1.0),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


READERS = {
    "apertus": _apertus,
    "chatglm": _glm,
    "command-r": _command_r,
    "falcon": _falcon,
    "gemma": _gemma,
    "llama4": _llama4,
    "olmo": _olmo,
    "phi2": _phi2,
    "phimoe": _phimoe,
    "starcoder": _starcoder,
}
