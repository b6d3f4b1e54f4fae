"""Step-3.5 and the text part of Step-3.7 (StepFun): layers with a window have more heads and a rotary embedding of
their own, the others rotate a part of each head; one gate per head; first dense layers, then mixtures with a shared
expert and experts chosen by sigmoid scores. The factors of some layers' MLPs are limited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.attention import HeadGatedAttention
from kvasir.layers.block import Mixer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry
from kvasir.layers.moe import MoE, Routing, SharedMoE
from kvasir.layers.norm import OffsetRMSNorm, RMSNorm
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    Fields,
    inner_object,
    is_number,
)
from kvasir.models.decoder import read_sizes
from kvasir.models.drafting import Drafting, numbered_after
from kvasir.models.glm4_moe import Glm4Moe, Glm4MoeConfig
from kvasir.models.mixtral import expert_names
from kvasir.models.rope import read_rope, read_rotary_share

_DEFAULTS = {
    "vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5, "n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}  # fmt: skip
# Names in published configs, and those that transformers gives the same fields.
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_SHARED = "shared_head.", "transformer.shared_head."  # of GGUF files, and of checkpoints
_HEADS = r"shared_head\.head|transformer\.shared_head\.output"
_FULL, _WINDOW = "full_attention", "sliding_attention"
_MIN_LIMIT, _MAX_LIMIT = 0.5, 1e6  # silu is never below -0.28, so a limit is one from above


@dataclass(frozen=True, slots=True)
class Step3p5Config(Glm4MoeConfig):
    """The sizes and settings of a Step-3.5.

    window_heads, window_rotary_dim, window_theta, window_scaling: of the layers with a window. limits, shared_limits:
    of each layer's experts, and of its shared expert or dense MLP, as of a `GatedMLP`. more_windows, more_sparse: as
    windows and sparse, of the layers for multi-token prediction; the layers themselves have the same limits, 0 if the
    config does not state them. mtp_heads: whether they have logits of their own, as published checkpoints.
    """

    window_heads: int = 0
    window_rotary_dim: int = 0
    window_theta: float = 1e4
    window_scaling: RopeScaling = field(default_factory=RopeScaling)
    limits: tuple[float, ...] = ()
    shared_limits: tuple[float, ...] = ()
    more_windows: tuple[int, ...] = ()
    more_sparse: tuple[bool, ...] = ()
    mtp_heads: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`, published or written by transformers. Raises ModelFileError for bad values,
        UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **{_NAMES.get(name, name): value for name, value in config.items()}})
        layers = f.integer("num_hidden_layers", 1, MAX_LAYERS)
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        slides = _kinds(f, "layer_types", "mtp_layer_types", (_FULL, _WINDOW), layers, drafting)
        slides = slides or (False,) * (layers + drafting)
        full, local = _ropes(f, slides)
        f.values = {**f.values, "rope_parameters": full}
        sizes = read_sizes(f, partial=True)
        theta, scaling = read_rope(local, sizes["max_position"], partial=True)
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 0)
        if any(slides) and not window:
            raise ModelFileError(f"{f.where}: sliding_window is missing", "layer_types names layers with a window")
        windows = tuple(window if sliding else 0 for sliding in slides)
        sparse = _sparse(f, layers, drafting)
        top_k = f.integer("num_experts_per_tok", 1, MAX_EXPERTS)
        settings: dict[str, Any] = {
            "num_experts": f.integer("n_routed_experts", top_k, MAX_EXPERTS),
            "routing": Routing(top_k, "sigmoid", scale=f.number("moe_router_scaling_factor", 1e-6, 1e6, 1.0)),
            "expert_inner": f.integer("moe_intermediate_size", 1, MAX_WIDTH),
            "shared_inner": f.integer("share_expert_dim", 1, MAX_WIDTH),
            "limits": _limits(f, "swiglu_limits", layers, drafting),
            "shared_limits": _limits(f, "swiglu_limits_shared", layers, drafting),
            "window_heads": _window_heads(f, sizes),
            "window_rotary_dim": int(sizes["head_dim"] * read_rotary_share(local)),
            "attn_scale": f.number("query_pre_attn_scalar", 1e-3, 1e6, sizes["head_dim"]) ** -0.5,
        }
        bias, heads = f.flag("attention_bias", False), f.integer("mtp_heads", 0, MAX_LAYERS, 0)
        if 0 < heads < drafting:
            raise ModelFileError(
                f"{heads} of {drafting} layers for multi-token prediction have tensors shared_head.output",
                "expected all or none: is the checkpoint complete?",
            )
        _read_fixed(f)
        f.finish()
        return cls(
            **sizes, **settings, windows=windows[:layers], more_windows=windows[layers:], sparse=sparse[:layers],
            more_sparse=sparse[layers:], window_theta=theta, window_scaling=scaling, qkv_bias=bias, out_bias=bias,
            head_norm=True, drafting=drafting, mtp_heads=heads > 0 < drafting,
        )  # fmt: skip


def _read_fixed(f: Fields) -> None:
    """The fields of the published configs that have one supported value, or none that matters."""
    for name, value in (
        ("hidden_act", "silu"),
        ("use_moe", True),
        ("moe_router_activation", "sigmoid"),
        ("norm_expert_weight", True),
        ("use_moe_router_bias", True),
        ("need_fp32_gate", True),
        ("use_qk_norm", True),
        ("use_head_wise_attn_gate", True),
        ("zero_centered", True),
        ("sink", False),
        ("att_impl_type", "GQA"),
        ("mlp_bias", False),
        ("use_bidirectional_attention", False),
        ("yarn_only_types", [_FULL]),
    ):
        f.expect(name, value)
    if f.get("use_rope_layers") not in (None, []):
        raise UnsupportedModel(f"{f.where}: use_rope_layers is {quoted(f.get('use_rope_layers'))}", "supported: []")
    copies = "max_seq_len", "moe_every_n_layer", "moe_layer_offset", "per_layer_config"  # of other fields
    for other in (*copies, "output_router_logits"):
        f.get(other)


def _kinds(
    f: Fields, name: str, more: str, kinds: tuple[str, str], layers: int, drafting: int
) -> tuple[bool, ...] | None:
    """Whether each layer is of the second kind, those for multi-token prediction included: in the same list, or in one
    of their own; of the first kind without either. None without the field."""
    given = f.get(name)
    if given is None:
        return None
    if isinstance(given, list) and len(given) == layers:
        given = [*given, *(f.get(more) or [kinds[0]] * drafting)]
    if not isinstance(given, list) or len(given) != layers + drafting or any(kind not in kinds for kind in given):
        raise ModelFileError(f"{f.where}: {name} is {quoted(given)}", f"expected {' or '.join(kinds)} for each layer")
    return tuple(kind == kinds[1] for kind in given)


def _sparse(f: Fields, layers: int, drafting: int) -> tuple[bool, ...]:
    given = f.get("moe_layers_enum")
    found = _kinds(f, "mlp_layer_types", "mtp_mlp_layer_types", ("dense", "sparse"), layers, drafting)
    if found is not None:
        return found
    items = given.split(",") if isinstance(given, str) else range(3, layers) if given is None else given
    if not isinstance(items, list | range) or not all(str(item).strip().isdecimal() for item in items):
        raise ModelFileError(f"{f.where}: moe_layers_enum is {quoted(given)}", "expected numbers of layers and commas")
    numbers = {int(item) for item in items}
    return tuple(i in numbers for i in range(layers + drafting))


def _limits(f: Fields, name: str, layers: int, drafting: int) -> tuple[float, ...]:
    given = f.get(name) or []
    found: list[Any] = [0.0 if limit is None else limit for limit in given] if isinstance(given, list) else [None]
    if len(found) not in (0, layers, layers + drafting) or not all(
        is_number(limit) and (limit == 0 or _MIN_LIMIT <= limit <= _MAX_LIMIT) for limit in found
    ):
        raise ModelFileError(
            f"{f.where}: {name} is {quoted(given)}", f"expected 0 or a number of at least {_MIN_LIMIT} for each layer"
        )
    return tuple(map(float, found)) + (0.0,) * (layers + drafting - len(found))


def _window_heads(f: Fields, sizes: Mapping[str, Any]) -> int:
    other = inner_object(f.values, "attention_other_setting")
    f.get("attention_other_setting")
    own = Fields(other, f"{f.where}: attention_other_setting")
    own.expect("attention_type", _WINDOW)
    own.expect("num_attention_groups", sizes["kv_heads"])
    own.expect("head_dim", sizes["head_dim"])
    heads = own.integer("num_attention_heads", 1, MAX_HEADS, sizes["heads"])
    heads = f.integer("num_sliding_attention_heads", 1, MAX_HEADS, heads)
    own.finish()
    if heads % sizes["kv_heads"]:
        raise ModelFileError(f"{f.where}: {heads} attention heads cannot share {sizes['kv_heads']} key-value heads")
    return heads


def _ropes(f: Fields, slides: tuple[bool, ...]) -> tuple[Mapping[str, Any], Fields]:
    """The rotary embeddings of the layers without and with a window, each as `rope_parameters`: stated by kind, or of
    each layer; then the scaling is of the former."""
    given = inner_object(f.values, "rope_parameters")
    thetas, shares = f.get("rope_theta"), f.get("partial_rotary_factors")
    scaling = {
        **inner_object(f.values, "rope_scaling"),
        **{k: v for k, v in given.items() if k not in (_FULL, _WINDOW)},
    }
    if scaling and not (scaling.get("rope_type") or scaling.get("type")):
        raise ModelFileError(f"{f.where}: the scaling of the rotary embedding {quoted(scaling)} has no type")
    f.values = {k: v for k, v in f.values.items() if k not in ("rope_theta", "rope_scaling")}
    found: dict[bool, Mapping[str, Any]] = {}
    for sliding, kind in ((False, _FULL), (True, _WINDOW)):
        if kind in given:
            found[sliding] = inner_object(given, kind)
            continue
        own = {"rope_theta": _of(f, "rope_theta", thetas, slides, sliding, 1e4),
               "partial_rotary_factor": _of(f, "partial_rotary_factors", shares, slides, sliding, 1.0)}  # fmt: skip
        found[sliding] = own if sliding else {**scaling, **own}
    return found[False], Fields({"rope_parameters": found[True]}, f.where)


def _of(f: Fields, name: str, values: Any, slides: tuple[bool, ...], sliding: bool, default: float) -> Any:
    """The value of the layers of one kind, of a list with one for each layer or of all layers."""
    if not isinstance(values, list):
        return default if values is None else values
    kinds = [value for value, own in zip(values, slides, strict=False) if own == sliding]
    if len(values) > len(slides) or any(value != kinds[0] for value in kinds):
        raise ModelFileError(f"{f.where}: {name} is {quoted(values)}", "expected the same for all layers of a kind")
    return kinds[0] if kinds else default


class Step3p5(Glm4Moe):
    """A GLM-4.5 whose layers with a window have heads and a rotary embedding of their own."""

    Config = Step3p5Config
    config: Step3p5Config
    Norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm
    selection = "router_bias"
    counted = "mtp_heads", rf"model\.layers\.(\d+)\.(?:{_HEADS})\.weight"

    def __init__(self, config: Step3p5Config):
        self.window_rope = Rope(config.window_rotary_dim, config.window_theta, config.window_scaling)
        super().__init__(config)

    @property
    def drafting(self) -> Drafting | None:
        """As `Decoder.drafting`. The layers read rows before norms."""
        c, layer = self.config, "model.layers.*."
        if not c.drafting:
            return None
        whole = replace(
            c, num_layers=c.num_layers + c.drafting, windows=c.windows + c.more_windows, sparse=c.sparse + c.more_sparse
        )
        return replace(
            numbered_after(c.num_layers, whole),
            norm=tuple(f"{layer}{shared}norm" for shared in _SHARED),
            head=(f"{layer}shared_head.head", f"{layer}transformer.shared_head.output") if c.mtp_heads else None,
            tap=f"layers.{c.num_layers - 1}",
        )

    def _rope_of(self, layer: int) -> Rope | None:
        return self.window_rope if self.config.windows[layer] else self.rope

    def _mixer(self, layer: int, c: Step3p5Config) -> Mixer:
        heads = c.window_heads if c.windows[layer] else c.heads
        return HeadGatedAttention(layer, c.width, heads, c.kv_heads, c.head_dim, **self._attention_options(layer, c))

    def _mlp(self, layer: int, c: Step3p5Config) -> GatedMLP | MoE:
        limit, shared_limit = c.limits[layer], c.shared_limits[layer]
        if not c.sparse[layer]:
            return GatedMLP(c.width, c.inner, c.act, limit=shared_limit)
        return SharedMoE(
            c.width, c.expert_inner, c.num_experts, c.routing, c.shared_inner, gated=False, act=c.act,
            selection=self.selection, limit=limit, shared_limit=shared_limit,
        )  # fmt: skip

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the gates, the router and the experts."""
        layer = "model.layers.*."
        shared = expert_names(layer, "share_expert")
        return {
            **super().names(),
            **expert_names(layer + "moe."),
            **{path: name for path, name in shared.items() if ".shared." in path},
            "layers.*.attn.gate": layer + "self_attn.g_proj",
            "layers.*.mlp.router": layer + "moe.gate",
            "layers.*.mlp.selection": layer + "moe",
        }


class Step3p7Config(Step3p5Config):
    """The config of the text model; the image parts are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Step3p5Config:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        f = Fields(config)
        text = f.get("text_config")
        tied = {} if f.get("tie_word_embeddings") is None else {"tie_word_embeddings": f.flag("tie_word_embeddings")}
        if not isinstance(text, Mapping):
            raise ModelFileError(f"{f.where}: text_config is missing", "expected the object of the text model")
        for images in ("projector_bias", "understand_projector_stride"):
            f.get(images)
        heads = f.get("mtp_heads")  # counted in the checkpoint
        f.finish()
        return Step3p5Config.from_hf({**tied, **text, **({} if heads is None else {"mtp_heads": heads})})


class Step3p7(Step3p5):
    """`Step3p5` in a checkpoint with an image tower."""

    Config = Step3p7Config

    @property
    def ignored(self) -> tuple[str, ...]:
        """As of a `Step3p5`, and the tensors for images."""
        return (*super().ignored, r"(vision_model|vit_large_projector)\..*")
