"""RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116): BERT whose positions begin after that of padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry, Take
from kvasir.models.bert import Bert
from kvasir.models.config import MAX_VOCAB, Fields
from kvasir.models.encoder import EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task

# Fields of the configs of Jina's models with this type: of adapters, of training and of how to compute.
JINA_HARMLESS = """
    emb_pooler load_trained_adapters lora_adaptations lora_alpha lora_dropout_p lora_main_params_trainable lora_rank
    task_instructions truncate_dim use_flash_attn
    """
_PARTS = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class RobertaConfig(EncoderConfig):
    """The sizes and settings of a RoBERTa encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RobertaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        f.expect("position_embedding_type", "absolute")
        f.expect("use_reg_tokens", False)
        for name in JINA_HARMLESS.split():
            f.get(name)
        sizes = read_encoder(f, vocab_size=50265, fewest_types=0)
        first = f.integer("pad_token_id", 0, MAX_VOCAB, 1) + 1
        first = f.integer("first_position", 0, first, first)  # not a published field: GGUF files begin at 0
        if first >= sizes["max_position"]:
            raise ModelFileError(
                f"{f.where}: max_position_embeddings is {sizes['max_position']} and the first position is {first}",
                "expected positions after that of pad_token_id",
            )
        f.finish()
        return cls(**{**sizes, "max_position": sizes["max_position"] - first, "first_position": first})


class Roberta(Bert):
    """A bidirectional encoder. The table of positions begins at `first_position`."""

    Config = RobertaConfig
    prefix: ClassVar[str] = "roberta."
    ignored: ClassVar[tuple[str, ...]] = (*Bert.ignored, r"lm_head\..*")

    def classifier(self) -> HeadShape:
        """The classifier over the first row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier.out_proj", "classifier.dense", "tanh")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Bert.names`, with the positions that texts have, and Jina's names as alternatives."""
        table, c = super().names(), self.config
        rows = (c.first_position, c.first_position + c.max_position)
        table = {**table, "positions": Take(f"{self.prefix}embeddings.position_embeddings", rows)}
        return table | {name: (cast("str", table[name]), other) for name, other in self._jina_names().items()}

    def _jina_names(self) -> dict[str, str | Take]:
        """The names of Jina's own code for this model, as in jina-reranker-v2."""
        layer, width = f"{self.prefix}encoder.layers.*.", self.config.width
        parts = {
            f"layers.*.attn.qkv.{part}": Take(f"{layer}mixer.Wqkv", (i * width, (i + 1) * width))
            for i, part in enumerate(_PARTS)
        }
        return {
            "norm": f"{self.prefix}emb_ln",
            **parts,
            "layers.*.attn.out": f"{layer}mixer.out_proj",
            "layers.*.attn_norm": f"{layer}norm1",
            "layers.*.mlp.up": f"{layer}mlp.fc1",
            "layers.*.mlp.down": f"{layer}mlp.fc2",
            "layers.*.mlp_norm": f"{layer}norm2",
        }
