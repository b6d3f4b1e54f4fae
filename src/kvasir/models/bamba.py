"""Bamba: a Llama with Mamba 2 in place of most layers' attention, and rotary embeddings in half of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.block import Mixer
from kvasir.layers.module import Entry
from kvasir.models.config import MAX_LAYERS, Fields, inner_object
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.state_spaces import Mamba2Settings, mamba2_names, read_mamba2

_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}


@dataclass(frozen=True, slots=True)
class BambaConfig(DecoderConfig):
    """The sizes and settings of a Bamba. recurrent: per layer, whether it is a Mamba 2, with the settings `mamba`."""

    recurrent: tuple[bool, ...] = ()
    mamba: Mamba2Settings | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BambaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        named = {**config, **inner_object(config, "rope_parameters")}
        share = {} if "partial_rotary_factor" in named else {"partial_rotary_factor": 0.5}
        f = Fields({**_DEFAULTS, **share, **config})
        sizes = read_sizes(f, kv_heads=8, partial=True)
        if f.integer("attn_rotary_emb", 2, 1024, sizes["rotary_dim"]) != sizes["rotary_dim"]:
            raise ModelFileError(f"{f.where}: attn_rotary_emb is {f.get('attn_rotary_emb')}",
                                 f"the rope's fields rotate {sizes['rotary_dim']} dimensions")  # fmt: skip
        layers, bias = sizes["num_layers"], f.flag("attention_bias", False)
        attends = f.get("attn_layer_indices") or []
        if not isinstance(attends, list) or not all(type(i) is int and 0 <= i < MAX_LAYERS for i in attends):
            raise ModelFileError(f"{f.where}: attn_layer_indices is {attends!r:.80}", "expected a list of layers")
        f.get("layers_block_type")  # follows from the indices
        for unused in ("num_logits_to_keep", "z_loss_coefficient"):
            f.get(unused)
        mamba, mlp_bias = read_mamba2(f, sizes["width"]), f.flag("mlp_bias", False)
        f.finish()
        return cls(
            **sizes,
            recurrent=tuple(i not in attends for i in range(layers)),
            mamba=mamba,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=mlp_bias,
            windows=(0,) * layers,
        )


class Bamba(Llama):
    """A Llama whose recurrent layers have a Mamba 2 instead of attention."""

    Config = BambaConfig
    config: BambaConfig

    def _mixer(self, layer: int, c: Any) -> Mixer:
        if c.recurrent[layer]:
            return c.mamba.layer(layer, c.width, c.norm_eps)
        return super()._mixer(layer, c)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the Mamba 2 layers. GGUF files are read under Granite 4's names."""
        layer = "model.layers.*."
        own, granite = layer + "feed_forward.", layer + "shared_mlp."
        return {
            **super().names(),
            "norm": ("model.final_layernorm", "model.norm"),
            "layers.*.mlp_norm": (layer + "pre_ff_layernorm", layer + "post_attention_layernorm"),
            **{
                f"layers.*.mlp.gate_up.{part}": (f"{own}{part}_proj", f"{granite}{part}_proj")
                for part in ("gate", "up")
            },
            "layers.*.mlp.down": (own + "down_proj", granite + "output_linear"),
            **mamba2_names(layer, "layers.*.attn", self.config.mamba, "mamba"),
            "layers.*.attn.out": (layer + "self_attn.o_proj", layer + "mamba.out_proj"),
        }
