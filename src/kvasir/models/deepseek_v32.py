"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5: DeepSeek-V3 whose tokens attend to the `index_topk` earlier ones that an
indexer selects. In some GLM-5 a layer may reuse the selection of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.module import Entry, Take
from kvasir.layers.sparse_attention import IndexerSizes, SparseLatentAttention
from kvasir.models.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Fields
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent
from kvasir.models.drafting import Drafting, longer
from kvasir.models.glm4_moe import read_deepseek_experts
from kvasir.models.glm4_moe_lite import read_sparse_layers

_DEEPSEEK = {
    "vocab_size": 129280, "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "index_n_heads": 64, "indexer_rope_interleave": False,
}  # fmt: skip
_KINDS = ("indexed_attention", "deepseek_sparse_attention")
_GLM = {
    **_DEEPSEEK, "vocab_size": 154880, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1, "index_n_heads": 32,
    "indexer_rope_interleave": True,
}  # fmt: skip
_MAX_SELECTED = 1 << 16  # tokens: each row of a step has room for so many positions


_NO_INDEXER = IndexerSizes(1, 2, 1)


@dataclass(frozen=True, slots=True)
class DeepseekV32Config(LatentConfig):
    """The sizes and settings of a DeepSeek-V3.2. indexer: its sizes. selects: per layer, whether it has an indexer.
    paired: whether neighbouring pairs of dimensions turn in indexers."""

    indexer: IndexerSizes = _NO_INDEXER
    selects: tuple[bool, ...] = ()
    paired: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        is_glm = config.get("model_type") == "glm_moe_dsa"
        f = latent_fields(config, _GLM if is_glm else _DEEPSEEK)
        sizes = read_latent(f)
        if not sizes["q_rank"]:
            raise UnsupportedModel(f"{f.where}: q_lora_rank is 0", "an indexer reads the latent of the queries")
        layers = sizes["num_layers"]
        experts = read_deepseek_experts(f, layers)
        experts["sparse"] = read_sparse_layers(f, layers) or experts["sparse"]
        indexer = IndexerSizes(
            f.integer("index_n_heads", 1, MAX_HEADS),
            f.integer("index_head_dim", sizes["head_dim"], MAX_HEAD_DIM, 128),
            f.integer("index_topk", 1, _MAX_SELECTED, 2048),
        )
        selects, paired = _read_indexers(f, layers) if is_glm else (True,) * layers, f.flag("indexer_rope_interleave")
        _check_layers(f)
        f.expect("mlp_bias", False)
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, f.integer("num_mtp_layers", 0, MAX_LAYERS, 0))
        interleaved = f.flag("rope_interleave", True)
        f.finish()
        found = cls(
            **sizes, **experts, drafting=drafting, interleaved=interleaved, indexer=indexer, selects=selects,
            paired=paired,
        )  # fmt: skip
        return replace(found, indexer=replace(indexer, top_k=min(indexer.top_k, found.context_length)))


def _check_layers(f: Fields) -> None:
    """Reads the kinds of layers, of which there is only one. Raises UnsupportedModel."""
    kinds = f.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
        raise UnsupportedModel(f"{f.where}: layer_types is {quoted(kinds)}", f"supported: {', '.join(_KINDS)}")


def _read_indexers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have an indexer, from `indexer_types`, else from a pattern such as "FSSF", else from every how many
    layers there is one. Raises ModelFileError."""
    kinds, pattern = f.get("indexer_types"), f.get("index_topk_pattern")
    every, first = f.integer("index_topk_freq", 0, MAX_LAYERS, 1), f.integer("index_skip_topk_offset", 0, MAX_LAYERS, 2)
    if kinds is None and pattern is not None:
        named = {"F": "full", "S": "shared"}
        kinds = [named.get(kind) for kind in pattern] if isinstance(pattern, str) else pattern
    if kinds is None:
        return tuple(max(i - first + 1, 0) % max(every, 1) == 0 for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("full", "shared") for kind in kinds):
        raise ModelFileError(
            f"{f.where}: indexer_types is {quoted(kinds)}", f'expected "full" or "shared" for {layers} layers'
        )
    if kinds[0] == "shared":
        raise ModelFileError(f'{f.where}: indexer_types begins with "shared"', 'the first layer must be "full"')
    return tuple(kind == "full" for kind in kinds)


class DeepseekV32(LatentDecoder):
    """A DeepSeek-V3 with indexers. A layer has one place in the cache, and one with an indexer another after it."""

    Config = DeepseekV32Config
    config: DeepseekV32Config

    def _mixer(self, layer: int, c: DeepseekV32Config) -> LatentAttention:  # type: ignore[override]
        mixer = SparseLatentAttention(
            layer + sum(c.selects[:layer]),
            c.width,
            c.heads,
            sizes=c.indexer,
            selects=c.selects[layer],
            **self._latent_options(layer, c),
        )
        mixer.model_layer = layer
        return mixer

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kinds of the caches, layer by layer: of latent rows, then of the indexer's keys if it has one."""
        mixers: list[Any] = [layer.attn for layer in self.layers]
        return tuple(
            part.cache() for mixer in mixers for part in (mixer, mixer.indexer) if part is not None
        )  # fmt: skip

    @property
    def drafting(self) -> Drafting | None:
        """As `Glm4Moe.drafting`; these layers have indexers."""
        found, c = super().drafting, self.config
        if found is None:
            return None
        return replace(found, config=longer(c, c.drafting, windows=0, sparse=True, selects=True))

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Glm4Moe.ignored`, and the indexers of layers that reuse a selection."""
        shared = (i for i, selects in enumerate(self.config.selects) if not selects)
        return (*super().ignored, *(rf"model\.layers\.{i}\.self_attn\.indexer\..*" for i in shared))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `LatentDecoder.names`, with the indexers."""
        c, theirs, ours = self.config, "model.layers.*.self_attn.indexer.", "layers.*.attn.indexer."
        turning, dim = c.head_dim, c.indexer.dim
        order = (*range(0, turning, 2), *range(1, turning, 2), *range(turning, dim)) if c.paired else ()
        turned = {
            ours + part: Take(theirs + name, order=order) if order else theirs + name
            for part, name in (("q", "wq_b"), ("k", "wk"), ("k_norm", "k_norm"))
        }
        return {**super().names(), **turned, ours + "weights": theirs + "weights_proj"}
