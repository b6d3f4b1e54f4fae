"""Qwen3-Next: three Gated DeltaNet layers (arXiv:2412.06464) for each layer of gated attention, and mixtures of experts
with a shared expert that processes every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import GatedAttention
from kvasir.layers.gated_delta import GatedDelta, Heads
from kvasir.layers.module import Entry, Take
from kvasir.layers.moe import Routing
from kvasir.layers.norm import OffsetRMSNorm, RMSNorm
from kvasir.models.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes, runs
from kvasir.models.drafting import Drafting, longer
from kvasir.models.mixtral import read_experts
from kvasir.models.qwen2_moe import Qwen2Moe, Qwen2MoeConfig
from kvasir.models.qwen3_moe import read_sparse_layers

_DEFAULTS = {"intermediate_size": 5632, "partial_rotary_factor": 0.25}
_MAX_TAPS = 8  # a cache block has at least as many tokens


@dataclass(frozen=True, slots=True)
class Qwen3NextConfig(Qwen2MoeConfig):
    """The sizes and settings of a Qwen3-Next.

    recurrent: per layer, whether it is a Gated DeltaNet. delta: the heads of a Gated DeltaNet. taps: the length of its
    convolution, in tokens. drafting: its layers for multi-token prediction.
    """

    recurrent: tuple[bool, ...] = ()
    drafting: int = 0
    delta: Heads = field(kw_only=True)
    taps: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=2, head_dim=256, partial=True)
        layers, bias = sizes["num_layers"], f.flag("attention_bias", False)
        num_experts, top_k = read_experts(f, num_experts=512, top_k=10)
        settings = {
            "windows": (0,) * layers,
            "num_experts": num_experts,
            "routing": Routing(top_k, normalise=f.flag("norm_topk_prob", True)),
            "expert_inner": f.integer("moe_intermediate_size", 1, MAX_WIDTH, 512),
            "shared_inner": f.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 512),
            "sparse": read_sparse_layers(f, layers),
            **read_delta(f, layers),
            "drafting": 1,  # which the published config does not name
        }
        f.finish()
        return cls(**sizes, **settings, qkv_bias=bias, out_bias=bias, head_norm=True)


def read_delta(f: Fields, layers: int) -> dict[str, Any]:
    """The settings of the Gated DeltaNet layers, and which layers these are."""
    return {
        "recurrent": _recurrent_layers(f, layers),
        "delta": _read_heads(f),
        "taps": f.integer("linear_conv_kernel_dim", 1, _MAX_TAPS, 4),
    }


def _read_heads(f: Fields) -> Heads:
    heads = Heads(
        f.integer("linear_num_key_heads", 1, MAX_HEADS, 16),
        f.integer("linear_num_value_heads", 1, MAX_HEADS, 32),
        f.integer("linear_key_head_dim", 1, MAX_HEAD_DIM, 128),
        f.integer("linear_value_head_dim", 1, MAX_HEAD_DIM, 128),
        f.flag("linear_value_heads_tiled", False),  # as in GGUF files
    )
    if heads.v % heads.qk:
        raise ModelFileError(f"{f.where}: {heads.v} linear value heads cannot share {heads.qk} key heads")
    return heads


def _recurrent_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers are recurrent, from `layer_types`; without it, all except every `full_attention_interval`th."""
    interval = f.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    kinds = f.get("layer_types")
    if kinds is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(f"{f.where}: layer_types is {kinds!r:.80}", f"expected a list of {layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "linear_attention"):
            raise UnsupportedModel(f"{f.where}: layer_types names {kind!r:.80}",
                                   "supported: full_attention, linear_attention")  # fmt: skip
    return tuple(kind == "linear_attention" for kind in kinds)


class Qwen3Next(Qwen2Moe):
    """A Qwen with experts whose recurrent layers have a Gated DeltaNet instead of attention."""

    Config = Qwen3NextConfig
    config: Qwen3NextConfig
    Norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including the head for multi-token prediction."""
        return (*super().ignored, r"mtp\..*")  # which `MultiTokenHead` reads

    @property
    def drafting(self) -> Drafting | None:
        """As `Decoder.drafting`. The layers have gated attention, and experts if the last one of the decoder has."""
        c = self.config
        if not c.drafting:
            return None
        return Drafting(
            longer(c, c.drafting, windows=0, sparse=c.sparse[-1], recurrent=False),
            "mtp.layers.*.",
            0,
            joint="mtp.fc",
            embed_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            norm="mtp.norm",
        )

    def _mixer(self, layer: int, c: Qwen3NextConfig) -> GatedAttention | GatedDelta:
        if c.recurrent[layer]:
            return GatedDelta(layer, c.width, c.delta, c.taps, c.norm_eps, c.act)
        return GatedAttention(layer, c.width, c.heads, c.kv_heads, c.head_dim, **self._attention_options(layer, c))

    def _inputs(self, delta: str) -> dict[str, Take]:
        """The parts of a Gated DeltaNet's inputs where q, k and v are one after the other in a tensor of their own."""
        heads, qkv = self.config.delta, delta + "in_proj_qkv"
        wide = heads.qk * heads.dim
        parts = {"q": (0, wide), "k": (wide, 2 * wide), "v": (2 * wide, heads.channels)}
        inner = heads.v * heads.v_dim
        return {**{part: Take(qkv, rows) for part, rows in parts.items()}, "z": Take(delta + "in_proj_z", (0, inner))}

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Qwen2Moe.names`, with the Gated DeltaNet layers."""
        layer, c = "model.layers.*.", self.config
        share = c.delta.v // c.delta.qk
        parts = {"q": c.delta.dim, "k": c.delta.dim, "v": share * c.delta.v_dim, "z": share * c.delta.v_dim}
        joint = runs(" ".join(parts), layer + "linear_attn.in_proj_qkvz", tuple(parts.values()))
        apart = self._inputs(layer + "linear_attn.")
        return {
            **super().names(),
            **runs("layers.*.attn.qkv.q layers.*.attn.gate", layer + "self_attn.q_proj", (c.head_dim, c.head_dim)),
            **{f"layers.*.attn.inputs.{part}": (joint[part], apart[part]) for part in parts},
            **runs("layers.*.attn.gates.b layers.*.attn.gates.a", layer + "linear_attn.in_proj_ba", (share, share)),
            "layers.*.attn": layer + "linear_attn",
            "layers.*.attn.conv": layer + "linear_attn.conv1d",
            "layers.*.attn.norm": layer + "linear_attn.norm",
            "layers.*.attn.out": (layer + "self_attn.o_proj", layer + "linear_attn.out_proj"),
        }
