"""GPT-NeoX and Pythia (arXiv:2204.06745, arXiv:2304.01373): LayerNorms, biases, attention and MLP in parallel, and one
matrix for queries, keys and values, grouped by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry
from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes, runs
from kvasir.models.llama import Llama

_DEFAULTS = {"layer_norm_eps": 1e-5, "hidden_act": "gelu"}


@dataclass(frozen=True, slots=True)
class GPTNeoXConfig(DecoderConfig):
    """The sizes and settings of a GPT-NeoX. parallel: whether the MLP reads the block's input."""

    parallel: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPTNeoXConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        old = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        names = {ours: config[theirs] for ours, theirs in old.items() if config.get(theirs) is not None}
        f = Fields({**_DEFAULTS, "partial_rotary_factor": 0.25, **names, **config})
        sizes = read_sizes(f, eps="layer_norm_eps", partial=True)
        parallel, bias = f.flag("use_parallel_residual", True), f.flag("attention_bias", True)
        for name in old.values():
            f.get(name)
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, mlp_bias=True, parallel=parallel)


class GPTNeoX(Llama):
    """A Llama with LayerNorms, MLPs that are not gated, and blocks in parallel."""

    Config = GPTNeoXConfig
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
    prefix: ClassVar[str] = "gpt_neox."

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, with the causal masks of old checkpoints."""
        return (*super().ignored, r"(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias")

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        block = super()._block(layer, c)
        block.parallel = c.parallel
        return block

    def _mlp(self, layer: int, c: Any) -> MLP:
        return MLP(c.width, c.inner, c.act, c.mlp_bias)

    def names(self) -> Mapping[str, Entry]:
        """The name table, as in `Decoder.names`."""
        layer, dim = "gpt_neox.layers.*.", self.config.head_dim
        parts = " ".join(f"layers.*.attn.qkv.{part}" for part in "qkv")
        return {
            "embed": ("gpt_neox.embed_in", "embed_out") if self.config.tied else "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": ("embed_out", "lm_head"),
            **runs(parts, layer + "attention.query_key_value", (dim, dim, dim)),
            "layers.*.attn.out": layer + "attention.dense",
            "layers.*.attn_norm": layer + "input_layernorm",
            "layers.*.mlp_norm": layer + "post_attention_layernorm",
            "layers.*.mlp.up": layer + "mlp.dense_h_to_4h",
            "layers.*.mlp.down": layer + "mlp.dense_4h_to_h",
        }
