"""Nemotron-H and Nemotron 3 (arXiv:2504.03624): blocks of one kind each, Mamba 2, attention without positions, an MLP
with squared relu, or a mixture of such MLPs beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer, Mixer
from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry, Take
from kvasir.layers.moe import LatentMoE, Routing
from kvasir.models.config import MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.glm4_moe import read_deepseek_experts
from kvasir.models.llama import Llama
from kvasir.models.state_spaces import KINDS, Mamba2Settings, mamba2_names, read_act, read_scan, read_taps

_KINDS = {**KINDS, "mlp": "mlp", "moe": "moe"}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "num_attention_heads": 32,
    "vocab_size": 131072,
}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
# Others' kernels, training, and rotary embeddings, which these models do not have.
_UNUSED = """
    chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap n_shared_experts norm_eps
    num_logits_to_keep partial_rotary_factor rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max
    time_step_min use_mamba_kernels mtp_layers_block_type mtp_hybrid_override_pattern num_hidden_layers
    """.split()
_ONE = Routing(1)


@dataclass(frozen=True, slots=True)
class NemotronHConfig(DecoderConfig):
    """The sizes and settings of a Nemotron-H.

    kinds: of each block, "mamba", "attention", "mlp" or "moe". mamba: the settings of the first. The others are those
    of the mixtures, as in `LatentMoE`. drafting: its blocks for multi-token prediction, which are not loaded.
    """

    kinds: tuple[str, ...] = ()
    mamba: Mamba2Settings | None = None
    num_experts: int = 0
    routing: Routing = _ONE
    expert_inner: int = 0
    shared_inner: int = 0
    latent: int = 0
    drafting: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        kinds = read_blocks(f)
        head_dim = f.get("head_dim") or f.get("attention_head_dim") or 128  # the latter in older configs
        f.values = {**f.values, "num_hidden_layers": len(kinds), "head_dim": head_dim}
        sizes = read_sizes(f, kv_heads=8, head_dim=128, act="mlp_hidden_act", eps="layer_norm_epsilon", partial=True)
        for name in (*_UNUSED, *(_EXPERTS if "moe" not in kinds else ())):
            f.get(name)
        f.expect("sliding_window", None)
        f.expect("attention_bias", False)
        bias = f.flag("use_bias", False)
        mamba = Mamba2Settings(
            _read_scan(f),
            read_taps(f, "conv_kernel"),
            read_act(f, "mamba_hidden_act"),
            conv_bias=f.flag("use_conv_bias", True),
            bias=bias,
        )
        experts = _read_experts(f) if "moe" in kinds else {}
        for name in _MIXTURES:
            f.get(name)
        settings = {
            "mlp_bias": f.flag("mlp_bias", False),
            "drafting": f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0),
        }
        f.finish()
        return cls(**sizes, **experts, **settings, kinds=kinds, mamba=mamba, windows=(0,) * len(kinds))


_MIXTURES = """
    moe_shared_expert_intermediate_size moe_latent_size n_group topk_group norm_topk_prob routed_scaling_factor
    output_router_logits
    """.split()


def _read_scan(f: Fields) -> Any:
    heads, width = f.integer("mamba_num_heads", 1, 1024, 128), f.integer("mamba_head_dim", 1, 256, 64)
    names = ("mamba_num_heads", "n_groups", "ssm_state_size")
    return read_scan(f, inner=heads * width, names=names, defaults=(128, 8, 128), head_dim="mamba_head_dim")


def _read_experts(f: Fields) -> dict[str, Any]:
    f.values = {**_EXPERTS, **f.values, "hidden_act": None, "first_k_dense_replace": 0}
    found = read_deepseek_experts(f, 1)
    del found["sparse"]
    found["shared_inner"] = f.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH, 7688)
    return {**found, "latent": f.integer("moe_latent_size", 1, MAX_WIDTH, 0)}


def read_blocks(f: Fields) -> tuple[str, ...]:
    """The kind of each block, from a list of names or a string of letters."""
    names = [f.get(name) for name in ("layers_block_type", "layer_types")]
    kinds, letters = next((value for value in names if value is not None), None), f.get("hybrid_override_pattern")
    if kinds is None and letters is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    given, table = (list(letters), _LETTERS) if kinds is None and isinstance(letters, str) else (kinds, _KINDS)
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LAYERS:
        raise ModelFileError(f"{f.where}: layers_block_type is {given!r:.80}", "expected a list of names")
    for kind in given:
        if not isinstance(kind, str) or kind not in table:
            raise UnsupportedModel(f"{f.where}: a block is a {kind!r:.80}", f"supported: {', '.join(table)}")
    return tuple(table[kind] for kind in given)


class NemotronH(Llama):
    """A decoder whose blocks have a mixer or an MLP."""

    Config = NemotronHConfig
    config: NemotronHConfig
    prefix = "backbone."

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including the head for multi-token prediction."""
        first = self.config.num_layers
        drafting = (rf"(backbone|model)\.layers\.{first + i}\..*" for i in range(self.config.drafting))
        return (*super().ignored, r"mtp\..*", *drafting)

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        if c.kinds[layer] in ("mamba", "attention"):
            return DecoderLayer(self._norm(), self._mixer(layer, c), None, None)
        return DecoderLayer(None, None, self._norm(), self._mlp(layer, c))

    def _mixer(self, layer: int, c: Any) -> Mixer:
        at = sum(kind in ("mamba", "attention") for kind in c.kinds[:layer])  # only these have a cache
        if c.kinds[layer] == "mamba":
            return c.mamba.layer(at, c.width, c.norm_eps)
        mixer = Attention(at, c.width, c.heads, c.kv_heads, c.head_dim)
        mixer.model_layer = layer
        return mixer

    def _mlp(self, layer: int, c: Any) -> Any:
        if c.kinds[layer] == "mlp":
            return MLP(c.width, c.inner, c.act, c.mlp_bias)
        return LatentMoE(
            c.width,
            c.expert_inner,
            c.num_experts,
            c.routing,
            c.act,
            shared_inner=c.shared_inner,
            latent=c.latent,
            bias=c.mlp_bias,
            selection="e_score_correction_bias",
        )

    def names(self) -> Mapping[str, Entry]:
        """The name table; checkpoints of transformers begin with "model" instead of "backbone"."""
        layer = "backbone.layers.*."
        mixer = layer + "mixer."
        names: dict[str, Any] = {
            "embed": "backbone.embeddings",
            "norm": "backbone.norm_f",
            "layers.*.attn_norm": layer + "norm",
            "layers.*.mlp_norm": layer + "norm",
            **{f"layers.*.attn.qkv.{part}": f"{mixer}{part}_proj" for part in "qkv"},
            **mamba2_names(layer, "layers.*.attn", self.config.mamba, "mixer"),
            "layers.*.attn.out": (mixer + "o_proj", mixer + "out_proj"),
            "layers.*.mlp.up": mixer + "up_proj",
            "layers.*.mlp.down": mixer + "down_proj",
            "layers.*.mlp.router": mixer + "gate",
            "layers.*.mlp.selection": mixer + "gate",
            "layers.*.mlp.enter": mixer + "fc1_latent_proj",
            "layers.*.mlp.leave": mixer + "fc2_latent_proj",
            **{f"layers.*.mlp.experts.*.{part}": f"{mixer}experts.*.{part}_proj" for part in ("up", "down")},
            **{f"layers.*.mlp.shared.{part}": f"{mixer}shared_experts.{part}_proj" for part in ("up", "down")},
        }
        return {**{path: _both(entry) for path, entry in names.items()}, "head": "lm_head", **self.pooler.names()}


def _both(entry: Any) -> Entry:
    given = entry if isinstance(entry, tuple) else (entry,)
    return (*given, *(_renamed(one) for one in given))


def _renamed(entry: str | Take) -> str | Take:
    if isinstance(entry, Take):
        return replace(entry, name=str(_renamed(entry.name)))
    return "model." + entry.removeprefix("backbone.")
