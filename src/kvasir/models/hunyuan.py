"""Hunyuan, dense: a Llama with heads that are normalised after their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.elementary import power
from kvasir.layers.module import Take
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True)
class HunyuanDenseConfig(DecoderConfig):
    """The sizes and settings of a dense Hunyuan."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> HunyuanDenseConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
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
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias, head_norm=True)


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

    def names(self) -> Mapping[str, str | Take | tuple[str, ...]]:
        """The name table of `Decoder.names`, with the names of the head norms."""
        attn = "model.layers.*.self_attn."
        norms = {"layers.*.attn.q_norm": attn + "query_layernorm", "layers.*.attn.k_norm": attn + "key_layernorm"}
        return {**super().names(), **norms}
