"""Converts the metadata of a GGUF file to the `config.json` that our classes read.

Keys and their meaning: the GGUF specification (docs/gguf.md of the ggml project). An unread key of the architecture
raises an error if its name suggests that it affects the arithmetic, as in a Hugging Face config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.elementary import log
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from kvasir.models.gguf_names import FAMILIES, TensorSource
from kvasir.models.registry import unsupported

_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last"}  # the numbers of llama.cpp's llama_pooling_type
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
        raise unsupported(architecture)
    fields = _fields(metadata, architecture)
    shapes = {name: tuple(source.info(name).shape) for name in source.names()}
    config = _READERS[architecture](fields, architecture, shapes)
    if "rope_freqs.weight" in shapes:
        _check_alone(config, "rope_freqs.weight", fields)
        config["rope_scaling"] = {"rope_type": "factors", "factors": _factors(source, "rope_freqs.weight")}
    if "rope_factors_short.weight" in shapes:
        _check_alone(config, "rope_factors_short.weight", fields)
        config["rope_scaling"] = _longrope(source, fields)
    fields.finish()
    return {**config, "eos_token_id": _eos_ids(metadata), "bos_token_id": _token_id(metadata, "bos_token_id")}


def _fields(metadata: Mapping[str, Any], architecture: str) -> Fields:
    """The architecture's own keys without their prefix, as plain values."""
    prefix = f"{architecture}."
    values = {k.removeprefix(prefix): _plain(v) for k, v in metadata.items() if k.startswith(prefix)}
    return Fields(values, f"GGUF metadata of {architecture}")


def _plain(value: Any) -> Any:
    """Converts a metadata value: a per-layer array of equal numbers to that number, a float32 to its shortest
    decimal."""
    if isinstance(value, np.ndarray):
        same = value.size and bool((value == value.flat[0]).all())
        return _plain(value.flat[0].item()) if same else value.tolist()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    return value


# --- families ---------------------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]


def _decoder(f: Fields, shapes: Shapes, *, partial: bool = False) -> dict[str, Any]:
    """The fields that all Llama-like decoders share. partial: the caller reads the number of rotated dimensions."""
    hidden = f.integer("embedding_length", 1, MAX_WIDTH)
    heads = f.integer("attention.head_count", 1, min(MAX_HEADS, hidden))
    head_dim = f.integer("attention.key_length", 1, MAX_WIDTH, hidden // heads)
    f.expect("attention.value_length", head_dim)
    if not partial:
        f.expect("rope.dimension_count", head_dim)
    return {
        "vocab_size": _vocab_size(f, shapes),
        "hidden_size": hidden,
        "intermediate_size": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": f.integer("attention.head_count_kv", 1, MAX_HEADS, heads),
        "head_dim": head_dim,
        "max_position_embeddings": f.integer("context_length", 1, MAX_POSITIONS),
        "rms_norm_eps": f.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope_theta": f.number("rope.freq_base", 1.0, 1e12, 10000.0),
        "rope_scaling": _rope_scaling(f),
        "tie_word_embeddings": "output.weight" not in shapes,
    } | _pooling(f)


def _llama(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """A Mixtral if the file has experts, a Mistral if it has a window, else a Llama."""
    config = _decoder(f, shapes)
    window = f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0) or None
    if f.integer("expert_count", 0, MAX_EXPERTS, 0):
        return config | {"model_type": "mixtral", "sliding_window": window} | _experts(f)
    f.expect("expert_used_count", 0)
    if window:
        return config | {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return config | {"model_type": "llama"} | biases


def _qwen(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    config = _decoder(f, shapes) | {"model_type": architecture}
    for absent in ("expert_count", "expert_used_count", "attention.sliding_window"):
        f.expect(absent, 0)
    return config if architecture == "qwen2" else config | {"attention_bias": "blk.0.attn_q.bias" in shapes}


def _qwen3moe(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """As llama.cpp, normalises the weights of a token's experts whatever the file sets, and has experts in every
    layer."""
    f.expect("attention.sliding_window", 0)
    f.expect("expert_weights_norm", True)
    return _decoder(f, shapes) | _experts(f) | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "norm_topk_prob": True,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }  # fmt: skip


def _experts(f: Fields) -> dict[str, int]:
    return {
        "num_local_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
    }


def _gemma(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """gemma2 and gemma3. The file does not hold the scale of the attention scores: as in llama.cpp, it is derived
    from the head dimension, or, for the largest model, which is recognised by its number of layers, from the width
    per head."""
    config = _decoder(f, shapes)
    layers, largest = config["num_hidden_layers"], {"gemma2": 46, "gemma3": 62}[architecture]
    whole = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = whole if layers == largest else config["head_dim"]
    config["layer_types"] = _layer_types(f, layers, pattern=2 if architecture == "gemma2" else 6)
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


def _layer_types(f: Fields, layers: int, pattern: int) -> list[str]:
    """From a flag per layer, or from a period N where every Nth layer has full attention. pattern: the default
    period."""
    given = f.get("attention.sliding_window_pattern")
    if isinstance(given, list) and len(given) == layers:
        slides = [bool(value) for value in given]
    elif isinstance(given, bool):
        slides = [given] * layers
    else:
        pattern = f.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, pattern)
        slides = [(i + 1) % pattern != 0 for i in range(layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _phi3(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    config = _decoder(f, shapes, partial=True)
    turning = f.integer("rope.dimension_count", 2, config["head_dim"], config["head_dim"])
    return config | {
        "model_type": "phi3",
        "partial_rotary_factor": turning / config["head_dim"],
        "sliding_window": f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0) or None,
    }


def _gpt2(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": _vocab_size(f, shapes),
        "n_embd": f.integer("embedding_length", 1, MAX_WIDTH),
        "n_inner": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "n_layer": f.integer("block_count", 1, MAX_LAYERS),
        "n_head": f.integer("attention.head_count", 1, MAX_HEADS),
        "n_positions": f.integer("context_length", 1, MAX_POSITIONS),
        "layer_norm_epsilon": f.number("attention.layer_norm_epsilon", 0.0, 1.0),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _bert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    f.expect("attention.causal", False)
    return {
        "model_type": "bert",
        "vocab_size": _vocab_size(f, shapes),
        "hidden_size": f.integer("embedding_length", 1, MAX_WIDTH),
        "intermediate_size": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
        "num_attention_heads": f.integer("attention.head_count", 1, MAX_HEADS),
        "max_position_embeddings": f.integer("context_length", 1, MAX_POSITIONS),
        "type_vocab_size": _rows(shapes, "token_types.weight"),
        "layer_norm_eps": f.number("attention.layer_norm_epsilon", 0.0, 1.0),
        "hidden_act": "gelu",
    } | _pooling(f)


_READERS = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "bert": _bert,
}

# --- parts ------------------------------------------------------------------------------------------


def _rope_scaling(f: Fields) -> dict[str, Any] | None:
    """The scaling in Hugging Face's terms; `read_rope` checks the fields that each kind requires. As in llama.cpp, a
    factor without a type means linear scaling, and a factor of 0 means none."""
    kind = f.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "linear")
    f.get("rope.scaling.finetuned")
    factor = f.number("rope.scaling.factor", 0.0, 1e6, 0.0) or f.number("rope.scale_linear", 0.0, 1e6, 0.0)
    original = f.integer("rope.scaling.original_context_length", 0, MAX_POSITIONS, 0)
    if kind == "none" or (kind == "linear" and not factor):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        scaling |= _yarn(f, factor)
    return scaling


def _yarn(f: Fields, factor: float) -> dict[str, float]:
    """YaRN's fields. llama.cpp's attention factor multiplies YaRN's own 0.1 ln(factor) + 1 instead of replacing it."""
    f.expect("rope.scaling.yarn_ext_factor", 1.0)
    names = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    found = {name: f.number(key, 0.0, 1e6, 0.0) for name, key in names.items()}
    extra = f.number("rope.scaling.attn_factor", 1e-6, 1e6, 1.0)
    extra *= f.number("rope.scaling.yarn_attn_factor", 1e-6, 1e6, 1.0)
    if extra != 1.0 and factor >= 1.0:
        found["attention_factor"] = extra * (0.1 * log(factor) + 1.0)
    return {name: value for name, value in found.items() if value}


def _check_alone(config: Mapping[str, Any], name: str, f: Fields) -> None:
    """Raises UnsupportedModel if the config has another scaling, which the tensor's factors would replace."""
    scaling = config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", "longrope"), scaling.get("factor", 0.0)
    if kind != "longrope" or factor not in (0.0, 1.0):
        raise UnsupportedModel(
            f"{f.where}: a {kind} rope scaling by {factor:g} together with the tensor {name}",
            "only one of the two is supported",
        )


def _longrope(source: TensorSource, f: Fields) -> dict[str, Any]:
    """LongRoPE's fields. As in llama.cpp, the original context is the full context where the file does not state it.
    Unless the file states the attention factor, it is derived from the two, as for the model folder that the file was
    made from."""
    context = f.integer("context_length", 1, MAX_POSITIONS)
    original = f.integer("rope.scaling.original_context_length", 0, MAX_POSITIONS, 0) or context
    scaling = {
        "rope_type": "longrope",
        "short_factor": _factors(source, "rope_factors_short.weight"),
        "long_factor": _factors(source, "rope_factors_long.weight"),
        "original_max_position_embeddings": original,
    }
    if f.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = f.number("rope.scaling.attn_factor", 1e-6, 1e6)
    return scaling


def _factors(source: TensorSource, name: str) -> list[float]:
    """A tensor with one divisor per frequency. For Llama 3's scaling, the converter computes them."""
    if name not in source.names():
        raise ModelFileError(f"the GGUF file has no tensor {name}", "is the file complete?")
    shape = source.info(name).shape
    if math.prod(shape) > MAX_WIDTH:
        raise ModelFileError(f"{name} has shape {shape}", "expected one number per frequency")
    return source.array(name).flatten().tolist()


def _pooling(f: Fields) -> dict[str, Any]:
    """`pooling` as `kvasir.models.pooling` reads it; empty if the file leaves it to the model's default."""
    number = f.get("pooling_type")
    if number is None:
        return {}
    if type(number) is not int or number not in _POOLING:
        raise UnsupportedModel(f"{f.where}: pooling_type is {number!r}", f"supported: {_POOLING}")
    return {"pooling": {"kind": _POOLING[number], "normalize": True}}


def _vocab_size(f: Fields, shapes: Shapes) -> int:
    rows = _rows(shapes, "token_embd.weight")
    if f.integer("vocab_size", 1, MAX_VOCAB, rows) != rows:
        raise ModelFileError(f"{f.where}: vocab_size is {f.get('vocab_size')}", f"token_embd has {rows} rows")
    return rows


def _rows(shapes: Shapes, name: str) -> int:
    shape = shapes.get(name, ())
    if len(shape) != 2:
        raise ModelFileError(f"the GGUF file has no matrix {name}", "is the file complete?")
    return shape[0]


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and (type(value) is not int or not 0 <= value < MAX_VOCAB):
        raise ModelFileError(f"tokenizer.ggml.{name} is {value!r}", "expected a token id")
    return value


def _eos_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a sequence: end of sequence, of turn and of message, where the file has them."""
    found = (_token_id(metadata, name) for name in _EOS_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))
