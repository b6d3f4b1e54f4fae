"""RWKV-7 "Goose" (arXiv:2503.14456), as flash-linear-attention writes its checkpoints
(https://github.com/fla-org/flash-linear-attention). It has no context length; ours is llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.module import Entry, Module
from kvasir.layers.norm import LayerNorm, PlainLayerNorm
from kvasir.layers.rwkv import ChannelMix, TimeMix, WkvSizes
from kvasir.models.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

CONTEXT = 1 << 20
# What read_sizes asks for, of parts that these models do not have.
_ABSENT = {"num_attention_heads": 1, "head_dim": 2, "num_key_value_heads": 1, "hidden_act": None}
_DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "norm_eps": 1e-5, "head_dim": 64}
# Kernels of others. fuse_norm: whether norms are fused with other operations.
_UNUSED = ("attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "use_l2warp",
           "max_position_embeddings")  # fmt: skip
# The fields of the ranks, and the factors of the root of the width that they are derived from if absent.
_RANKS = {"w": ("decay_low_rank_dim", 2.5), "a": ("a_low_rank_dim", 2.5), "v": ("v_low_rank_dim", 1.7),
          "g": ("gate_low_rank_dim", 5.0)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rwkv7Config(DecoderConfig):
    """The sizes and settings of an RWKV-7.

    wkv: the sizes of the state. ranks: of the matrices that give the decay w, the rate a, the share v of the first
    layer's values, and the gate g. norm_bias: whether norms have a bias. norm_first: whether a norm follows the
    embedding.
    """

    wkv: WkvSizes = field(kw_only=True)
    ranks: Mapping[str, int] = field(kw_only=True)
    norm_bias: bool = True
    norm_first: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rwkv7Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}})
        if f.get("attn") is not None:
            raise UnsupportedModel(f"{f.where}: attn names layers with attention", "supported: RWKV-7 in every layer")
        sizes = _read_sizes(f)
        width, dim = sizes["width"], _read_head_dim(f, sizes["width"])
        settings = {
            "wkv": WkvSizes(width // dim, dim, dim * sizes["norm_eps"]),
            "ranks": {part: _read_rank(f, part, width, dim) for part in _RANKS},
            "norm_bias": f.flag("norm_bias", True),
            "norm_first": f.flag("norm_first", True),
        }
        f.choice("hidden_act", ("sqrelu",), "sqrelu")
        f.expect("value_dim", [width] * sizes["num_layers"])
        for name in _UNUSED:
            f.get(name)
        f.finish()
        return cls(**sizes, **settings, windows=(0,) * sizes["num_layers"])


def _read_sizes(f: Fields) -> dict[str, Any]:
    width, layers = f.integer("hidden_size", 1, MAX_WIDTH), f.integer("num_hidden_layers", 1, MAX_LAYERS)
    ratio = f.number("hidden_ratio", 0.001, MAX_WIDTH, 4.0)
    inner = f.integer("intermediate_size", 1, MAX_WIDTH, min(MAX_WIDTH, -(-int(width * ratio) // 32) * 32))
    own = {"intermediate_size": inner, "num_hidden_layers": layers, "max_position_embeddings": CONTEXT}
    inside = Fields({**f.values, **_ABSENT, **own}, f.where)
    sizes = read_sizes(inside, eps="norm_eps")
    f.read |= inside.read - {"hidden_act", "head_dim"}
    return sizes


def _read_head_dim(f: Fields, width: int) -> int:
    """A head's width; published files have a wrong number of heads beside it."""
    heads = f.integer("num_heads", 1, MAX_HEADS, 1)
    dim = f.integer("head_dim", 1, MAX_HEAD_DIM, max(1, width // heads))
    if width % dim:
        raise ModelFileError(f"{f.where}: heads of {dim} do not divide the hidden_size {width}")
    return dim


def _read_rank(f: Fields, part: str, width: int, dim: int) -> int:
    name, factor = _RANKS[part]
    share = 1.0 if part == "g" else dim / 64
    return f.integer(name, 1, MAX_WIDTH, max(32, round(factor * width**0.5 * share / 32) * 32))


class Rwkv7Layer(Module):
    """A block: x float32 [T, D], and the first layer's values, None in the first layer -> the same.

    pre_norm: a norm of the block's input, or None.
    """

    def __init__(
        self, pre_norm: LayerNorm | None, attn_norm: LayerNorm, attn: TimeMix, mlp_norm: LayerNorm, mlp: ChannelMix
    ):
        self.pre_norm, self.attn_norm, self.attn = pre_norm, attn_norm, attn
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x_TD: Tensor, first_TC: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x_TD = x_TD if self.pre_norm is None else self.pre_norm(x_TD)
        mixed_TD, values_TC = self.attn.mixed(self.attn_norm(x_TD), first_TC, batch)
        x_TD = x_TD + mixed_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD), batch), values_TC if first_TC is None else first_TC


class Rwkv7(Llama):
    """A decoder of RWKV-7 blocks."""

    Config = Rwkv7Config
    config: Rwkv7Config

    def _norm(self) -> Any:
        c = self.config
        return (LayerNorm if c.norm_bias else PlainLayerNorm)(c.width, c.norm_eps)

    def _block(self, layer: int, c: Any) -> Any:
        pre_norm = self._norm() if layer == 0 and c.norm_first else None
        time = TimeMix(layer, c.width, c.wkv, c.ranks, first=layer == 0)
        channel = ChannelMix(c.num_layers + layer, c.width, c.inner)
        return Rwkv7Layer(pre_norm, self._norm(), time, self._norm(), channel)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """Two caches per layer: those of the time mixes, layer by layer, then those of the channel mixes."""
        layers: list[Any] = self.layers
        return (*(layer.attn.cache() for layer in layers), *(layer.mlp.cache() for layer in layers))

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD, first_TC = self.embed(tokens_T), None
        layers: list[Any] = self.layers
        for i, layer in enumerate(layers):
            x_TD, first_TC = layer(x_TD, first_TC, batch)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the first layer's share of its own values, which some files have."""
        return (*super().ignored, r"model\.layers\.0\.attn\.v_lora\..*")

    def names(self) -> Mapping[str, Entry]:
        """The name table."""
        layer, attn = "model.layers.*.", "model.layers.*.attn."
        ranks = {"decay": "w", "rate": "a", "share": "v", "gate": "g"}
        return {
            "embed": ("model.embeddings", "lm_head") if self.config.tied else "model.embeddings",
            "norm": "model.norm",
            "head": "lm_head",
            "layers.*.pre_norm": layer + "pre_norm",
            "layers.*.attn_norm": layer + "attn_norm",
            "layers.*.mlp_norm": layer + "ffn_norm",
            "layers.*.attn": attn.removesuffix("."),
            "layers.*.attn.g_norm": attn + "g_norm",
            **{f"layers.*.attn.inputs.{part}": f"{attn}{part}_proj" for part in "rkv"},
            **{f"layers.*.attn.{path}.down": f"{attn}{part}_lora.lora.0" for path, part in ranks.items()},
            **{f"layers.*.attn.{path}.up": f"{attn}{part}_lora.lora.2" for path, part in ranks.items()},
            "layers.*.attn.out": attn + "o_proj",
            "layers.*.mlp": layer + "ffn",
            "layers.*.mlp.up": layer + "ffn.key",
            "layers.*.mlp.down": layer + "ffn.value",
            **self.pooler.names(),
        }
