"""ModernBERT (arXiv:2412.13663): an encoder with norms before its layers, gated MLPs and rotary embeddings. In two of
three layers a token attends to its neighbourhood, with a rotary embedding of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvasir.caches import Around, CacheKind, PagedKV
from kvasir.errors import ModelFileError
from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry
from kvasir.layers.norm import LayerNorm, PlainLayerNorm, RMSNorm
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.layers.vector import FUNCTIONS
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.encoder import fused
from kvasir.models.gemma3_text import split_rope
from kvasir.models.llama import Llama
from kvasir.models.pooling import HeadShape, Pooling, pooling_of
from kvasir.models.rope import read_rope
from kvasir.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

_DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
}
# Fields of training, of masked-LM and of attention kernels.
_HARMLESS = """
    position_embedding_type layer_norm_eps deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    repad_logits_with_grad decoder_bias tie_word_embeddings
    """


@dataclass(frozen=True, slots=True)
class ModernBertConfig(DecoderConfig):
    """distances: per layer, how far a token's neighbourhood reaches in both directions, 0 for the whole text.
    local_theta, local_scaling: the rotary embedding of layers with a neighbourhood. norm_bias: whether norms have a
    bias. head: of a classifier."""

    distances: tuple[int, ...] = ()
    local_theta: float = 1e4
    local_scaling: RopeScaling = field(default_factory=RopeScaling)
    norm_bias: bool = False
    head: HeadShape = field(default_factory=lambda: HeadShape("classifier"))

    @property
    def context_length(self) -> int:
        """Maximum tokens of a text."""
        return min(self.max_position, self.pooling.max_length or self.max_position)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModernBertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(config)
        f = Fields({**_DEFAULTS, **full})
        for name in _HARMLESS.split():
            f.get(name)
        f.values = {**f.values, "rope_theta": f.number("global_rope_theta", 1.0, 1e12, 160000.0)}
        sizes = read_sizes(f, act="hidden_activation", eps="norm_eps", both_ways=True)
        if sizes["kv_heads"] != sizes["heads"] or sizes["heads"] * sizes["head_dim"] != sizes["width"]:
            raise ModelFileError(f"{f.where}: {sizes['heads']} heads of {sizes['head_dim']}", "expected those of width")
        layers = sizes["num_layers"]
        every = f.integer("global_attn_every_n_layers", 1, MAX_LAYERS, 3)
        slides = read_sliding_layers(f, layers) or [i % every != 0 for i in range(layers)]
        distance = f.integer("local_attention", 2, MAX_POSITIONS, 128) // 2
        local["rope_theta"] = f.number("local_rope_theta", 1.0, 1e12, 1e4)
        theta, scaling = read_rope(Fields(local), sizes["max_position"])
        bias, mlp_bias, norm_bias = (f.flag(f"{name}_bias", False) for name in ("attention", "mlp", "norm"))
        head = HeadShape(
            "classifier", "head.dense", f.choice("classifier_activation", tuple(FUNCTIONS), "gelu"), "head.norm",
            f.choice("classifier_pooling", ("cls", "mean"), "cls"), f.flag("classifier_bias", False),
            eps=sizes["norm_eps"], norm_bias=norm_bias,
        )  # fmt: skip
        f.finish()
        sizes |= {"tied": False, "pooling": pooling_of(f.values, Pooling("mean"))}
        return cls(
            **sizes, windows=(0,) * layers, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, norm_bias=norm_bias,
            distances=tuple(distance * slide for slide in slides), local_theta=theta, local_scaling=scaling,
            head=head,
        )  # fmt: skip


class ModernBert(Llama):
    """A bidirectional encoder whose embeddings are normalised, so that the first layer does not do it again."""

    Config = ModernBertConfig
    config: ModernBertConfig
    bidirectional: ClassVar[bool] = True

    def __init__(self, config: ModernBertConfig):
        self.local_rope = Rope(config.rotary_dim, config.local_theta, config.local_scaling)
        super().__init__(config)
        self.embed_norm = self._norm()

    def classifier(self) -> HeadShape | None:
        """The classifier over a row of `head`, which a token classifier would need for every row."""
        return None if self.config.pooling.task is Task.TOKEN_CLASSIFY else self.config.head

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors of other heads."""
        return (r"head\..*", r"decoder\..*")

    def _norm(self) -> RMSNorm:
        kind = LayerNorm if self.config.norm_bias else PlainLayerNorm
        return kind(self.config.width, self.config.norm_eps)

    def _block(self, layer: int, c: DecoderConfig) -> DecoderLayer:
        mlp = GatedMLP(c.width, c.inner, c.act, c.mlp_bias)
        return DecoderLayer(self._norm() if layer else None, self._mixer(layer, c), self._norm(), mlp)

    def _rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.config.distances[layer] else self.rope

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD = self.embed_norm(self.embed(tokens_T))
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, batch)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer."""
        c = self.config
        return tuple(
            Around(c.kv_heads, c.head_dim, distance=distance) if distance else PagedKV(c.kv_heads, c.head_dim)
            for distance in c.distances
        )

    def names(self) -> Mapping[str, Entry]:
        """The name table, as in `Decoder.names`."""
        layer, c = "model.layers.*.", self.config
        parts = " ".join(f"layers.*.attn.qkv.{part}" for part in "qkv")
        return {
            "embed": "model.embeddings.tok_embeddings",
            "embed_norm": "model.embeddings.norm",
            "norm": "model.final_norm",
            "layers.*.attn_norm": layer + "attn_norm",
            **fused(parts, layer + "attn.Wqkv", c.width),
            "layers.*.attn.out": layer + "attn.Wo",
            "layers.*.mlp_norm": layer + "mlp_norm",
            **fused("layers.*.mlp.gate_up.gate layers.*.mlp.gate_up.up", layer + "mlp.Wi", c.inner),
            "layers.*.mlp.down": layer + "mlp.Wo",
            **self.pooler.names(),
        }
