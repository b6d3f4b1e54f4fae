"""LFM2 (arXiv:2511.23404): layers of gated short convolutions and, less often, of attention with normalised heads; with
MLPs or, after the first layers, mixtures of experts chosen by sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.block import Mixer
from kvasir.layers.convolution import ShortConvolution
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Take
from kvasir.layers.moe import MoE, Routing
from kvasir.models.config import MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, read_experts

_DEFAULTS = {"norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True}
_MAX_TAPS = 8  # of the kernel; a cache block has at least as many tokens
# Fields of the first published configs: settings of the training code, or copies of other fields.
_UNUSED = (
    *("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("conv_use_xavier_init", "theta"),
)


@dataclass(frozen=True, slots=True)
class Lfm2Config(MixtralConfig):
    """The sizes and settings of an LFM2.

    convolves: per layer, whether it is a short convolution instead of attention. taps: the length of the convolutions,
    in tokens. conv_bias: whether they and their projections have biases. biased_choice: whether a bias takes part in
    the choice of experts.
    """

    convolves: tuple[bool, ...] = ()
    taps: int = 0
    conv_bias: bool = False
    biased_choice: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = lfm2_fields(config, intermediate_size=12288)
        layers = f.integer("num_hidden_layers", 1, MAX_LAYERS)
        inner = adjusted_inner(f)
        sizes = read_sizes(f, kv_heads=8, eps="norm_eps") | {"inner": inner}
        settings = read_convolutions(f, layers)
        f.expect("block_use_swiglu", True)
        f.expect("use_pos_enc", True)
        for copy, value in {
            "block_dim": sizes["width"],
            "conv_dim": sizes["width"],
            "conv_dim_out": sizes["width"],
            "num_heads": sizes["heads"],
        }.items():
            f.expect(copy, value)
        f.finish()
        dense = {"sparse": (False,) * layers, "num_experts": 1, "expert_inner": 1}  # there are none
        return cls(**sizes, **settings, **dense, windows=(0,) * layers, head_norm=True)


def lfm2_fields(config: Mapping[str, Any], **defaults: Any) -> Fields:
    """The fields, with the old names replaced as in transformers. defaults: of the family, for absent fields."""
    values = {**_DEFAULTS, **defaults, **config}
    for old, new in {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}.items():
        if (given := values.pop(old, None)) is not None:
            values[new] = given
    f = Fields(values)
    for name in _UNUSED:
        f.get(name)
    return f


def adjusted_inner(f: Fields) -> int:
    """The inner width of the MLPs: with `block_auto_adjust_ff_dim`, two thirds of the config's, times a factor, rounded
    up to a multiple."""
    inner = f.integer("intermediate_size", 1, MAX_WIDTH)
    factor = f.number("block_ffn_dim_multiplier", 0.0, 64.0, 1.0)
    multiple = f.integer("block_multiple_of", 1, MAX_WIDTH, 256)
    if not f.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = 2 * inner // 3
    if "block_ffn_dim_multiplier" not in f.values or f.values["block_ffn_dim_multiplier"] is not None:
        inner = -(-int(factor * inner) // multiple) * multiple  # null: neither factor nor multiple, as in transformers
    if not 0 < inner <= MAX_WIDTH:
        raise ModelFileError(f"{f.where}: the inner width of the MLPs is {inner}", f"expected 1 to {MAX_WIDTH}")
    return inner


def read_convolutions(f: Fields, layers: int) -> dict[str, Any]:
    """The settings of the convolutions, and which layers these are: from `layer_types` or, without it, all layers that
    `full_attn_idxs` does not name."""
    kinds, indices = f.get("layer_types"), f.get("full_attn_idxs")
    if kinds is None:
        named = list(range(layers)) if indices is None else indices
        if not isinstance(named, list) or not all(type(i) is int and 0 <= i < layers for i in named):
            raise ModelFileError(f"{f.where}: full_attn_idxs is {indices!r:.80}", f"expected layers below {layers}")
        convolves = tuple(i not in named for i in range(layers))
    else:
        convolves = _convolves(f, kinds, layers)
    return {
        "convolves": convolves,
        "taps": f.integer("conv_L_cache", 1, _MAX_TAPS, 3),
        "conv_bias": f.flag("conv_bias", False),
    }


def _convolves(f: Fields, kinds: Any, layers: int) -> tuple[bool, ...]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(f"{f.where}: layer_types is {kinds!r:.80}", f"expected a list of {layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "conv"):
            raise UnsupportedModel(f"{f.where}: layer_types names {kind!r:.80}", "supported: full_attention, conv")
    return tuple(kind == "conv" for kind in kinds)


class Lfm2MoeConfig(Lfm2Config):
    """The sizes and settings of an LFM2 with experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = lfm2_fields(config, intermediate_size=7168)
        sizes = read_sizes(f, kv_heads=8, eps="norm_eps")
        layers = sizes["num_layers"]
        dense = f.integer("num_dense_layers", 0, MAX_LAYERS, 2)
        num_experts, top_k = read_experts(f, num_experts=32, top_k=4)
        routing = Routing(
            top_k,
            "sigmoid",
            normalise=f.flag("norm_topk_prob", True),
            scale=f.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
            epsilon=1e-6,
        )
        settings = {
            **read_convolutions(f, layers),
            "num_experts": num_experts,
            "routing": routing,
            "expert_inner": f.integer("moe_intermediate_size", 1, MAX_WIDTH, 1792),
            "sparse": tuple(i >= dense for i in range(layers)),
            "biased_choice": f.flag("use_expert_bias", True),
        }
        f.finish()
        return cls(**sizes, **settings, windows=(0,) * layers, head_norm=True)


class Lfm2(Mixtral):
    """A Llama whose convolutional layers have a gated short convolution instead of attention."""

    Config = Lfm2Config
    config: Lfm2Config

    def _mixer(self, layer: int, c: Lfm2Config) -> Mixer:
        if c.convolves[layer]:
            return ShortConvolution(layer, c.width, c.taps, c.conv_bias)
        return super()._mixer(layer, c)

    def _mlp(self, layer: int, c: Lfm2Config) -> GatedMLP | MoE:
        if not c.sparse[layer]:
            return GatedMLP(c.width, c.inner, c.act)
        selection = "expert_bias" if c.biased_choice else ""
        return MoE(c.width, c.expert_inner, c.num_experts, c.routing, act=c.act, selection=selection)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the tensors of the convolutions and the experts."""
        layer, width = "model.layers.*.", self.config.width
        attn, conv, mlp = layer + "self_attn.", layer + "conv.", layer + "feed_forward."
        parts = {"gate_up.gate": ("w1", "gate_proj"), "gate_up.up": ("w3", "up_proj"), "down": ("w2", "down_proj")}
        runs = {part: (i * width, (i + 1) * width) for i, part in enumerate("bcx")}
        return {
            **super().names(),
            "norm": "model.embedding_norm",
            "layers.*.attn_norm": layer + "operator_norm",
            "layers.*.mlp_norm": layer + "ffn_norm",
            "layers.*.attn.q_norm": attn + "q_layernorm",
            "layers.*.attn.k_norm": attn + "k_layernorm",
            "layers.*.attn.out": (attn + "out_proj", conv + "out_proj"),
            "layers.*.attn.conv": conv + "conv",
            **{f"layers.*.attn.inputs.{part}": Take(conv + "in_proj", rows) for part, rows in runs.items()},
            **{f"layers.*.mlp.{part}": mlp + w for part, (w, _) in parts.items()},
            # experts one by one, or as slices of a stack
            **{
                f"layers.*.mlp.experts.*.{part}": tuple(f"{mlp}experts.*.{w}" for w in names)
                for part, names in parts.items()
            },
            "layers.*.mlp.router": mlp + "gate",
            "layers.*.mlp.selection": layer + "feed_forward",
        }


class Lfm2Moe(Lfm2):
    """An LFM2 with experts."""

    Config = Lfm2MoeConfig
