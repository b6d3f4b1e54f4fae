"""DeBERTa v2 and v3 (arXiv:2006.03654, arXiv:2111.09543): BERT whose queries and keys meet relative positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.module import Entry
from kvasir.layers.relative import MAX_HEAD_DIM, Disentangled, PositionTable
from kvasir.layers.vector import FUNCTIONS, VectorNorm
from kvasir.models.config import MAX_POSITIONS, Fields
from kvasir.models.encoder import Encoder, EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task

_MOST_BUCKETS, _MOST_DISTANCE = 1024, 1 << 14  # more would make tables larger than any published model


@dataclass(frozen=True, slots=True)
class DebertaV2Config(EncoderConfig):
    """buckets: of relative positions in one direction, 0 for one for each. farthest: the greatest distance. to_keys,
    to_queries: whether queries meet the keys of positions, and keys their queries. norm_positions: whether the
    embeddings of positions are normalised. pooler_act: of a classifier."""

    buckets: int = 0
    farthest: int = 512
    to_keys: bool = True
    to_queries: bool = True
    norm_positions: bool = True
    pooler_act: str = "gelu"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DebertaV2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"hidden_size": 1536, "num_attention_heads": 24, **config})
        sizes = read_encoder(
            f, vocab_size=128100, inner=6144, num_layers=24, token_types=0, fewest_types=0, norm_eps=1e-7
        )
        for name, value in (("relative_attention", True), ("share_att_key", True)):
            if f.get(name) is not value:
                raise UnsupportedModel(f"{f.where}: {name} is {f.get(name)!r}", f"supported: {value!r}")
        f.expect("attention_head_size", sizes["head_dim"])
        f.expect("embedding_size", sizes["width"])
        f.expect("conv_kernel_size", 0)
        f.get("legacy")  # of the masked-LM head
        if sizes["head_dim"] > MAX_HEAD_DIM:
            raise ModelFileError(
                f"{f.where}: heads have {sizes['head_dim']} dimensions", f"expected at most {MAX_HEAD_DIM}"
            )
        farthest = f.integer("max_relative_positions", -1, MAX_POSITIONS, -1)
        farthest = sizes["max_position"] if farthest < 1 else farthest
        buckets = max(0, f.integer("position_buckets", -1, _MOST_BUCKETS, -1))
        if not buckets // 2 + 1 < farthest <= _MOST_DISTANCE or buckets % 2 or buckets == 2:
            raise ModelFileError(
                f"{f.where}: {buckets} position_buckets up to the distance {farthest}",
                f"expected an even number other than 2, and a distance of more than half of it, at most "
                f"{_MOST_DISTANCE}",
            )
        parts: dict[str, Any] = _parts(f)
        found = cls(
            **sizes,
            learned_positions=f.flag("position_biased_input", True),
            buckets=buckets,
            farthest=farthest,
            **parts,
            norm_positions=f.choice("norm_rel_ebd", ("none", "layer_norm"), "none") == "layer_norm",
            pooler_act=f.choice("pooler_hidden_act", tuple(FUNCTIONS), "gelu"),
        )
        f.finish()
        return found


def _parts(f: Fields) -> dict[str, bool]:
    """Which parts of the scores depend on relative positions."""
    given = f.get("pos_att_type") or []
    names = given.lower().split("|") if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelFileError(f"{f.where}: pos_att_type is {quoted(given)}", "expected a list of names")
    parts = {name.strip() for name in names}
    if not parts or not parts <= {"c2p", "p2c"}:
        raise UnsupportedModel(f"{f.where}: pos_att_type is {quoted(given)}", "supported: c2p, p2c, or both")
    return {"to_keys": "c2p" in parts, "to_queries": "p2c" in parts}


class DebertaV2(Encoder):
    """A bidirectional encoder with disentangled attention."""

    Config = DebertaV2Config
    config: DebertaV2Config
    prefix: ClassVar[str] = "deberta."
    ignored: ClassVar[tuple[str, ...]] = (
        r"(.*\.)?embeddings\.position_ids",
        r"(deberta\.)?embeddings\.position_embeddings\.weight",
        r"(.*\.)?pooler\.dense\.(weight|bias)",
        r"cls\..*",
        r"lm_predictions\..*",
        r"mask_predictions\..*",
    )

    def __init__(self, config: DebertaV2Config):
        c = config
        self.embeddings = PositionTable(2 * (c.buckets or c.farthest), c.width)
        self.embeddings_norm = VectorNorm(c.width, c.norm_eps) if c.norm_positions else None
        super().__init__(config)

    def _relative(self, layer: int) -> dict[str, Any]:
        c = self.config
        parts = {"to_keys": c.to_keys, "to_queries": c.to_queries, "buckets": c.buckets, "farthest": c.farthest}
        return {
            "relative": Disentangled(self.embeddings, self.embeddings_norm, c.heads, **parts),
            "scale": 1 / math.sqrt(c.head_dim * (1 + c.to_keys + c.to_queries)),
        }

    def classifier(self) -> HeadShape:
        """The classifier over the pooler's row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier", "pooler.dense", self.config.pooler_act)

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        prefix = self.prefix
        layer = f"{prefix}encoder.layer.*."
        return {
            "embed": f"{prefix}embeddings.word_embeddings",
            "positions": f"{prefix}embeddings.position_embeddings",
            "token_types": f"{prefix}embeddings.token_type_embeddings",
            "norm": f"{prefix}embeddings.LayerNorm",
            "embeddings": f"{prefix}encoder.rel_embeddings",
            "embeddings_norm": f"{prefix}encoder.LayerNorm",
            "layers.*.attn.qkv.q": f"{layer}attention.self.query_proj",
            "layers.*.attn.qkv.k": f"{layer}attention.self.key_proj",
            "layers.*.attn.qkv.v": f"{layer}attention.self.value_proj",
            "layers.*.attn.relative.query": f"{layer}attention.self.query_proj",
            "layers.*.attn.relative.key": f"{layer}attention.self.key_proj",
            "layers.*.attn.out": f"{layer}attention.output.dense",
            "layers.*.attn_norm": f"{layer}attention.output.LayerNorm",
            "layers.*.mlp.up": f"{layer}intermediate.dense",
            "layers.*.mlp.down": f"{layer}output.dense",
            "layers.*.mlp_norm": f"{layer}output.LayerNorm",
            **self.pooler.names(),
        }
