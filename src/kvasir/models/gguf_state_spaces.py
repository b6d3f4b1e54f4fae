"""Converts the metadata of GGUF files of models with Mamba layers to the `config.json` that our classes read.

Keys and their meaning: llama.cpp's converters, and its `llama-model.cpp` for what a file does not say.
"""

from __future__ import annotations

from typing import Any

from kvasir.errors import ModelFileError
from kvasir.models.config import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_decoder, read_expert_counts, read_vocab_size, rows_of

Config = dict[str, Any]


def _biased(shapes: Shapes, module: str) -> bool:
    return any(name.endswith(f".{module}.bias") for name in shapes)


def _per_layer(f: Fields, name: str, most: int) -> list[int]:
    """A number for each layer, from an array or from one number for all. The field is then their maximum."""
    layers = f.integer("block_count", 1, MAX_LAYERS)
    given = f.get(name)
    numbers = given if isinstance(given, list) else [given] * layers
    if len(numbers) != layers or not all(type(n) is int and 0 <= n <= most for n in numbers):
        raise ModelFileError(f"{f.where}: {name} is {given!r:.80}", f"expected {layers} numbers, at most {most}")
    f.values = {**f.values, name: max(numbers)}
    return numbers


def _attends(f: Fields) -> list[bool]:
    """Which layers have keys and values."""
    heads = _per_layer(f, "attention.head_count_kv", MAX_HEADS)
    if not any(heads):
        f.values = {**f.values, "attention.head_count_kv": 1}
    return [count > 0 for count in heads]


def _mamba2(f: Fields, shapes: Shapes, names: tuple[str, str, str, str, str]) -> Config:
    """The sizes of Mamba 2 under the names of heads, channels of a head, groups, state and taps."""
    heads, inner = f.integer("ssm.time_step_rank", 1, MAX_HEADS), f.integer("ssm.inner_size", 1, MAX_WIDTH)
    if inner % heads:
        raise ModelFileError(f"{f.where}: ssm.inner_size is {inner}", f"expected a multiple of {heads} heads")
    sizes = (
        heads,
        inner // heads,
        f.integer("ssm.group_count", 1, MAX_HEADS, 1),
        f.integer("ssm.state_size", 1, MAX_WIDTH),
        f.integer("ssm.conv_kernel", 1, MAX_WIDTH),
    )
    return dict(zip(names, sizes, strict=True))


_PREFIXED = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _expand(f: Fields, width: int) -> int:
    inner = f.integer("ssm.inner_size", 1, MAX_WIDTH)
    if inner % width:
        raise ModelFileError(f"{f.where}: ssm.inner_size is {inner}", f"expected a multiple of the width, {width}")
    return inner // width


def _bamba(f: Fields, shapes: Shapes, attends: list[bool]) -> Config:
    """Granite's architecture without its multipliers."""
    config = read_decoder(f, shapes, partial=True)
    return config | _mamba2(f, shapes, _PREFIXED) | {
        "model_type": "bamba",
        "attn_layer_indices": [i for i, attention in enumerate(attends) if attention],
        "mamba_expand": _expand(f, config["hidden_size"]),
        "mamba_conv_bias": _biased(shapes, "ssm_conv1d"),
        "mamba_proj_bias": _biased(shapes, "ssm_in"),
        "attention_bias": _biased(shapes, "attn_q"),
        "mlp_bias": _biased(shapes, "ffn_up"),
    }  # fmt: skip


def _granite_hybrid(f: Fields, architecture: str, shapes: Shapes) -> Config:
    attends = _attends(f)
    rotates = f.flag("rope.scaling.finetuned", False)
    if rotates and f.get("embedding_scale") is None and not all(attends):
        return _bamba(f, shapes, attends)
    experts = f.integer("expert_count", 0, MAX_EXPERTS, 0)
    shared = "ffn_gate_shexp" if experts else "ffn_gate"
    scales = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    config = read_decoder(f, shapes)
    config |= {name: f.number(key, 0.0, 1e6, 1.0) for name, key in scales.items()}
    f.get("expert_shared_feed_forward_length")  # the matrices have it
    return config | _mamba2(f, shapes, _PREFIXED) | {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if attention else "mamba" for attention in attends],
        "position_embedding_type": "rope" if rotates else "nope",
        "mamba_expand": _expand(f, config["hidden_size"]),
        "mamba_conv_bias": _biased(shapes, "ssm_conv1d"),
        "mamba_proj_bias": _biased(shapes, "ssm_in"),
        "attention_bias": _biased(shapes, "attn_q"),
        "shared_intermediate_size": rows_of(shapes, f"blk.0.{shared}.weight"),
        "num_local_experts": experts,
        "num_experts_per_tok": f.integer("expert_used_count", 0, MAX_EXPERTS, 0),
    }  # fmt: skip


_NEMOTRON_SCAN = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def _nemotron_h(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The file's last block may be that for multi-token prediction."""
    attends, inner = _attends(f), _per_layer(f, "feed_forward_length", MAX_WIDTH)
    drafting = f.integer("nextn_predict_layers", 0, len(attends) - 1, 0)
    mlp = "moe" if architecture == "nemotron_h_moe" else "mlp"
    if not any(inner):
        f.values = {**f.values, "feed_forward_length": 1}
    kinds = ["attention" if a else mlp if i else "mamba" for a, i in zip(attends, inner, strict=True)]
    config = read_decoder(f, shapes, partial=True)
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    config = config | _mamba2(f, shapes, _NEMOTRON_SCAN) | {
        "model_type": "nemotron_h",
        "layers_block_type": kinds[: len(kinds) - drafting],
        "num_nextn_predict_layers": drafting,
        "use_conv_bias": _biased(shapes, "ssm_conv1d"),
        "use_bias": _biased(shapes, "ssm_in"),
        "mlp_bias": any(_biased(shapes, name) for name in ("ffn_up", "ffn_up_shexp", "ffn_latent_down")),
    }  # fmt: skip
    if mlp == "mlp":
        return config
    f.expect("expert_gating_func", 2)
    f.get("expert_shared_count")  # their common width is in the file, too
    return config | {
        "n_routed_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "moe_shared_expert_intermediate_size": f.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH),
        "moe_latent_size": f.integer("moe_latent_size", 0, MAX_WIDTH, 0) or None,
        "norm_topk_prob": f.flag("expert_weights_norm", True),
        "routed_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "n_group": f.integer("expert_group_count", 1, MAX_EXPERTS, 1),
        "topk_group": f.integer("expert_group_used_count", 1, MAX_EXPERTS, 1),
    }


def _falcon_h1(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The converter multiplies the weights by all multipliers."""
    config = read_decoder(f, shapes)
    return config | _mamba2(f, shapes, _PREFIXED) | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": f.integer("ssm.inner_size", 1, MAX_WIDTH),
        "mamba_conv_bias": _biased(shapes, "ssm_conv1d"),
        "mamba_proj_bias": _biased(shapes, "ssm_in"),
        "projectors_bias": _biased(shapes, "ssm_out"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in shapes,
        "mamba_norm_before_gate": False,
        "attention_bias": _biased(shapes, "attn_q"),
        "mlp_bias": _biased(shapes, "ffn_up"),
    }  # fmt: skip


def _recurring(flags: list[bool], where: str) -> tuple[int, int]:
    """The period and offset of the layers that are set."""
    places = [i for i, flag in enumerate(flags) if flag]
    first, count = (places or [len(flags)])[0], len(flags)
    period = places[1] - places[0] if len(places) > 1 else count + 1
    if [i % period == first for i in range(count)] != flags:
        raise ModelFileError(f"{where}: the layers {places} do not recur with a period", "Jamba's layers do")
    return period, first


def _jamba(f: Fields, architecture: str, shapes: Shapes) -> Config:
    attends = _attends(f)
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in shapes for i in range(len(attends))]
    attn_period, attn_offset = _recurring(attends, f.where)
    expert_period, expert_offset = _recurring(sparse, f.where)
    config = read_decoder(f, shapes)
    experts = read_expert_counts(f)
    return config | {
        "model_type": "jamba",
        "attn_layer_period": attn_period,
        "attn_layer_offset": attn_offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": experts["num_local_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "mamba_expand": _expand(f, config["hidden_size"]),
        "mamba_d_state": f.integer("ssm.state_size", 1, MAX_WIDTH),
        "mamba_d_conv": f.integer("ssm.conv_kernel", 1, MAX_WIDTH),
        "mamba_dt_rank": f.integer("ssm.time_step_rank", 1, MAX_WIDTH),
        "mamba_conv_bias": _biased(shapes, "ssm_conv1d"),
        "mamba_proj_bias": _biased(shapes, "ssm_in"),
    }


def _alone(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """Models of Mamba layers alone."""
    for unused in ("attention.head_count", "feed_forward_length", "context_length"):
        f.get(unused)
    width = f.integer("embedding_length", 1, MAX_WIDTH)
    eps = f.number("attention.layer_norm_rms_epsilon", 0.0, 1.0)
    config = {
        "vocab_size": read_vocab_size(f, shapes),
        "hidden_size": width,
        "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
        "layer_norm_epsilon": eps,
        "expand": _expand(f, width),
        "use_bias": _biased(shapes, "ssm_in"),
        "use_conv_bias": _biased(shapes, "ssm_conv1d"),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if architecture == "mamba2":
        sizes = _mamba2(f, shapes, ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"))
        return config | sizes | {"model_type": "mamba2"}
    normalised = f.flag("ssm.dt_b_c_rms", False)
    norms = {"mixer_rms_eps": eps} if normalised else {}  # llama.cpp has one epsilon for all
    return config | norms | {
        "model_type": "falcon_mamba" if normalised else "mamba",
        "state_size": f.integer("ssm.state_size", 1, MAX_WIDTH),
        "conv_kernel": f.integer("ssm.conv_kernel", 1, MAX_WIDTH),
        "time_step_rank": f.integer("ssm.time_step_rank", 1, MAX_WIDTH),
    }  # fmt: skip


READERS = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "mamba": _alone,
    "mamba2": _alone,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
