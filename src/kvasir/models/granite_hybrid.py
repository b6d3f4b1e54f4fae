"""Granite 4: Granite's multipliers, Mamba 2 in place of most layers' attention, and mixtures of experts beside a shared
MLP, or only the latter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.attention import Attention
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Take
from kvasir.layers.moe import MoE, Routing
from kvasir.layers.ssm import Mamba2
from kvasir.models.config import MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.granite import GraniteMoe, GraniteMoeConfig, read_multipliers
from kvasir.models.mixtral import read_experts
from kvasir.models.state_spaces import Mamba2Settings, mamba2_names, read_mamba2, read_mamba_layers

_POSITIONS = ("rope", "nope")


@dataclass(frozen=True, slots=True)
class GraniteHybridConfig(GraniteMoeConfig):
    """The sizes and settings of a Granite 4. recurrent: per layer, whether it is a Mamba 2, with the settings `mamba`,
    None if no layer is."""

    recurrent: tuple[bool, ...] = ()
    mamba: Mamba2Settings | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteHybridConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        layers = sizes["num_layers"]
        num_experts, top_k = 0, 1
        if f.get("num_local_experts") == 0:
            read_experts(Fields({}), num_experts=1, top_k=1)
            f.get("num_experts_per_tok")
            f.get("router_aux_loss_coef")
            f.get("output_router_logits")
        else:
            num_experts, top_k = read_experts(f, num_experts=8, top_k=2)
        rotates = f.choice("position_embedding_type", _POSITIONS, "nope") == "rope"
        f.expect("normalization_function", "rmsnorm")
        recurrent, mamba = read_mamba_layers(f, layers), read_mamba2(f, sizes["width"])
        settings = {
            **read_multipliers(f),
            "shared_inner": f.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024),
            "rotates": (rotates,) * layers,
            "recurrent": recurrent,
            "mamba": mamba if any(recurrent) else None,
        }
        f.finish()
        return cls(
            **sizes,
            **settings,
            windows=(0,) * layers,
            sparse=(num_experts > 0,) * layers,
            num_experts=num_experts,
            routing=Routing(top_k),
            expert_inner=sizes["inner"],
            qkv_bias=bias,
            out_bias=bias,
        )


class GraniteHybrid(GraniteMoe):
    """A Granite whose recurrent layers have a Mamba 2 instead of attention."""

    Config = GraniteHybridConfig
    config: GraniteHybridConfig

    def _mixer(self, layer: int, c: Any) -> Attention | Mamba2:
        if c.recurrent[layer]:
            return c.mamba.layer(layer, c.width, c.norm_eps)
        return Attention(layer, c.width, c.heads, c.kv_heads, c.head_dim, **self._attention_options(layer, c))

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MoE:
        return super()._mlp(layer, c) if c.sparse[layer] else GatedMLP(c.width, c.shared_inner, c.act)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `GraniteMoe.names`, with the Mamba 2 layers."""
        layer, inner = "model.layers.*.", self.config.shared_inner
        shared = layer + "shared_mlp."
        joint, gate_ups = shared + "input_linear", ("layers.*.mlp.gate_up", "layers.*.mlp.shared.gate_up")
        return {
            **super().names(),
            **{f"{ours}.gate": (Take(joint, (0, inner)), shared + "gate_proj") for ours in gate_ups},
            **{f"{ours}.up": (Take(joint, (inner, 2 * inner)), shared + "up_proj") for ours in gate_ups},
            "layers.*.mlp.down": shared + "output_linear",
            **mamba2_names(layer, "layers.*.attn", self.config.mamba, "mamba"),
            "layers.*.attn.out": (layer + "self_attn.o_proj", layer + "mamba.out_proj"),
        }
