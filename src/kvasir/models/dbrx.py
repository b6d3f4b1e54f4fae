"""DBRX: a mixture of experts in every layer, LayerNorms without biases, and queries, keys and values in one matrix,
which are clipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.module import Entry, Take
from kvasir.layers.moe import EXPERT_ACTIVATIONS, Routing
from kvasir.layers.norm import PlainLayerNorm, RMSNorm
from kvasir.models.config import MAX_EXPERTS, MAX_HEADS, MAX_WIDTH, Fields, inner_object
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig

# DBRX's names of fields that other decoders have, too
_NAMES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
_LAYER_NORM_EPS = 1e-5  # fixed in the model's code


@dataclass(frozen=True, slots=True)
class DbrxConfig(MixtralConfig):
    """The sizes and settings of a DBRX."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DbrxConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        attn, ffn = _part(config, "attn_config"), _part(config, "ffn_config")
        f = Fields(_renamed(config) | _attention(config, attn) | _experts(ffn))
        for name in (*_NAMES, "attn_config", "ffn_config", "output_router_logits", "router_aux_loss_coef"):
            f.get(name)
        sizes = read_sizes(f, eps="layer_norm_epsilon")
        clip = attn.number("clip_qkv", 1e-6, 1e6, 0.0)
        experts, routing = _routing(ffn)
        for fields in (f, attn, ffn):
            fields.finish()
        return cls(
            **sizes,
            windows=(0,) * sizes["num_layers"],
            qkv_clip=clip,
            num_experts=experts,
            routing=routing,
            expert_inner=sizes["inner"],
            sparse=(True,) * sizes["num_layers"],
        )


def _part(config: Mapping[str, Any], name: str) -> Fields:
    """The fields of an object in the config; those that transformers writes into every config are left out."""
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ModelFileError(f"config.json: {name} is {given!r:.80}", "expected an object")
    return Fields({**given, "tie_word_embeddings": None}, f"config.json: {name}")


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**{new: config[old] for old, new in _NAMES.items() if config.get(old) is not None}, **config}


def _attention(config: Mapping[str, Any], attn: Fields) -> dict[str, Any]:
    """The base of the rotary embedding is a field of `attn_config`; newer configs have it in `rope_parameters`, too."""
    rope, own = inner_object(config, "rope_parameters"), attn.get("rope_theta")
    found = {"num_key_value_heads": attn.integer("kv_n_heads", 1, MAX_HEADS, 1)}
    stated = rope.get("rope_theta")
    if own is None or stated == own:
        return found
    if stated is not None:
        raise UnsupportedModel(
            f"config.json: rope_theta is {own!r:.40} in attn_config and {stated!r:.40} in rope_parameters",
            "the two must be equal; remove the wrong one",
        )
    return found | ({"rope_parameters": {**rope, "rope_theta": own}} if rope else {"rope_theta": own})


def _experts(ffn: Fields) -> dict[str, Any]:
    ffn.get("hidden_size")  # a copy of the model's
    act = ffn.get("ffn_act_fn") or {"name": "silu"}
    if not isinstance(act, Mapping) or set(act) != {"name"} or act["name"] not in EXPERT_ACTIVATIONS:
        raise UnsupportedModel(
            f"{ffn.where}: ffn_act_fn is {act!r:.80}", f"supported: a name of {', '.join(EXPERT_ACTIVATIONS)}"
        )
    return {
        "hidden_act": act["name"],
        "intermediate_size": ffn.integer("ffn_hidden_size", 1, MAX_WIDTH, 3584),
        "layer_norm_epsilon": _LAYER_NORM_EPS,
    }


def _routing(ffn: Fields) -> tuple[int, Routing]:
    """The number of experts, and how a token chooses among them."""
    experts = ffn.integer("moe_num_experts", 1, MAX_EXPERTS, 4)
    top_k = ffn.integer("moe_top_k", 1, MAX_EXPERTS, 1)
    if top_k > experts:
        raise ModelFileError(f"{ffn.where}: moe_top_k is {top_k}", f"there are {experts} experts")
    for training in ("moe_jitter_eps", "moe_loss_weight"):
        ffn.get(training)
    return experts, Routing(top_k, normalise=_normalises(ffn))


def _normalises(ffn: Fields) -> bool:
    """Whether a token's weights are divided by their sum, the 1-norm; null means no division, absent means 1."""
    if "moe_normalize_expert_weights" in ffn.values and ffn.get("moe_normalize_expert_weights") is None:
        return False
    ffn.expect("moe_normalize_expert_weights", 1)
    return True


class Dbrx(Mixtral):
    """A Mixtral with LayerNorms and one matrix for queries, keys and values."""

    Config = DbrxConfig
    Norm: ClassVar[type[RMSNorm]] = PlainLayerNorm
    prefix: ClassVar[str] = "transformer."

    @property
    def flat_experts(self) -> int:
        """The number of experts whose matrices a checkpoint stores in one."""
        return self.config.num_experts

    def names(self) -> Mapping[str, Entry]:
        """The name table, as in `Decoder.names`. Those of the experts are from `FlatExpertsView`."""
        c, layer = self.config, "transformer.blocks.*."
        qkv, attn = layer + "norm_attn_norm.attn.Wqkv", layer + "norm_attn_norm."
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return {
            "embed": "transformer.wte",
            "norm": "transformer.norm_f",
            "head": "lm_head",
            "layers.*.attn_norm": attn + "norm_1",
            "layers.*.attn.qkv.q": Take(qkv, (0, q)),
            "layers.*.attn.qkv.k": Take(qkv, (q, q + kv)),
            "layers.*.attn.qkv.v": Take(qkv, (q + kv, q + 2 * kv)),
            "layers.*.attn.out": attn + "attn.out_proj",
            "layers.*.mlp_norm": attn + "norm_2",
            "layers.*.mlp.router": layer + "ffn.router.layer",
            "layers.*.mlp.experts.*.gate_up.gate": layer + "ffn.experts.*.w1",
            "layers.*.mlp.experts.*.gate_up.up": layer + "ffn.experts.*.v1",
            "layers.*.mlp.experts.*.down": layer + "ffn.experts.*.w2",
            **self.pooler.names(),
        }
