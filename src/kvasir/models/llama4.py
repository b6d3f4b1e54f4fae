"""Llama 4, the text part: layers that attend within chunks and rotate, every fourth with full attention and without
rotation, whose queries grow with their position; mixtures that weigh an expert's input, with a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.caches import CacheKind, Chunked
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry
from kvasir.layers.moe import MoE, Routing, SharedMoE
from kvasir.layers.norm import BareRMSNorm
from kvasir.layers.rope import STILL, Rope, RopeScaling
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields, quoted_value
from kvasir.models.decoder import read_sizes, within
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts
from kvasir.models.rope import halves

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072}
_OF_IMAGES = ("boi_token_index", "eoi_token_index", "image_token_index", "vision_config")


@dataclass(frozen=True, slots=True)
class Llama4Config(MixtralConfig):
    """The sizes and settings of a Llama 4. inner: of dense layers. chunks: per layer the length of the chunks, 0 for
    full attention. growth: of the queries of layers without rotation, as in `Rope`."""

    chunks: tuple[int, ...] = ()
    growth: tuple[float, int, int] | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Llama4Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        dense = f.integer("intermediate_size_mlp", 1, MAX_WIDTH, 16384)
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        layers, expert_inner = sizes["num_layers"], sizes["inner"]
        rotates = _flags(f, "no_rope_layers", layers, f.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4))
        num_experts, top_k = read_experts(f, num_experts=16, top_k=1)
        chunk = f.integer("attention_chunk_size", 1, MAX_POSITIONS, 0 if "attention_chunk_size" in config else 8192)
        kinds = _read_kinds(f, rotates)
        head_norm, grows = f.flag("use_qk_norm", True), _is_set(f, "attn_temperature_tuning")
        beta, length = f.number("attn_scale", 0.0, 1e3, 0.1), f.integer("floor_scale", 1, MAX_POSITIONS, 8192)
        sparse = _read_sparse(f, layers)
        f.expect("for_llm_compressor", False)
        f.finish()
        return cls(
            **{**sizes, "inner": dense},
            windows=(0,) * layers,
            rotates=rotates,
            sparse=sparse,
            num_experts=num_experts,
            routing=Routing(top_k, "sigmoid", normalise=False),
            expert_inner=expert_inner,
            shared_inner=expert_inner,
            qkv_bias=bias,
            out_bias=bias,
            head_norm=head_norm,
            chunks=tuple(chunk if kind == "chunked_attention" else 0 for kind in kinds),
            growth=(beta, length, 1) if grows and beta else None,
        )


def _is_set(f: Fields, name: str) -> bool:
    """A flag that published configs also write as a number; true if absent."""
    given = f.get(name)
    return f.integer(name, 0, MAX_LAYERS) > 0 if type(given) is int else f.flag(name, True)


def _flags(f: Fields, name: str, layers: int, every: int) -> tuple[bool, ...]:
    """One flag per layer; without the field, each but every `every`th."""
    given = f.get(name) or [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(flag not in (0, 1) for flag in given):
        raise ModelFileError(f"{f.where}: {name} is {quoted_value(given)}", f"expected a list of {layers} times 0 or 1")
    return tuple(map(bool, given))


def _read_kinds(f: Fields, rotates: tuple[bool, ...]) -> list[str]:
    kinds = f.get("layer_types")
    if kinds is None:
        return ["chunked_attention" if rotating else "full_attention" for rotating in rotates]
    if not isinstance(kinds, list) or len(kinds) != len(rotates):
        raise ModelFileError(f"{f.where}: layer_types", f"expected a list of {len(rotates)} names")
    for kind in kinds:
        if kind not in ("chunked_attention", "full_attention"):
            raise UnsupportedModel(f"{f.where}: layer_types names {quoted_value(kind)}",
                                   "supported: chunked_attention, full_attention")  # fmt: skip
    return kinds


def _read_sparse(f: Fields, layers: int) -> tuple[bool, ...]:
    step, given = f.integer("interleave_moe_layer_step", 0, MAX_LAYERS, 1), f.get("moe_layers")
    if given is None:
        given = list(range(step - 1, layers, step)) if step else []
    if not isinstance(given, list) or any(type(i) is not int or not 0 <= i < layers for i in given):
        raise ModelFileError(f"{f.where}: moe_layers is {quoted_value(given)}", f"expected numbers below {layers}")
    return tuple(i in given for i in range(layers))


class Llama4Text(Mixtral):
    """A Mixtral with chunks, layers that do not rotate, and weighted inputs."""

    Config = Llama4Config
    config: Llama4Config  # type: ignore[assignment]
    transposed_experts: ClassVar[bool] = True
    experts_in_turns: ClassVar[bool] = False

    def __init__(self, config: Llama4Config):
        dim = config.head_dim
        self.growing = Rope(dim, 1.0, RopeScaling(STILL), config.growth) if config.growth else None
        super().__init__(config)

    def _attention_options(self, layer: int, c: Llama4Config) -> dict[str, Any]:
        rotating = c.rotates[layer]
        return {
            **super()._attention_options(layer, c),
            "head_norm_eps": c.norm_eps if c.head_norm and rotating else None,
            "head_norm": BareRMSNorm,
            "norm_after_rope": True,
            "query_rope": None if rotating else self.growing,
        }

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MoE:
        if not c.sparse[layer]:
            return GatedMLP(c.width, c.inner, c.act)
        sizes = c.width, c.expert_inner, c.num_experts, c.routing
        return SharedMoE(*sizes, c.shared_inner, gated=False, act=c.act, weigh_inputs=True)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer."""
        mixers: list[Any] = [layer.attn for layer in self.layers]  # a rank's have a part of the KV heads
        kinds = zip(mixers, self.config.chunks, super().cache_spec(), strict=True)
        return tuple(Chunked(mixer.kv_heads, mixer.head_dim, chunk=n) if n else kind for mixer, n, kind in kinds)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the names that `ExpertsView` gives to the experts' tensors."""
        c, mlp = self.config, "model.layers.*.feed_forward."
        parts = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
        return {
            **super().names(),
            **halves("model.layers.*.self_attn.", c.head_dim, c.rotary_dim),
            **expert_names(mlp, "shared_expert"),
            **{f"layers.*.mlp.{ours}": mlp + theirs for ours, theirs in parts.items()},
            "layers.*.mlp.router": mlp + "router",
        }


class Llama4WholeConfig(Llama4Config):
    """The config of the text model; the image parts are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Llama4Config:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        f = Fields(config)
        text, tied = f.get("text_config"), f.flag("tie_word_embeddings", False)
        if not isinstance(text, Mapping):
            raise ModelFileError(f"{f.where}: text_config is missing", "expected the object of the text model")
        for image in _OF_IMAGES:
            f.get(image)
        f.finish()
        return Llama4Config.from_hf({"tie_word_embeddings": tied, **text})


class Llama4(Llama4Text):
    """`Llama4Text` under the tensor names of the multimodal checkpoint."""

    Config = Llama4WholeConfig

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including those of the image tower."""
        return (*super().ignored, r"(model\.)?(vision_model|multi_modal_projector)\..*")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Llama4Text.names`, whose modules lie beside the image tower."""
        found = super().names()
        places = ("model.", "model.language_model."), ("", "language_model.")
        return {path: tuple(one for p in places for one in _several(within(e, *p))) for path, e in found.items()}


def _several(entry: Entry) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)
