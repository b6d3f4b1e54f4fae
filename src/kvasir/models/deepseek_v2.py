"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention, first dense layers, then mixtures with shared experts
and experts chosen by softmax scores, from the best groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.module import Entry, Take
from kvasir.models.config import MAX_HEAD_DIM, MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.glm4_moe import Glm4Moe, Glm4MoeConfig, read_deepseek_experts
from kvasir.models.rope import read_score_growth

NORM_EPS = 1e-6  # of the norms within attention, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class LatentConfig(Glm4MoeConfig):
    """The sizes and settings of a decoder with latent attention. head_dim is the number of rotated dimensions of a
    head.

    plain_dim: the other dimensions of a query. value_dim: of a head. q_rank, kv_rank: of the projections' latents; a
    q_rank of 0 is a single projection. interleaved: whether neighbouring pairs of dimensions turn. latent_eps: of the
    norms of the latents.
    """

    plain_dim: int = 0
    value_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    interleaved: bool = True
    latent_eps: float = NORM_EPS


def latent_fields(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    """The fields of a config with latent attention, in which `head_dim` is the number of rotated dimensions."""
    values = {**defaults, **config}
    return Fields({**values, "head_dim": values.get("qk_rope_head_dim")})


def read_latent(f: Fields) -> dict[str, Any]:
    """The sizes and settings of latent attention and those of any decoder, as keyword arguments of `LatentConfig`.
    Raises ModelFileError for a field out of range, UnsupportedModel for a feature that is not implemented."""
    f.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM)
    f.get("qk_head_dim")  # derived in published files
    sizes = read_sizes(f)
    plain = f.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM)
    bias = f.flag("attention_bias", False)
    return {
        **sizes,
        "plain_dim": plain,
        "value_dim": f.integer("v_head_dim", 1, MAX_HEAD_DIM),
        "q_rank": f.integer("q_lora_rank", 1, MAX_WIDTH, 0),
        "kv_rank": f.integer("kv_lora_rank", 1, MAX_WIDTH),
        "attn_scale": read_score_growth(f) / math.sqrt(plain + sizes["head_dim"]),
        "qkv_bias": bias,
        "out_bias": bias,
        "windows": (0,) * sizes["num_layers"],
    }


_DEFAULTS = {
    "vocab_size": 102400, "max_position_embeddings": 2048, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeepseekV2Config(LatentConfig):
    """The sizes and settings of a DeepSeek-V2."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = latent_fields(config, _DEFAULTS)
        sizes = read_latent(f)
        methods = ("greedy", "group_limited_greedy")
        f.expect("norm_topk_prob", False)  # transformers and the model's own code disagree on it
        f.expect("mlp_bias", False)
        experts = read_deepseek_experts(
            f, sizes["num_layers"], scores="softmax", methods=methods, best_of_group=1, normalise=False
        )
        f.finish()
        return cls(**sizes, **experts)


class LatentDecoder(Glm4Moe):
    """A decoder with latent attention, and the experts of a GLM-4.5."""

    config: LatentConfig

    def _mixer(self, layer: int, c: LatentConfig) -> LatentAttention:
        return LatentAttention(layer, c.width, c.heads, **self._latent_options(layer, c))

    def _latent_options(self, layer: int, c: LatentConfig) -> dict[str, Any]:
        return {
            "plain": c.plain_dim,
            "turning": c.head_dim,
            "rank": c.kv_rank,
            "value_dim": c.value_dim,
            "q_rank": c.q_rank,
            "rope": self._rope_of(layer),
            "scale": c.attn_scale,
            "eps": c.latent_eps,
            "bias": c.qkv_bias,
        }

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Glm4Moe.names`, with the matrices of latent attention."""
        return {**super().names(), **latent_names("model.layers.*.self_attn.", self.config)}


def latent_names(attn: str, c: LatentConfig) -> dict[str, Entry]:
    """Name table entries of latent attention. The matrices of keys and values are in one tensor, or each in its own
    with the keys' transposed, as llama.cpp stores them. attn: the prefix of a layer's attention."""
    plain, turning, rank, values = c.plain_dim, c.head_dim, c.kv_rank, c.value_dim
    queries, keys = attn + ("q_b_proj" if c.q_rank else "q_proj"), attn + "kv_a_proj_with_mqa"
    pairs = (*range(0, turning, 2), *range(1, turning, 2)) if c.interleaved else ()
    both, ours = attn + "kv_b_proj", "layers.*.attn."
    key_up = Take(both, (0, plain), every=plain + values, turned=plain)
    return {
        ours + "q_down": attn + "q_a_proj",
        ours + "q_norm": attn + "q_a_layernorm",
        ours + "q.plain": Take(queries, (0, plain), every=plain + turning),
        ours + "q.turning": Take(queries, (plain, plain + turning), every=plain + turning, order=pairs),
        ours + "kv_down.latent": Take(keys, (0, rank)),
        ours + "kv_down.turning": Take(keys, (rank, rank + turning), order=pairs),
        ours + "kv_norm": attn + "kv_a_layernorm",
        ours + "key_up": (attn + "k_b_proj", key_up),
        ours + "value_up": (attn + "v_b_proj", Take(both, (plain, plain + values), every=plain + values)),
    }


class DeepseekV2(LatentDecoder):
    """A decoder with latent attention and experts chosen by softmax scores."""

    Config = DeepseekV2Config
    selection: ClassVar[str] = ""
