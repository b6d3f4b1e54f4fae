"""Reads the config of Gemma 4, text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.moe import EXPERT_ACTIVATIONS
from kvasir.layers.rope import RopeScaling
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    read_sliding_layers,
)
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.rope import read_rope

# Published configs omit fields that equal these.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
_UNIFIED: dict[str, Any] = {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
_FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_PATTERN = 6  # without layer_types, every sixth layer has full attention


@dataclass(frozen=True, slots=True)
class Gemma4TextConfig(DecoderConfig):
    """`rope_theta`, `rope_scaling` and `rotary_dim` are those of full-attention layers, local_theta, local_scaling and
    local_dim those of layers with a window.

    head_dims, kv_heads_of, inners: per layer. owners: per layer, the layer whose keys and values it reads, or None.
    keys_as_values: whether full-attention layers have no values of their own. per_layer_vocab, per_layer_width: of the
    table of per-layer embeddings, and of one layer's vector, 0 for none. num_experts: 0 for none.
    """

    final_softcap: float = 0.0
    local_theta: float = 1e4
    local_scaling: RopeScaling = field(default_factory=RopeScaling)
    local_dim: int = 0
    head_dims: tuple[int, ...] = ()
    kv_heads_of: tuple[int, ...] = ()
    inners: tuple[int, ...] = ()
    owners: tuple[int | None, ...] = ()
    keys_as_values: bool = False
    per_layer_vocab: int = 0
    per_layer_width: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_inner: int = 0

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence; `max_position_embeddings` already includes any scaling."""
        return self.max_position

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4TextConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        unified = _UNIFIED if config.get("model_type") == "gemma4_unified_text" else {}
        local, full = _split_rope(config)
        f = Fields({**_DEFAULTS, **unified, **config, "rope_parameters": local})
        sizes = read_sizes(f, act="hidden_activation")
        layers = sizes["num_layers"]
        f.get("hidden_act")  # transformers does not read it either
        if f.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images only
            f.expect("use_bidirectional_attention", "vision")
        slides = read_sliding_layers(f, layers) or tuple((i + 1) % _PATTERN != 0 for i in range(layers))
        slides = (*slides[:-1], False)  # as transformers does, whatever the file says
        equal = f.flag("attention_k_eq_v", False)
        head_dims, kv_heads_of = _read_heads(f, sizes, slides, equal)
        full_dim = head_dims[slides.index(False)]
        sizes["rope_theta"], sizes["rope_scaling"] = read_full_rope(full, sizes["max_position"])
        owners = read_owners(f, slides)
        wide = 2 if f.flag("use_double_wide_mlp", False) else 1
        window = f.integer("sliding_window", 1, MAX_POSITIONS)
        bias = f.flag("attention_bias", False)
        settings = {
            "windows": tuple(window if sliding else 0 for sliding in slides),
            "qkv_bias": bias,
            "out_bias": bias,
            "final_softcap": f.number("final_logit_softcapping", 1e-3, 1e6, 0.0),
            "local_theta": 1e4 if local is None else _theta(local),
            "local_scaling": read_rope(Fields({"rope_parameters": local}), sizes["max_position"])[1],
            "local_dim": head_dims[slides.index(True)] if True in slides else full_dim,
            "per_layer_vocab": f.integer("vocab_size_per_layer_input", 1, MAX_VOCAB),
            "per_layer_width": f.integer("hidden_size_per_layer_input", 0, MAX_WIDTH),
            **_read_experts(f, sizes["act"]),
        }
        f.finish()
        return cls(
            **sizes | {"rotary_dim": full_dim},
            **settings,
            head_dims=head_dims,
            kv_heads_of=kv_heads_of,
            inners=tuple(sizes["inner"] * (1 if owner is None else wide) for owner in owners),
            owners=owners,
            keys_as_values=equal,
        )


def _theta(rope: Mapping[str, Any]) -> float:
    return Fields(rope, "config.json: rope_parameters").number("rope_theta", 1.0, 1e12, 1e4)


def _split_rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary settings of the layers with a window and of those with full attention."""
    both = config.get("rope_parameters")
    if both is None:
        return _LOCAL, _FULL
    kinds = {"full_attention", "sliding_attention"}
    if not isinstance(both, Mapping) or not both.keys() <= kinds:
        raise ModelFileError("config.json: rope_parameters is not one object for each kind of layer")
    local, full = both.get("sliding_attention") or _LOCAL, both.get("full_attention") or _FULL
    if not isinstance(local, Mapping) or not isinstance(full, Mapping):
        raise ModelFileError("config.json: rope_parameters is not one object for each kind of layer")
    return dict(local), dict(full)


def read_full_rope(full: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling]:
    """The rotary base and scaling of full-attention layers."""
    if full.get("rope_type") != "proportional":
        return read_rope(Fields({"rope_parameters": full}), max_position)
    f = Fields(full, "config.json: rope_parameters")
    unknown = sorted(map(str, full.keys() - {"rope_type", "rope_theta", "factor", "partial_rotary_factor"}))
    if unknown:
        raise UnsupportedModel(f"{f.where}: {quoted(unknown[0])} is unknown", "rope settings are never ignored")
    factor, share = f.number("factor", 1.0, 1e6, 1.0), f.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    return f.number("rope_theta", 1.0, 1e12), RopeScaling("proportional", factor, share=share)


def _read_heads(
    f: Fields, sizes: Mapping[str, Any], slides: tuple[bool, ...], keys_as_values: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per layer, the width of a head and the number of KV heads. transformers writes them by layer
    (`per_layer_config`), published configs by kind of layer."""
    full = {
        "head_dim": f.integer("global_head_dim", 2, MAX_HEAD_DIM, 512),
        "num_key_value_heads": f.integer("num_global_key_value_heads", 1, MAX_HEADS, sizes["kv_heads"]),
    }
    if not keys_as_values:
        full["num_key_value_heads"] = sizes["kv_heads"]
    by_layer = f.get("per_layer_config")
    if by_layer is None:
        by_layer = {str(i): full for i, sliding in enumerate(slides) if not sliding}
    if not isinstance(by_layer, Mapping):
        raise ModelFileError(f"{f.where}: per_layer_config is {quoted(by_layer)}", "expected an object")
    names = {str(key): str(key).lstrip("0") or "0" for key in by_layer}  # transformers fills them up with zeros
    known = {str(i) for i in range(len(slides))}
    if unknown := [key for key, name in names.items() if name not in known]:
        raise ModelFileError(f"{f.where}: per_layer_config names layer {quoted(unknown[0])}", "there is no such layer")
    if len(set(names.values())) < len(by_layer):
        raise ModelFileError(f"{f.where}: per_layer_config names a layer twice", "expected each layer once")
    by_layer = {str(key).lstrip("0") or "0": values for key, values in by_layer.items()}
    dims, heads = zip(*(_read_layer(f, by_layer, i, sizes) for i in range(len(slides))), strict=True)
    for kind in (True, False):
        if len({(d, h) for d, h, s in zip(dims, heads, slides, strict=True) if s is kind}) > 1:
            raise UnsupportedModel(f"{f.where}: per_layer_config differs between layers of one kind")
    return dims, heads


def _read_layer(f: Fields, by_layer: Mapping[Any, Any], layer: int, sizes: Mapping[str, Any]) -> tuple[int, int]:
    values = by_layer.get(str(layer), {})
    if not isinstance(values, Mapping):
        raise ModelFileError(f"{f.where}: per_layer_config of layer {layer} is {quoted(values)}", "expected an object")
    inner = Fields(values, f"{f.where}: per_layer_config of layer {layer}")
    dim = inner.integer("head_dim", 2, MAX_HEAD_DIM, sizes["head_dim"])
    kv_heads = inner.integer("num_key_value_heads", 1, MAX_HEADS, sizes["kv_heads"])
    inner.finish()
    if dim % 2 or sizes["heads"] % kv_heads:
        raise ModelFileError(
            f"{inner.where}: {sizes['heads']} attention heads of {dim} and {kv_heads} key-value heads",
            "expected an even width and a divisor of the heads",
        )
    return dim, kv_heads


def read_owners(f: Fields, slides: tuple[bool, ...], default: int = 0) -> tuple[int | None, ...]:
    """Per layer, the layer whose keys and values it reads, or None, from `num_kv_shared_layers`: the last layers read
    those of the last layer before them of the same kind. Raises ModelFileError if there is none."""
    layers = len(slides)
    first = layers - f.integer("num_kv_shared_layers", 0, MAX_LAYERS, default)
    if first <= 0:
        raise ModelFileError(f"{f.where}: num_kv_shared_layers is {layers - first}", f"expected less than {layers}")
    last = {kind: i for i, kind in enumerate(slides[:first])}
    if first < layers and set(last) != set(slides):
        raise ModelFileError(
            f"{f.where}: num_kv_shared_layers is {layers - first}",
            "expected a layer of each kind before the layers that share keys and values",
        )
    return tuple(None if i < first else last[kind] for i, kind in enumerate(slides))


def unread_keys(owners: tuple[int | None, ...]) -> tuple[str, ...]:
    """Patterns of the tensors that checkpoints hold for keys and values which no layer computes."""
    reading = "|".join(str(i) for i, owner in enumerate(owners) if owner is not None)
    return (rf"(.*\.)?layers\.({reading})\.self_attn\.[kv]_(proj|norm)\..*",) if reading else ()


def _read_experts(f: Fields, act: str) -> dict[str, Any]:
    present = f.flag("enable_moe_block", False)
    old = f.integer("expert_intermediate_size", 1, MAX_WIDTH, 0)  # the name in the first configs
    inner = f.integer("moe_intermediate_size", 1, MAX_WIDTH, old)
    experts = f.integer("num_experts", 1, MAX_EXPERTS, 0)
    top_k = f.integer("top_k_experts", 1, MAX_EXPERTS, 0)
    if not present:
        return {}
    if not inner or not 0 < top_k <= experts:
        raise ModelFileError(
            f"{f.where}: {top_k} of {experts} experts of width {inner}",
            "expected num_experts, top_k_experts up to it, and moe_intermediate_size",
        )
    if act not in EXPERT_ACTIVATIONS:
        raise UnsupportedModel(f"{f.where}: experts with the activation {act}", f"supported: {EXPERT_ACTIVATIONS}")
    return {"num_experts": experts, "top_k": top_k, "expert_inner": inner}
