"""The shared parts of Llama-like decoder-only models: the sizes in their configs, the checkpoint's names, the forward,
and the head: from hidden rows to logits or to an embedding. The blocks are in each model's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError
from kvasir.layers.block import DecoderLayer
from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.linear import Head
from kvasir.layers.mlp import ACTIVATIONS
from kvasir.layers.module import Entry, Module, Take
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.models.config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from kvasir.models.pooling import HeadShape, Pooler, Pooling, pooling_of
from kvasir.models.rope import read_rope, read_rotary_share
from kvasir.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch
    from kvasir.models.drafting import Drafting


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes and settings of a decoder.

    windows: per layer, in tokens, 0 for full attention. head_norm: whether q and k are normalised. head_bias: of the
    logits. qkv_clip: the greatest magnitude of queries, keys and values, 0 for none. rotary_dim: the
    number of rotated dimensions of a head. rotates: per layer, whether it has a rotary embedding; empty if all have.
    attn_scale: of the scores, None for head_dim^-0.5. embed_scale, residual_scale, logit_scale: of the embedded tokens,
    of what attention and the MLP add, and of the logits. bidirectional: whether each token attends to the whole text.
    """

    vocab_size: int
    width: int
    inner: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    max_position: int
    norm_eps: float
    act: str
    rope_theta: float
    rope_scaling: RopeScaling
    tied: bool
    pooling: Pooling
    windows: tuple[int, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    head_bias: bool = False
    qkv_clip: float = 0.0
    rotates: tuple[bool, ...] = ()
    attn_scale: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    bidirectional: bool = False

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence."""
        return self.rope_scaling.context_length(self.max_position)


def read_sizes(
    f: Fields,
    *,
    kv_heads: int = 0,
    head_dim: int = 0,
    act: str = "hidden_act",
    eps: str = "rms_norm_eps",
    partial: bool = False,
    both_ways: bool = False,
) -> dict[str, Any]:
    """The fields that Llama-like configs share, as keyword arguments of `DecoderConfig`.

    kv_heads, head_dim: the family's defaults for absent fields; 0, like null in the file, derives the value from the
    other fields. act, eps: the names of the fields of the activation and of the norms' epsilon. partial: whether only a
    part of a head may be rotated (`partial_rotary_factor`). both_ways: whether tokens may attend to the whole text
    (`is_causal`). Raises ModelFileError for a field out of range, UnsupportedModel for a feature that is not
    implemented.
    """
    if not both_ways:
        f.expect("is_causal", True)
    width = f.integer("hidden_size", 1, MAX_WIDTH)
    heads = f.integer("num_attention_heads", 1, MAX_HEADS)
    absent = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    kv_heads, head_dim = (0 if name in f.values else default for name, default in absent.items())
    kv_heads = f.integer("num_key_value_heads", 1, MAX_HEADS, kv_heads or heads)
    if heads % kv_heads:
        raise ModelFileError(f"{f.where}: {heads} attention heads cannot share {kv_heads} key-value heads")
    head_dim = f.integer("head_dim", 2, MAX_HEAD_DIM, head_dim or max(2, width // heads))
    if head_dim % 2:
        raise ModelFileError(f"{f.where}: head_dim is {head_dim}", "a rotary embedding needs an even number")
    max_position = f.integer("max_position_embeddings", 1, MAX_POSITIONS)
    theta, scaling = read_rope(f, max_position, partial=partial)
    rotary_dim = int(head_dim * read_rotary_share(f))
    if rotary_dim % 2 or not rotary_dim:
        raise ModelFileError(f"{f.where}: {rotary_dim} of {head_dim} dimensions rotate", "expected an even number")
    for factors in (scaling.factors, scaling.long_factors):
        if factors and len(factors) != rotary_dim // 2:
            raise ModelFileError(f"{f.where}: {len(factors)} rope factors for {rotary_dim} rotary dimensions")
    return {
        "vocab_size": f.integer("vocab_size", 1, MAX_VOCAB),
        "width": width,
        "inner": f.integer("intermediate_size", 1, MAX_WIDTH),
        "num_layers": f.integer("num_hidden_layers", 1, MAX_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "max_position": max_position,
        "norm_eps": f.number(eps, 0.0, 1.0, 1e-6),
        "act": f.choice(act, tuple(ACTIVATIONS), "silu"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": f.flag("tie_word_embeddings", False),
        "pooling": pooling_of(f.values, Pooling("last")),
        "bidirectional": both_ways and not f.flag("is_causal", True),
    }


class Decoder(Module):
    """Tokens to hidden rows to logits. A subclass creates the blocks. Norm: the class of its norms."""

    Norm: ClassVar[type[RMSNorm]] = RMSNorm
    # A checkpoint of the bare model omits this prefix in its names.
    prefix: ClassVar[str] = "model."
    # A field that is a number of layers for multi-token prediction, and their tensors, counted if it is missing.
    counted: ClassVar[tuple[str, str] | None] = None

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.rope = Rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
        self.embed = VocabularyEmbedding(config.vocab_size, config.width)
        self.layers: list[DecoderLayer] = []  # filled by the subclass
        self.norm = self._norm()
        vocabulary = "model.embed_tokens" if config.tied else "lm_head"
        self.pooler = Pooler(config.pooling, config.width, self.classifier(), vocabulary)
        if (most := max(config.pooling.tokens, default=0)) >= config.vocab_size:
            raise ModelFileError(f"a score of token {most}", f"the vocabulary has {config.vocab_size}")
        self.head = None
        if Task.GENERATE in self.tasks:
            tied = self.embed if config.tied else None
            self.head = Head(config.width, config.vocab_size, config.head_bias, tied)

    @property
    def bidirectional(self) -> bool:
        """Whether each token attends to the whole text."""
        return self.config.bidirectional

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What it is for: to generate and to embed, unless its checkpoint has another head or none."""
        task = self.config.pooling.task
        if self.pooler.classifier and task:
            return (task,)
        if self.bidirectional:
            return Task.EMBED, Task.TOKEN_EMBED
        # The rows of a prompt may be computed in several steps, of which the last one pools.
        embeds = (Task.EMBED,) if self.config.pooling.kind in ("last", "none") else ()
        return embeds if task else (Task.GENERATE, *embeds)

    def classifier(self) -> HeadShape | None:
        """The classifier of the family; None if it has none."""
        return HeadShape("score", kind="last", out_bias=False)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that duplicate the config or another tensor."""
        other = r"lm_head\..*" if self.head is None else r"lm_head\.weight" if self.config.tied else None
        return (r".*\.rotary_emb\.inv_freq", *((other,) if other else ()))

    def _norm(self) -> RMSNorm:
        return self.Norm(self.config.width, self.config.norm_eps)

    @property
    def embed_scale(self) -> float:
        """The factor of the embedded tokens."""
        return self.config.embed_scale

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD = self.embed(tokens_T)
        if self.embed_scale != 1.0:
            x_TD = x_TD * self.embed_scale
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, batch)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer that has one."""
        layers = zip(self.layers, self.config.windows, strict=True)
        return tuple(layer.attn.cache(window) for layer, window in layers if layer.attn is not None)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, vocabulary] logits of the selected hidden rows."""
        assert self.head is not None, "the model has no logits"
        logits_RV = self.head(hidden_RD)
        return logits_RV if self.config.logit_scale == 1.0 else logits_RV * self.config.logit_scale

    @property
    def drafting(self) -> Drafting | None:
        """The layers for multi-token prediction that its config names; None if there are none."""
        return None

    def pool(self, hidden_nD: np.ndarray, task: str = Task.EMBED) -> np.ndarray:
        """One sequence's hidden rows, float32 [n, D], to the result of a task, float32."""
        return self.pooler(hidden_nD, task)

    def names(self) -> Mapping[str, Entry]:
        """Where each module's tensors are in a checkpoint: path -> name without ".weight" or ".bias", "*" for a layer's
        number. Of several names, the first that exists is used."""
        layer = "model.layers.*."
        return {
            "embed": ("model.embed_tokens", "lm_head") if self.config.tied else "model.embed_tokens",
            "norm": "model.norm",
            "head": "lm_head",
            "layers.*.attn_norm": layer + "input_layernorm",
            "layers.*.attn.qkv.q": layer + "self_attn.q_proj",
            "layers.*.attn.qkv.k": layer + "self_attn.k_proj",
            "layers.*.attn.qkv.v": layer + "self_attn.v_proj",
            "layers.*.attn.q_norm": layer + "self_attn.q_norm",
            "layers.*.attn.k_norm": layer + "self_attn.k_norm",
            "layers.*.attn.out": layer + "self_attn.o_proj",
            "layers.*.mlp_norm": layer + "post_attention_layernorm",
            "layers.*.mlp.gate_up.gate": layer + "mlp.gate_proj",
            "layers.*.mlp.gate_up.up": layer + "mlp.up_proj",
            "layers.*.mlp.down": layer + "mlp.down_proj",
            **self.pooler.names(),
        }


def runs(targets: str, name: str, sizes: tuple[int, ...]) -> dict[str, Take]:
    """The parts of a tensor whose rows are grouped by head: in each group, so many rows of each target."""
    ends = tuple(accumulate(sizes))
    rows = zip((0, *ends), ends, strict=False)
    return {target: Take(name, run, every=ends[-1]) for target, run in zip(targets.split(), rows, strict=True)}


def within(entry: Entry, old: str, new: str) -> Entry:
    """An entry of a name table with another prefix, where it has the old one."""
    if isinstance(entry, tuple):
        return tuple(_renamed(one, old, new) for one in entry)
    return _renamed(entry, old, new)


def _renamed(entry: str | Take, old: str, new: str) -> str | Take:
    if isinstance(entry, Take):
        return replace(entry, name=str(_renamed(entry.name, old, new)))
    return new + entry.removeprefix(old) if entry.startswith(old) else entry
