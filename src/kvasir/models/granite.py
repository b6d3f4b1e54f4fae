"""Granite (arXiv:2405.04324), dense and with experts: a Llama with multipliers of the embeddings, the scores, the
residuals and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Entry, Take
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts


@dataclass(frozen=True, slots=True)
class GraniteConfig(DecoderConfig):
    """The sizes and settings of a Granite."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        settings = {**read_multipliers(f), "mlp_bias": f.flag("mlp_bias", False)}
        f.finish()
        return cls(**sizes, **settings, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias)


def read_multipliers(f: Fields) -> dict[str, float]:
    """Granite's multipliers, as keyword arguments of `DecoderConfig`."""
    return {
        "embed_scale": f.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        "attn_scale": f.number("attention_multiplier", 1e-6, 1e6, 1.0),
        "residual_scale": f.number("residual_multiplier", 1e-6, 1e6, 1.0),
        "logit_scale": 1.0 / f.number("logits_scaling", 1e-6, 1e6, 1.0),
    }


class Granite(Llama):
    """A Llama with the multipliers of its config."""

    Config = GraniteConfig


@dataclass(frozen=True, slots=True)
class GraniteMoeConfig(MixtralConfig):
    """The sizes and settings of a Granite with experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteMoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        num_experts, top_k = read_experts(f, num_experts=8, top_k=2)
        settings = {**read_multipliers(f), "shared_inner": f.integer("shared_intermediate_size", 0, MAX_WIDTH, 0)}
        f.finish()
        layers = sizes["num_layers"]
        return cls(
            **sizes,
            **settings,
            windows=(0,) * layers,
            sparse=(True,) * layers,
            num_experts=num_experts,
            routing=Routing(top_k),
            expert_inner=sizes["inner"],
            qkv_bias=bias,
            out_bias=bias,
        )


class GraniteMoe(Mixtral):
    """A Mixtral with Granite's multipliers, and a shared expert if the config has one."""

    Config = GraniteMoeConfig

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the names that `ExpertsView` gives to the experts' tensors. The gate
        and up of the shared expert are rows of one tensor, in GGUF files tensors of their own."""
        layer, inner = "model.layers.*.", self.config.shared_inner
        both, parts = layer + "shared_mlp.input_linear", {"gate": (0, inner), "up": (inner, 2 * inner)}
        return {
            **super().names(),
            **expert_names(layer + "block_sparse_moe."),
            "layers.*.mlp.router": layer + "block_sparse_moe.router.layer",
            **{
                f"layers.*.mlp.shared.gate_up.{part}": (Take(both, rows), f"{layer}shared_mlp.{part}_proj")
                for part, rows in parts.items()
            },
            "layers.*.mlp.shared.down": (layer + "shared_mlp.output_linear", layer + "shared_mlp.down_proj"),
        }
