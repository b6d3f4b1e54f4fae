"""Encoders with a rotary embedding instead of learned positions: Jina embeddings v3 (arXiv:2409.10173), Nomic Embed
(arXiv:2402.01613) and GTE (arXiv:2407.19669)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.elementary import power
from kvasir.layers.module import Entry
from kvasir.layers.moe import PlainMoE, Routing
from kvasir.layers.rope import RopeScaling
from kvasir.models.config import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, Fields
from kvasir.models.encoder import Encoder, EncoderConfig, EncoderLayer, fused, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.models.roberta import JINA_HARMLESS
from kvasir.models.rope import read_rope

_QKV = "layers.*.attn.qkv.q layers.*.attn.qkv.k layers.*.attn.qkv.v"


def _read(f: Fields, theta: float, **defaults: Any) -> dict[str, Any]:
    """The fields of `read_encoder`, and those of the rotary embedding."""
    sizes = read_encoder(f, **defaults)
    if sizes["head_dim"] % 2:
        raise ModelFileError(
            f"{f.where}: heads have {sizes['head_dim']} dimensions", "a rotary embedding needs an even number"
        )
    theta, scaling = read_rope(f, sizes["max_position"], theta)
    if scaling.factors and len(scaling.factors) != sizes["head_dim"] // 2:
        raise ModelFileError(f"{f.where}: {len(scaling.factors)} rope factors for heads of {sizes['head_dim']}")
    return {**sizes, "rope_theta": theta, "rope_scaling": scaling}


# --- Jina ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JinaV3Config(EncoderConfig):
    """The sizes and settings of a Jina v3 encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> JinaV3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"hidden_size": 1024, "num_attention_heads": 16, **config})
        if f.get("model_type") == "xlm-roberta":
            f.choice("position_embedding_type", ("rotary",))
            f.expect("use_reg_tokens", False)
            for name in JINA_HARMLESS.split():
                f.get(name)
            f.values = {**f.values, "rope_theta": f.number("rotary_emb_base", 1.0, 1e12, 10000.0)}
        found = cls(
            **_read(f, 20000.0, vocab_size=250002, max_position=8194, token_types=1, norm_eps=1e-5,
                    num_layers=24, inner=4096)
        )  # fmt: skip
        f.finish()
        return found


class JinaV3(Encoder):
    """XLM-RoBERTa with a rotary embedding. The adapters of a checkpoint are no part of it (kvasir.lora.tasks)."""

    Config = JinaV3Config
    leaves_adapters: ClassVar[bool] = True
    prefix: ClassVar[str] = "roberta."
    ignored: ClassVar[tuple[str, ...]] = (r"(roberta\.)?pooler\.dense\.(weight|bias)", r"lm_head\..*")

    def classifier(self) -> HeadShape:
        """The classifier over the first row."""
        return HeadShape("classifier.out_proj", "classifier.dense", "tanh")

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        layer = "encoder.layers.*."
        return {
            "embed": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "norm": "emb_ln",
            **fused(_QKV, f"{layer}mixer.Wqkv", self.config.width),
            "layers.*.attn.out": f"{layer}mixer.out_proj",
            "layers.*.attn_norm": f"{layer}norm1",
            "layers.*.mlp.up": f"{layer}mlp.fc1",
            "layers.*.mlp.down": f"{layer}mlp.fc2",
            "layers.*.mlp_norm": f"{layer}norm2",
            **self.pooler.names(),
        }


# --- Nomic --------------------------------------------------------------------------------------------

# The names of BERT's fields in the configs that Nomic publishes.
_NOMIC_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Fields of these configs with the only value that we support.
_NOMIC_FIXED = {
    "causal": False,
    "prenorm": False,
    "parallel_block": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "expert_choice_router": False,
    "ffn_div": 1,
}
# Whether an MLP has a gate, and its function.
_NOMIC_ACTIVATIONS = {"swiglu": (True, "silu"), "geglu": (True, "gelu"), "gelu": (False, "gelu")}
_NOMIC_HARMLESS = """
    parallel_block_tied_norm dense_seq_output fused_dropout_add_ln fused_bias_fc pad_vocab_size_multiple use_flash_attn
    reorder_and_upcast_attn moe_impl moe_resid_pdrop router_aux_loss_coef add_pooling_layer max_trained_positions
    """


@dataclass(frozen=True, slots=True)
class NomicBertConfig(EncoderConfig):
    """mixture_every: the distance of layers with a mixture of `experts` experts, from layer 1 on, 0 for none; a row
    chooses `chosen` of them. experts_bias: whether their sum has a bias."""

    mixture_every: int = 0
    experts: int = 0
    chosen: int = 0
    experts_bias: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NomicBertConfig:
        """Reads a `config.json`, as published by Nomic or as written by transformers. Raises ModelFileError for bad
        values, UnsupportedModel for features without code."""
        f = Fields({_NOMIC_FIELDS.get(name, name): value for name, value in config.items()})
        for name, value in _NOMIC_FIXED.items():
            f.expect(name, value)
        for name in _NOMIC_HARMLESS.split():
            f.get(name)
        found = _read(f, 1000.0, vocab_size=30528, max_position=2048, act="silu")
        head_dim = f.integer("head_dim", 2, MAX_HEAD_DIM, found["head_dim"])
        if head_dim % 2:
            raise ModelFileError(f"{f.where}: head_dim is {head_dim}", "a rotary embedding needs an even number")
        longest = f.integer("n_positions", 1, MAX_POSITIONS, found["max_position"])
        gated, act = True, found["act"]
        if (named := f.get("activation_function")) is not None:
            if named not in _NOMIC_ACTIVATIONS:
                supported = ", ".join(_NOMIC_ACTIVATIONS)
                raise UnsupportedModel(f"{f.where}: activation_function is {quoted(named)}", f"supported: {supported}")
            gated, act = _NOMIC_ACTIVATIONS[named]
        bias = f.flag("mlp_fc1_bias", False)
        f.expect("mlp_fc2_bias", bias)
        found |= {"head_dim": head_dim, "max_position": max(longest, found["max_position"]), "act": act}
        found |= _read_mixture(f, gated)
        attn_bias = f.flag("qkv_proj_bias", False)
        f.finish()
        return cls(**found, gated=gated, attn_bias=attn_bias, mlp_bias=bias, down_bias=bias)


def _read_mixture(f: Fields, gated: bool) -> dict[str, Any]:
    """The settings of Nomic's mixtures of experts."""
    every = f.integer("moe_every_n_layers", 0, MAX_LAYERS, 0)
    if not every:
        return {}
    if gated:
        raise UnsupportedModel(f"{f.where}: experts with gates", "supported: activation_function gelu")
    experts = f.integer("num_experts", 1, MAX_EXPERTS)
    return {
        "mixture_every": every,
        "experts": experts,
        "chosen": f.integer("moe_top_k", 1, experts),
        "experts_bias": f.flag("moe_bias", True),  # not a published field: GGUF files have no bias
    }


class NomicBert(Encoder):
    """BERT with a rotary embedding and gated MLPs, or with mixtures of MLPs in every second layer
    (arXiv:2502.07972)."""

    Config = NomicBertConfig
    config: NomicBertConfig
    prefix: ClassVar[str] = "nomic_bert."
    ignored: ClassVar[tuple[str, ...]] = (r"(nomic_bert\.)?pooler\.dense\.(weight|bias)", r"cls\..*")

    @property
    def flat_experts(self) -> int:
        """The number of experts whose matrices a checkpoint stores in one."""
        return self.config.experts

    def classifier(self) -> HeadShape:
        """The classifier over the pooler's row."""
        return HeadShape("classifier", f"{self.prefix}pooler.dense", "tanh")

    def _block(self, layer: int, c: EncoderConfig) -> EncoderLayer:
        block, own = super()._block(layer, c), self.config
        if own.mixture_every and layer % own.mixture_every == 1:
            routing = Routing(own.chosen, normalise=False)
            block.mlp = PlainMoE(c.width, c.inner, own.experts, routing, c.act, own.experts_bias)
        return block

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`. Those of the experts
        are from `FlatExpertsView`."""
        layer, c = "encoder.layers.*.", self.config
        of_experts = {"router": "router.layer", "experts.*.up": "experts.*.w1", "experts.*.down": "experts.*.w2"}
        return {
            "embed": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "norm": "emb_ln",
            **fused(_QKV, f"{layer}attn.Wqkv", c.heads * c.head_dim),
            "layers.*.attn.out": f"{layer}attn.out_proj",
            "layers.*.attn_norm": f"{layer}norm1",
            "layers.*.mlp.up": f"{layer}mlp.fc1",
            **{f"layers.*.mlp.{part}": f"{layer}mlp.{name}" for part, name in of_experts.items()},
            "layers.*.mlp.bias": f"{layer}mlp.experts",
            "layers.*.mlp.gate_up.gate": f"{layer}mlp.fc12",
            "layers.*.mlp.gate_up.up": f"{layer}mlp.fc11",
            "layers.*.mlp.down": f"{layer}mlp.fc2",
            "layers.*.mlp_norm": f"{layer}norm2",
            **self.pooler.names(),
        }


# --- GTE ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GteConfig(EncoderConfig):
    """The sizes and settings of a GTE encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GteConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        _read_fixed(f)
        sizes = _read(f, 160000.0, vocab_size=250048, max_position=8192, token_types=1, fewest_types=0)
        f.finish()
        return cls(**sizes, gated=True, mlp_bias=False)


def _read_fixed(f: Fields) -> None:
    """The fields of the authors' configs that have one supported value, or that choose between equal computations."""
    f.expect("position_embedding_type", "rope")
    f.expect("layer_norm_type", "layer_norm")
    f.expect("pack_qkv", True)
    f.expect("logn_attention_scale", False)
    f.get("logn_attention_clip1")  # of logn_attention_scale
    f.get("use_memory_efficient_attention")


class Gte(Encoder):
    """BERT with a rotary embedding and gated MLPs."""

    Config = GteConfig
    prefix: ClassVar[str] = "gte."
    ignored: ClassVar[tuple[str, ...]] = (
        r"(.*\.)?pooler\.dense\.(weight|bias)",
        r"lm_head\..*",
        r".*\.rotary_emb\.inv_freq",
    )

    def classifier(self) -> HeadShape:
        """The classifier over the pooler's row."""
        return HeadShape("classifier", f"{self.prefix}pooler.dense", "tanh")

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        layer, c = "encoder.layer.*.", self.config
        return {
            "embed": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "norm": "embeddings.LayerNorm",
            **fused(_QKV, f"{layer}attention.qkv_proj", c.width),
            "layers.*.attn.out": f"{layer}attention.o_proj",
            "layers.*.attn_norm": f"{layer}attn_ln",
            **fused("layers.*.mlp.gate_up.up layers.*.mlp.gate_up.gate", f"{layer}mlp.up_gate_proj", c.inner),
            "layers.*.mlp.down": f"{layer}mlp.down_proj",
            "layers.*.mlp_norm": f"{layer}mlp_ln",
            **self.pooler.names(),
        }


@dataclass(frozen=True, slots=True)
class NewConfig(GteConfig):
    """The sizes and settings of a GTE encoder, in the format of its authors."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NewConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({name: value for name, value in config.items() if name != "rope_scaling"})
        _read_fixed(f)
        sizes = _read(f, 10000.0, max_position=2048, token_types=1, fewest_types=0)
        f.finish()
        sizes |= _scaled(config.get("rope_scaling"), sizes["rope_theta"], sizes["head_dim"])
        return cls(**sizes, gated=True, mlp_bias=False)


def _scaled(scaling: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings of the rotary embedding with fixed NTK scaling: theta times the factor, and all frequencies divided
    by factor^(2 / head_dim)."""
    if scaling is None:
        return {}
    f = Fields(scaling if isinstance(scaling, Mapping) else {}, "config.json: rope_scaling")
    f.expect("mixed_b", None)
    f.choice("type", ("ntk",))
    factor = f.number("factor", 1.0, 1e6)
    if unknown := sorted(set(f.values) - f.read):
        raise UnsupportedModel(f"{f.where}: {quoted(unknown[0])} is unknown", "rope settings are never ignored")
    return {"rope_theta": theta * factor, "rope_scaling": RopeScaling("linear", power(factor, 2, head_dim))}


class New(Gte):
    """GTE under the name of its authors."""

    Config = NewConfig
    prefix: ClassVar[str] = "new."
