"""Converts the metadata of a GGUF file to the `config.json` that our classes read.

Keys and their meaning: the GGUF specification (docs/gguf.md of the ggml project). An unread key of the architecture
raises an error if its name suggests that it affects the arithmetic, as in a Hugging Face config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models import (
    gguf_bitnet,
    gguf_decoders,
    gguf_dflash,
    gguf_eagle3,
    gguf_encoders,
    gguf_further,
    gguf_gemma,
    gguf_kimi,
    gguf_latent,
    gguf_lfm2,
    gguf_llamas,
    gguf_rwkv,
    gguf_state_spaces,
    gguf_step35,
)
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from kvasir.models.gguf_fields import (
    Shapes,
    architecture_fields,
    read_decoder,
    read_expert_counts,
    read_factors,
    read_layer_types,
    read_longrope,
    read_routed_experts,
    read_vocab_size,
)
from kvasir.models.gguf_names import FAMILIES
from kvasir.models.gguf_view import TensorSource
from kvasir.models.registry import unsupported

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hf_config_from_gguf(metadata: Mapping[str, Any], source: TensorSource) -> dict[str, Any]:
    """The equivalent of `config.json`. source: the file's tensors by their GGUF names.

    Raises UnsupportedModel for an architecture or feature without code, ModelFileError for values that are missing or
    out of range.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError("the GGUF file has no general.architecture", "is this a model, not a vocabulary?")
    if architecture not in FAMILIES:
        raise unsupported(architecture, known=FAMILIES)
    known = gguf_dflash.with_vocabulary(metadata, architecture) if architecture in gguf_dflash.READERS else metadata
    fields = architecture_fields(known, architecture)
    shapes = {name: tuple(source.info(name).shape) for name in source.names()}
    config = _READERS[architecture](fields, architecture, shapes)
    if "rope_freqs.weight" in shapes and architecture.startswith("gemma4"):
        gguf_gemma.put_share(config.get("text_config", config), read_factors(source, "rope_freqs.weight"))
    elif "rope_freqs.weight" in shapes:
        _check_alone(config, "rope_freqs.weight", fields)
        factors = read_factors(source, "rope_freqs.weight")
        if architecture == gguf_step35.ARCHITECTURE:
            factors = gguf_step35.turning(factors, config["head_dim"])
        config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
    if "rope_factors_short.weight" in shapes:
        _check_alone(config, "rope_factors_short.weight", fields)
        config["rope_scaling"] = read_longrope(source, fields)
    fields.finish()
    return {**config, "eos_token_id": _eos_ids(metadata), "bos_token_id": _token_id(metadata, "bos_token_id")}


def _check_alone(config: Mapping[str, Any], name: str, f: Fields) -> None:
    """Raises UnsupportedModel if the config has another scaling, which the tensor's factors would replace."""
    scaling = config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", "longrope"), scaling.get("factor", 0.0)
    if kind != "longrope" or factor not in (0.0, 1.0):
        raise UnsupportedModel(
            f"{f.where}: a {kind} rope scaling by {factor:g} together with the tensor {name}",
            "only one of the two is supported",
        )


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and (type(value) is not int or not 0 <= value < MAX_VOCAB):
        raise ModelFileError(f"tokenizer.ggml.{name} is {value!r}", "expected a token id")
    return value


def _eos_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a sequence: end of sequence, of turn and of message, where the file has them."""
    found = (_token_id(metadata, name) for name in _EOS_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))


# --- families ---------------------------------------------------------------------------------------


def _llama(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """A Mixtral if the file has experts, a Mistral if it has a window, else a Llama, whose last layers may be those for
    multi-token prediction."""
    config = read_decoder(f, shapes)
    window = f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0) or None
    if f.integer("expert_count", 0, MAX_EXPERTS, 0):
        return config | {"model_type": "mixtral", "sliding_window": window} | read_expert_counts(f)
    f.expect("expert_used_count", 0)
    if window:
        return config | {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    config |= {"model_type": "llama"} | biases
    layers = config["num_hidden_layers"]
    if drafting := f.integer("nextn_predict_layers", 0, layers - 1, 0):
        config |= {"num_hidden_layers": layers - drafting, "num_nextn_predict_layers": drafting}
    return config


def _qwen(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    pair = gguf_encoders.token_pair(f, shapes) if architecture == "qwen3" else {}
    config = read_decoder(f, shapes) | {"model_type": architecture} | pair
    for absent in ("expert_count", "expert_used_count", "attention.sliding_window"):
        f.expect(absent, 0)
    return config if architecture == "qwen2" else config | {"attention_bias": "blk.0.attn_q.bias" in shapes}


def _qwen3moe(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """As llama.cpp, normalises the weights of a token's experts whatever the file sets, and has experts in every
    layer."""
    f.expect("attention.sliding_window", 0)
    return read_decoder(f, shapes) | read_routed_experts(f, normalise=True) | {
        "model_type": "qwen3_moe",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }  # fmt: skip


def _gemma(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """gemma2 and gemma3. The file does not hold the scale of the attention scores: as in llama.cpp, it is derived
    from the head dimension, or, for the largest model, which is recognised by its number of layers, from the width
    per head."""
    config = read_decoder(f, shapes)
    layers, largest = config["num_hidden_layers"], {"gemma2": 46, "gemma3": 62}.get(architecture)
    whole = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = whole if layers == largest else config["head_dim"]
    config["layer_types"] = read_layer_types(f, layers, pattern=2 if architecture == "gemma2" else 6)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f.get(cap) is not None:
            config[cap] = f.number(cap, 0.0, 1e6) or None
    window = f.integer("attention.sliding_window", 0, MAX_POSITIONS, 4096 if architecture == "gemma2" else 0)
    if window:
        config["sliding_window"] = window
    else:
        config["layer_types"] = ["full_attention"] * layers
    if architecture == "gemma2":
        return config | {"model_type": "gemma2"}
    config["rope_local_base_freq"] = f.number("rope.freq_base_swa", 1.0, 1e12, 1e4)
    return config | {"model_type": "gemma3_text"}


def _gemma_embedding(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    f.expect("attention.causal", False)
    config = _gemma(f, architecture, shapes) | {"use_bidirectional_attention": True}
    return config | gguf_encoders.dense_layers(f, shapes, config)


def _phi3(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    return read_decoder(f, shapes, partial=True) | {
        "model_type": "phi3",
        "sliding_window": f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0) or None,
    }


def _gpt2(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": read_vocab_size(f, shapes),
        "n_embd": f.integer("embedding_length", 1, MAX_WIDTH),
        "n_inner": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "n_layer": f.integer("block_count", 1, MAX_LAYERS),
        "n_head": f.integer("attention.head_count", 1, MAX_HEADS),
        "n_positions": f.integer("context_length", 1, MAX_POSITIONS),
        "layer_norm_epsilon": f.number("attention.layer_norm_epsilon", 0.0, 1.0),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in shapes,
    }


_READERS = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma-embedding": _gemma_embedding,
    "phi3": _phi3,
    "gpt2": _gpt2,
    **gguf_bitnet.READERS,
    **gguf_decoders.READERS,
    **gguf_dflash.READERS,
    **gguf_eagle3.READERS,
    **gguf_encoders.READERS,
    **gguf_further.READERS,
    **gguf_kimi.READERS,
    **gguf_latent.READERS,
    **gguf_lfm2.READERS,
    **gguf_gemma.READERS,
    **gguf_rwkv.READERS,
    **gguf_state_spaces.READERS,
    **gguf_step35.READERS,
    **gguf_llamas.READERS,
}
