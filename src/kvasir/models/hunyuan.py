"""Hunyuan, dense and with experts: a Llama with heads that are normalised after their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.elementary import power
from kvasir.layers.module import Entry
from kvasir.layers.moe import EXPERT_ACTIVATIONS, Routing
from kvasir.models.config import MAX_EXPERTS, MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names

_DEFAULTS = {"rms_norm_eps": 1e-5}
_HEAD_NORMS = {
    "layers.*.attn.q_norm": "model.layers.*.self_attn.query_layernorm",
    "layers.*.attn.k_norm": "model.layers.*.self_attn.key_layernorm",
}


@dataclass(frozen=True, slots=True)
class HunyuanDenseConfig(DecoderConfig):
    """The sizes and settings of a dense Hunyuan."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> HunyuanDenseConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f, sizes = _read(config)
        f.finish()
        return cls(**sizes)


def _read(config: Mapping[str, Any]) -> tuple[Fields, dict[str, Any]]:
    """The fields that both kinds share, as keyword arguments of `DecoderConfig`."""
    rope, alpha = _split_alpha(config)
    f = Fields({**_DEFAULTS, **config, **rope})
    sizes, bias = read_sizes(f), f.flag("attention_bias", False)
    dim = sizes["rotary_dim"]
    sizes["rope_theta"] *= power(alpha, dim, dim - 2) if alpha != 1.0 else 1.0
    f.expect("use_qk_norm", True)
    f.expect("use_cla", False)
    f.expect("mlp_bias", False)
    for name in ("attention_head_dim", "cla_share_factor", "add_classification_head", "class_num"):
        f.get(name)  # transformers does not read them
    biases = {"qkv_bias": bias, "out_bias": bias}
    return f, {**sizes, **biases, "windows": (0,) * sizes["num_layers"], "head_norm": True}


def _split_alpha(config: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The rope settings without `alpha`, which with the kind "dynamic" is a constant factor of the wavelengths: the
    base is multiplied by alpha^(d / (d - 2)) at every length."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name)
    if not isinstance(given, Mapping) or not given.get("alpha"):
        return {}, 1.0
    f = Fields(given, f"config.json: {name}")
    alpha = f.number("alpha", 1.0, 1e9)
    if (f.get("rope_type") or f.get("type")) != "dynamic":
        raise ModelFileError(f"{f.where}: alpha is {alpha:g}", 'expected it with the kind "dynamic" alone')
    for ignored in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        f.get(ignored)  # this kind does not use them
    theta = {"rope_theta": f.get("rope_theta")} if f.get("rope_theta") is not None else {}
    return {name: {"rope_type": "default", **theta}}, alpha


class HunyuanDense(Llama):
    """A Llama with head norms after the rotary embedding."""

    Config = HunyuanDenseConfig

    def _attention_options(self, layer: int, c: Any) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "norm_after_rope": True}

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the names of the head norms."""
        return {**super().names(), **_HEAD_NORMS}


@dataclass(frozen=True, slots=True)
class HunyuanMoeConfig(MixtralConfig):
    """The sizes and settings of a Hunyuan with experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> HunyuanMoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f, sizes = _read(config)
        for training in ("moe_drop_tokens", "moe_random_routing_dropped_token", "output_router_logits"):
            f.get(training)
        f.choice("hidden_act", EXPERT_ACTIVATIONS, "silu")
        f.expect("use_mixed_mlp_moe", True)
        f.expect("use_mla", False)
        f.expect("norm_topk_prob", True)
        f.expect("moe_layer_num_skipped", 0)
        f.expect("routed_scaling_factor", 1.0)
        layers, inner = sizes["num_layers"], sizes["inner"]
        _same(f, "num_shared_expert", layers, 1, 1)
        experts, top_k = _same(f, "num_experts", layers, MAX_EXPERTS), _same(f, "moe_topk", layers, MAX_EXPERTS)
        if _same(f, "moe_intermediate_size", layers, MAX_WIDTH, inner) != inner or top_k > experts:
            raise ModelFileError(
                f"{f.where}: {top_k} of {experts} experts with inner widths other than intermediate_size",
                f"expected {inner} for all, and at most as many as there are",
            )
        f.finish()
        routing = Routing(top_k)
        return cls(
            **sizes,
            num_experts=experts,
            routing=routing,
            expert_inner=inner,
            shared_inner=inner,
            sparse=(True,) * layers,
        )


def _same(f: Fields, name: str, layers: int, greatest: int, default: int | None = None) -> int:
    """An integer field, or one whose list has the same integer for every layer."""
    values = f.get(name)
    if isinstance(values, list) and len(values) == layers and len(set(map(repr, values))) == 1:
        f.values = {**f.values, name: values[0]}
    return f.integer(name, 1, greatest) if default is None else f.integer(name, 1, greatest, default)


class HunyuanMoe(Mixtral):
    """A dense Hunyuan whose MLPs are mixtures with a shared expert."""

    Config = HunyuanMoeConfig

    def _attention_options(self, layer: int, c: Any) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "norm_after_rope": True}

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with the names of the head norms, the router and the experts."""
        mlp = "model.layers.*.mlp."
        return {
            **super().names(),
            **_HEAD_NORMS,
            **expert_names(mlp, "shared_mlp"),
            "layers.*.mlp.router": mlp + "gate.wg",
        }
