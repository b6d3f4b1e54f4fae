"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention, in some layers latent attention without a rotary embedding, and
the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.block import Mixer
from kvasir.layers.gated_delta import Heads, KimiDelta
from kvasir.layers.module import Entry
from kvasir.models.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Fields
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent
from kvasir.models.glm4_moe import read_deepseek_experts

_DEFAULTS = {
    "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
}  # fmt: skip
# The model's names of fields that other models have, too.
_RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
_MAX_TAPS = 8  # of the kernel; a cache block has at least as many tokens


@dataclass(frozen=True, slots=True)
class KimiLinearConfig(LatentConfig):
    """The sizes and settings of a Kimi Linear.

    recurrent: per layer, whether it is Kimi Delta Attention. delta: its heads. taps: the length of its convolutions, in
    tokens.
    """

    recurrent: tuple[bool, ...] = ()
    delta: Heads = field(kw_only=True)
    taps: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        known = {_RENAMED.get(name, name): value for name, value in config.items() if value is not None}
        f = latent_fields(known, _DEFAULTS)
        f.get("num_key_value_heads")  # latent attention has one
        f.values = {**f.values, "num_key_value_heads": None}
        sizes, layers = read_latent(f), f.integer("num_hidden_layers", 1, MAX_LAYERS)
        f.expect("mla_use_nope", True)
        f.expect("rope_scaling", None)
        f.flag("use_grouped_topk", True)  # with one group there is none
        f.get("num_nextn_predict_layers")  # they only draft
        settings = {**_read_delta(f, layers), **_read_experts(f, layers), "rotates": (False,) * layers}
        f.finish()
        return cls(**sizes, **settings, interleaved=False)


def _read_delta(f: Fields, layers: int) -> dict[str, Any]:
    """The settings of Kimi Delta Attention, in an object of their own or beside the others as transformers writes
    them."""
    given = f.get("linear_attn_config") or {}
    if not isinstance(given, Mapping):
        raise ModelFileError(f"{f.where}: linear_attn_config is {given!r:.80}", "expected an object")
    inner = Fields(given, f"{f.where}: linear_attn_config")
    heads = inner.integer("num_heads", 1, MAX_HEADS, f.integer("linear_num_heads", 1, MAX_HEADS, 32))
    dim = inner.integer("head_dim", 1, MAX_HEAD_DIM, f.integer("linear_head_dim", 1, MAX_HEAD_DIM, 128))
    taps = inner.integer(
        "short_conv_kernel_size", 1, _MAX_TAPS, f.integer("linear_conv_kernel_dim", 1, _MAX_TAPS, 4)
    )  # fmt: skip
    recurrent = _recurrent_layers(f, inner, layers)
    inner.finish()
    return {"recurrent": recurrent, "delta": Heads(heads, heads, dim, dim, decays=dim), "taps": taps}


def _recurrent_layers(f: Fields, inner: Fields, layers: int) -> tuple[bool, ...]:
    """From `layer_types`; without it, from two lists of layer numbers that begin with 1; without both, all but every
    fourth after the first."""
    kinds, full, kda = f.get("layer_types"), inner.get("full_attn_layers"), inner.get("kda_layers")
    if kinds is None and (full is None or kda is None):
        return tuple(i % 4 != 0 or i == 0 for i in range(layers))
    if kinds is None:
        if not all(isinstance(x, list) for x in (full, kda)) or sorted([*full, *kda], key=str) != sorted(
            range(1, layers + 1), key=str
        ):
            raise ModelFileError(f"{inner.where}: full_attn_layers and kda_layers are {full!r:.40} and {kda!r:.40}",
                                 f"expected each of 1 to {layers} in one of them")  # fmt: skip
        return tuple(i + 1 in kda for i in range(layers))
    return tuple(kind == "linear_attention" for kind in _names(f, "layer_types", kinds, layers,
                                                              ("linear_attention", "full_attention")))  # fmt: skip


def _read_experts(f: Fields, layers: int) -> dict[str, Any]:
    kinds = f.get("mlp_layer_types")
    if kinds is None:
        f.values = {"first_k_dense_replace": 1, **f.values}
        return read_deepseek_experts(f, layers)
    sparse = tuple(kind == "sparse" for kind in _names(f, "mlp_layer_types", kinds, layers, ("dense", "sparse")))
    f.get("first_k_dense_replace")
    f.values = {**f.values, "first_k_dense_replace": None}
    return read_deepseek_experts(f, layers) | {"sparse": sparse}


def _names(f: Fields, name: str, kinds: Any, layers: int, known: tuple[str, ...]) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(f"{f.where}: {name} is {kinds!r:.80}", f"expected a list of {layers} names")
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModel(f"{f.where}: {name} names {kind!r:.80}", f"supported: {', '.join(known)}")
    return kinds


class KimiLinear(LatentDecoder):
    """A decoder with latent attention in some layers, and Kimi Delta Attention in the others."""

    Config = KimiLinearConfig
    config: KimiLinearConfig

    def _mixer(self, layer: int, c: Any) -> Mixer:
        if c.recurrent[layer]:
            return KimiDelta(layer, c.width, c.delta, c.taps, c.norm_eps, c.act)
        return super()._mixer(layer, c)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `LatentDecoder.names`, with the recurrent layers. Published files have their experts below
        another name than dense MLPs; transformers writes both below it."""
        layer = "model.layers.*."
        attn, mlp, moe = layer + "self_attn.", layer + "mlp.", layer + "block_sparse_moe."
        names = super().names()
        both = {
            path: (name, name.replace(mlp, moe))
            for path, name in names.items()
            if isinstance(name, str) and name.startswith(mlp)
        }
        experts = {f"layers.*.mlp.experts.*.{part}": f"{moe}experts.*.{w}" for part, w in _EXPERTS.items()}
        return {
            **names,
            **both,
            **{path: (*both[path], name) for path, name in experts.items()},
            "layers.*.attn": attn.removesuffix("."),
            **{f"layers.*.attn.inputs.{part}": f"{attn}{part}_proj" for part in "qkvb"},
            "layers.*.attn.inputs.a": attn + "f_a_proj",
            "layers.*.attn.inputs.z": attn + "g_a_proj",
            "layers.*.attn.decay": attn + "f_b_proj",
            "layers.*.attn.out_gate": attn + "g_b_proj",
            **{f"layers.*.attn.conv.{part}": f"{attn}{part}_conv1d" for part in "qkv"},
            "layers.*.attn.norm": attn + "o_norm",
        }


_EXPERTS = {"gate_up.gate": "w1", "gate_up.up": "w3", "down": "w2"}
