"""MiMo-V2-Flash: values narrower than keys; most layers have a window, sinks, and more key-value heads than the others;
mixtures with experts chosen as in DeepSeek-V3, without shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kvasir.errors import ModelFileError, quoted
from kvasir.layers.attention import Attention
from kvasir.layers.module import Entry
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.models.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import read_sizes
from kvasir.models.drafting import Drafting, longer
from kvasir.models.gemma3_text import split_rope
from kvasir.models.glm4_moe import Glm4Moe, Glm4MoeConfig, read_deepseek_experts
from kvasir.models.glm4_moe_lite import read_sparse_layers
from kvasir.models.rope import read_rope

_DEFAULTS = {
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "moe_intermediate_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "n_routed_experts": 256, "num_experts_per_tok": 8, "head_dim": 192, "v_head_dim": 128,
    "sliding_window": 129, "attention_value_scale": 0.707, "first_k_dense_replace": 1,
}  # fmt: skip
_THETA, _WINDOW_THETA, _SHARE = 5e6, 1e4, 0.334


@dataclass(frozen=True, slots=True)
class MiMoV2FlashConfig(Glm4MoeConfig):
    """The sizes and settings of a MiMo-V2-Flash. value_dim: of a head's values; value_scale: their factor.

    window_kv_heads, window_theta, window_scaling: of the layers with a window.
    """

    value_dim: int = 0
    value_scale: float = 1.0
    window_kv_heads: int = 0
    window_theta: float = _WINDOW_THETA
    window_scaling: RopeScaling = field(default_factory=RopeScaling)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(_with_rope(config))
        f = Fields({**_DEFAULTS, **_published(full)})
        sizes = read_sizes(f, partial=True)
        layers, kv_heads = sizes["num_layers"], sizes["kv_heads"]
        for name, same in {"head_dim": "head_dim", "num_attention_heads": "heads"}.items():
            f.expect(f"swa_{name}", sizes[same])
        value_dim = f.integer("v_head_dim", 1, MAX_HEAD_DIM)
        f.expect("swa_v_head_dim", value_dim)
        f.expect("add_swa_attention_sink_bias", True)
        f.expect("add_full_attention_sink_bias", False)
        window_kv_heads = f.integer("swa_num_key_value_heads", 1, MAX_HEADS, 2 * kv_heads)
        if sizes["heads"] % window_kv_heads:
            raise ModelFileError(f"{f.where}: {sizes['heads']} attention heads cannot share {window_kv_heads} heads")
        for unused in ("attention_chunk_size", "hybrid_block_size"):  # in the models' own code, too
            f.get(unused)
        bias, scale = f.flag("attention_bias", False), f.number("attention_value_scale", 0.0, 1e3, 1.0)
        experts = read_deepseek_experts(f, layers)
        experts["sparse"] = read_sparse_layers(f, layers) or experts["sparse"]
        windows, drafting = _windows(f, layers), f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        f.finish()
        theta, scaling = read_rope(Fields(local, "config.json"), sizes["max_position"], _WINDOW_THETA, partial=True)
        return cls(
            **sizes, **experts, windows=windows, qkv_bias=bias, value_dim=value_dim, value_scale=scale,
            window_kv_heads=window_kv_heads, window_theta=theta, window_scaling=scaling, drafting=drafting,
        )  # fmt: skip


def _with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the settings of both rotary embeddings in `rope_parameters`."""
    rest = {k: v for k, v in config.items() if k not in ("rope_theta", "swa_rope_theta", "partial_rotary_factor")}
    if config.get("rope_parameters"):
        return rest
    share = config.get("partial_rotary_factor", _SHARE)
    thetas = config.get("rope_theta", _THETA), config.get("swa_rope_theta", _WINDOW_THETA)
    kinds = zip(("full_attention", "sliding_attention"), thetas, strict=True)
    both = {kind: {"rope_theta": theta, "partial_rotary_factor": share} for kind, theta in kinds}
    return {**rest, "rope_parameters": both}


def _published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the published config under the names that transformers gives them."""
    found = dict(config)
    if (eps := found.pop("layernorm_epsilon", None)) is not None:
        found["rms_norm_eps"] = eps
    for name, target, kinds in (
        ("hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention")),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        flags = found.get(name)
        if isinstance(flags, list):
            if any(flag not in (0, 1) for flag in flags):
                raise ModelFileError(f"config.json: {name} is {quoted(flags)}", "expected 0 or 1 for each layer")
            found[target] = [kinds[flag] for flag in found.pop(name)]
    return found


def _windows(f: Fields, layers: int) -> tuple[int, ...]:
    """The window of each layer, the token's own position included; `sliding_window_size` counts those before it."""
    before = f.integer("sliding_window_size", 1, MAX_POSITIONS, 0)
    window = f.integer("sliding_window", 1, MAX_POSITIONS)
    slides = read_sliding_layers(f, layers)
    if slides is None:
        slides = tuple(i > 0 and (i + 1) % 6 != 0 for i in range(layers))
    return tuple((before + 1 if before else window) if sliding else 0 for sliding in slides)


class MiMoV2Flash(Glm4Moe):
    """A GLM-4.5 whose layers with a window have sinks, and heads and a rotary embedding of their own."""

    Config = MiMoV2FlashConfig
    config: MiMoV2FlashConfig
    counted = "num_nextn_predict_layers", r"model\.mtp\.layers\.(\d+)\."  # not in published configs

    def __init__(self, config: MiMoV2FlashConfig):
        self.window_rope = Rope(config.rotary_dim, config.window_theta, config.window_scaling)
        super().__init__(config)

    @property
    def drafting(self) -> Drafting | None:
        """As `Decoder.drafting`. The layers have windows and dense MLPs, and all of them read the decoder's rows."""
        c, layer = self.config, "model.mtp.layers.*."
        if not c.drafting:
            return None
        return Drafting(
            longer(c, c.drafting, windows=max(c.windows), sparse=False),
            layer,
            0,
            joint=layer + "eh_proj",
            embed_norm=layer + "enorm",
            hidden_norm=layer + "hnorm",
            norm=layer + "final_layernorm",
            renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
            chained=False,
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the layers for multi-token prediction."""
        return (*super().ignored, r"model\.mtp\..*")

    def _rope_of(self, layer: int) -> Rope | None:
        return self.window_rope if self.config.windows[layer] else self.rope

    def _mixer(self, layer: int, c: MiMoV2FlashConfig) -> Attention:
        kv_heads = c.window_kv_heads if c.windows[layer] else c.kv_heads
        return Attention(layer, c.width, c.heads, kv_heads, c.head_dim, **self._attention_options(layer, c))

    def _attention_options(self, layer: int, c: MiMoV2FlashConfig) -> dict[str, Any]:
        return {
            **super()._attention_options(layer, c),
            "value_dim": c.value_dim,
            "value_scale": c.value_scale,
            "sinks": bool(c.windows[layer]),
            "sink_name": "attention_sink_bias",
        }

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Glm4Moe.names`, with the sinks."""
        return {**super().names(), "layers.*.attn.sinks": "model.layers.*.self_attn"}
