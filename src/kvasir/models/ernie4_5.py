"""ERNIE 4.5, dense and with experts: a Llama whose rotary embedding turns neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Vector
from kvasir.layers.moe import EXPERT_ACTIVATIONS, MoE, Routing
from kvasir.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.glm4_moe import Glm4Moe
from kvasir.models.llama import Llama
from kvasir.models.mixtral import MixtralConfig
from kvasir.models.rope import halves

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class Ernie45Config(DecoderConfig):
    """The sizes and settings of an ERNIE 4.5."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Ernie45Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, kv_heads=2, head_dim=128), f.flag("use_bias", False)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias, mlp_bias=bias)


class Ernie45(Llama):
    """A Llama with the biases of its config."""

    Config = Ernie45Config

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the rows of q and k in the order of our rotary embedding."""
        c = self.config
        return {**super().names(), **halves("model.layers.*.self_attn.", c.head_dim, c.rotary_dim)}


@dataclass(frozen=True, slots=True)
class Ernie45MoeConfig(MixtralConfig):
    """The sizes and settings of an ERNIE 4.5 with experts. drafting: its layers for multi-token prediction, which are
    not loaded."""

    drafting: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Ernie45MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=4)
        layers = sizes["num_layers"]
        for training in ("moe_capacity", "router_aux_loss_coef", "output_router_logits"):
            f.get(training)
        f.expect("use_bias", False)
        f.expect("moe_gate", "topk")
        f.expect("moe_use_aux_free", True)
        f.choice("hidden_act", EXPERT_ACTIVATIONS, "silu")
        inner = f.integer("moe_intermediate_size", 1, MAX_WIDTH, 1536)
        experts, top_k = f.integer("moe_num_experts", 1, MAX_EXPERTS, 64), f.integer("moe_k", 1, MAX_EXPERTS, 6)
        if top_k > experts:
            raise ModelFileError(f"{f.where}: moe_k is {top_k}", f"there are {experts} experts")
        f.number("moe_norm_min", 0.0, 1.0 / experts, 1e-12)  # at most the sum of the weights, so without effect
        settings: dict[str, Any] = {
            "shared_inner": inner * f.integer("moe_num_shared_experts", 0, MAX_EXPERTS, 2),
            "sparse": _sparse_layers(f, layers),
            "drafting": f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0),
        }
        f.finish()
        return cls(
            **sizes,
            **settings,
            windows=(0,) * layers,
            num_experts=experts,
            routing=Routing(top_k),
            expert_inner=inner,
        )


def _sparse_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    first = f.integer("moe_layer_start_index", 0, MAX_LAYERS, 1)
    last = f.integer("moe_layer_end_index", -1, MAX_LAYERS, -1)
    period = f.integer("moe_layer_interval", 1, MAX_LAYERS, 1)
    last = layers if last == -1 else last
    return tuple(first <= i <= last and (i + 1) % period == 0 for i in range(layers))


class Ernie45Moe(Glm4Moe):
    """An ERNIE 4.5 whose sparse layers have a mixture with a shared expert."""

    Config = Ernie45MoeConfig

    @property
    def drafting(self) -> None:
        """None: the layers for multi-token prediction have other names and parts, and are not read."""
        return None

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MoE:
        mlp = super()._mlp(layer, c)
        if isinstance(mlp, MoE):
            mlp.selection = Vector(c.num_experts, self.selection, (1, c.num_experts))
        return mlp

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Glm4Moe.names`, with the rows of q and k in the order of our rotary embedding."""
        c, layer = self.config, "model.layers.*."
        return {
            **super().names(),
            **halves(layer + "self_attn.", c.head_dim, c.rotary_dim),
            "layers.*.mlp.selection": layer + "mlp.moe_statics",
        }
