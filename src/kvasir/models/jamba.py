"""Jamba (arXiv:2403.19887): Mamba in place of most layers' attention, which has no positions; MLPs and mixtures of
experts alternate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.attention import Attention
from kvasir.layers.block import Mixer
from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_LAYERS, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.mamba import Mamba1Settings, mamba1_names, read_mamba1
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts

_DEFAULTS = {"max_position_embeddings": 262144, "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336,
             "num_hidden_layers": 32, "num_attention_heads": 32}  # fmt: skip


@dataclass(frozen=True, slots=True)
class JambaConfig(MixtralConfig):
    """The sizes and settings of a Jamba. recurrent: per layer, whether it is a Mamba, with the settings `mamba`."""

    recurrent: tuple[bool, ...] = ()
    mamba: Mamba1Settings | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> JambaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=8)
        num_experts, top_k = read_experts(f, num_experts=16, top_k=2)
        layers = sizes["num_layers"]
        mamba = read_mamba1(
            f, inner=f.integer("mamba_expand", 1, 64, 2) * sizes["width"], width=sizes["width"], dim="mamba_d_state",
            rank="mamba_dt_rank", taps="mamba_d_conv", conv_bias="mamba_conv_bias", bias="mamba_proj_bias",
            eps=sizes["norm_eps"],
        )  # fmt: skip
        attends, sparse = _every(f, "attn_layer", layers, 8, 4), _every(f, "expert_layer", layers, 2, 1)
        f.expect("sliding_window", None)
        f.expect("mamba_inner_layernorms", True)
        for unused in ("use_associative_scan", "use_mamba_kernels", "use_mambapy", "num_logits_to_keep"):
            f.get(unused)
        f.finish()
        return cls(
            **sizes,
            num_experts=num_experts,
            routing=Routing(top_k, normalise=False),
            expert_inner=sizes["inner"],
            sparse=tuple(s and num_experts > 1 for s in sparse),
            recurrent=tuple(not attention for attention in attends),
            mamba=mamba,
            windows=(0,) * layers,
        )


def _every(f: Fields, name: str, layers: int, period: int, offset: int) -> tuple[bool, ...]:
    """Per layer, whether it is one of those that recur with a period, from an offset on."""
    period = f.integer(f"{name}_period", 1, MAX_LAYERS, period)
    offset = f.integer(f"{name}_offset", 0, MAX_LAYERS, offset)
    if offset >= period:
        raise ModelFileError(f"{f.where}: {name}_offset is {offset}", f"expected less than {name}_period, {period}")
    return tuple(i % period == offset for i in range(layers))


class Jamba(Mixtral):
    """A Mixtral whose recurrent layers have a Mamba instead of attention."""

    Config = JambaConfig
    config: JambaConfig

    def _mixer(self, layer: int, c: Any) -> Mixer:
        if c.recurrent[layer]:
            return c.mamba.layer(layer, c.width)
        return Attention(layer, c.width, c.heads, c.kv_heads, c.head_dim)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the Mamba layers and the experts."""
        layer = "model.layers.*."
        mlp = layer + "feed_forward."
        return {
            **super().names(),
            **expert_names(mlp),
            "norm": "model.final_layernorm",
            "layers.*.mlp_norm": layer + "pre_ff_layernorm",
            "layers.*.mlp.router": mlp + "router",
            **{f"layers.*.mlp.gate_up.{part}": f"{mlp}{part}_proj" for part in ("gate", "up")},
            "layers.*.mlp.down": mlp + "down_proj",
            **mamba1_names(layer + "mamba", self.config.mamba),
            "layers.*.attn.out": (layer + "self_attn.o_proj", layer + "mamba.out_proj"),
        }
