"""Falcon (arXiv:2311.16867): LayerNorms, attention and MLP in parallel, few heads of keys and values, and one matrix
for queries, keys and values, grouped by head of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry
from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.models.config import MAX_HEADS, MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes, runs
from kvasir.models.llama import Llama

_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "activation": "gelu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
_OLD = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}


@dataclass(frozen=True, slots=True)
class FalconConfig(DecoderConfig):
    """The sizes and settings of a Falcon. norms_in_parallel: how many norms read a block's input if attention and the
    MLP are in parallel, else 0."""

    norms_in_parallel: int = 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> FalconConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        old = {new: config[name] for name, new in _OLD.items() if config.get(name) is not None}
        f = Fields({**_DEFAULTS, **old, **config})
        for name in _OLD:
            f.get(name)
        f.expect("alibi", False)
        f.expect("apply_residual_connection_post_layernorm", False)
        width, heads = f.integer("hidden_size", 1, MAX_WIDTH), f.integer("num_attention_heads", 1, MAX_HEADS)
        kv_heads = f.integer("num_kv_heads", 1, MAX_HEADS, heads)
        grouped, few = f.flag("new_decoder_architecture", False), f.flag("multi_query", True)
        f.values = {
            **f.values,
            "intermediate_size": f.integer("ffn_hidden_size", 1, MAX_WIDTH, 4 * width),
            "num_key_value_heads": 1 if few and not grouped else kv_heads,
        }
        sizes = read_sizes(f, act="activation", eps="layer_norm_epsilon")
        parallel = f.flag("parallel_attn", True)
        if grouped:
            f.expect("parallel_attn", True)
        norms, bias = f.integer("num_ln_in_parallel_attn", 1, 2, 2 if grouped else 1), f.flag("bias", False)
        if not grouped:
            f.expect("num_ln_in_parallel_attn", 1)
        f.finish()
        return cls(
            **sizes,
            windows=(0,) * sizes["num_layers"],
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            norms_in_parallel=norms if parallel else 0,
        )


class Falcon(Llama):
    """A Llama with LayerNorms and MLPs that are not gated."""

    Config = FalconConfig
    config: FalconConfig
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
    prefix: ClassVar[str] = "transformer."

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        block = super()._block(layer, c)
        block.parallel = c.norms_in_parallel > 0
        if c.norms_in_parallel == 1:
            block.mlp_norm = None
        return block

    def _mlp(self, layer: int, c: Any) -> MLP:
        return MLP(c.width, c.inner, c.act, c.mlp_bias)

    def names(self) -> Mapping[str, Entry]:
        """The name table, as in `Decoder.names`. In GGUF files the MLP's norm has the name of a single one."""
        c, layer = self.config, "transformer.h.*."
        parts = " ".join(f"layers.*.attn.qkv.{part}" for part in "qkv")
        sizes = (c.heads // c.kv_heads * c.head_dim, c.head_dim, c.head_dim)
        two, single = c.norms_in_parallel == 2, layer + "input_layernorm"
        after: Entry = layer + "post_attention_layernorm"
        return {
            "embed": ("transformer.word_embeddings", "lm_head") if c.tied else "transformer.word_embeddings",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            **runs(parts, layer + "self_attention.query_key_value", sizes),
            "layers.*.attn.out": layer + "self_attention.dense",
            "layers.*.attn_norm": layer + "ln_attn" if two else single,
            "layers.*.mlp_norm": (layer + "ln_mlp", single) if two else after,
            "layers.*.mlp.up": layer + "mlp.dense_h_to_4h",
            "layers.*.mlp.down": layer + "mlp.dense_4h_to_h",
        }
