"""EAGLE-3 (arXiv:2503.01840): a head of one decoder layer, rarely more, that drafts for a target model. It joins hidden
rows of three of the target's layers, and predicts the token after the one that it embeds, out of a part of the target's
vocabulary. For each further position it reads its own row of the position before.

    taps_TX --norms, fc--> rows_TD      rows_TD, embed(token) --layer--> x_TD --norm, head--> logits
                                                                         x_TD: the row of the next position
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer
from kvasir.layers.draft import ChunkNorm, EagleLayer
from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.linear import Head, Plain
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope
from kvasir.models.eagle3_config import Eagle3Config

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

UNREAD = (
    r"(model\.)?(t2d|d2t|draft_id_to_target_id)",  # read when the checkpoint is opened, or not needed
    r"verifier_(lm_head|norm)\.weight",  # the target's, for training
    r".*\.rotary_emb\.inv_freq",
)
_MIDDLE = ("midlayer.", "layers.0.")
_OLD_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # SGLang's first names of the norms of three rows


class Eagle3(Module):
    """A `DraftModel` (kvasir.models.drafting) with a checkpoint of its own. Tables that the checkpoint lacks are the
    target's."""

    Config = Eagle3Config
    prefix = "model."
    ignored: Iterable[str] = UNREAD
    ahead = 1
    advances = True
    depth, chained = 1, True
    draft_ids: np.ndarray | None = None

    def __init__(self, config: Eagle3Config, target: Any):
        """Raises ModelFileError if the head was made for another target, UnsupportedModel for a target that lacks a
        table that the head needs."""
        self.config = c = config
        self._target = (target,)  # in a tuple: its modules are not the head's
        self.taps = tap_names(c, len(target.layers))
        self.width, target_width = c.width, target.config.width
        check_target(c, target)
        self.target_ids = target_ids(c)
        self.input_norm = RMSNorm(c.taps * target_width, c.norm_eps) if c.joint_norm else None
        self.fc_norm = ChunkNorm(c.taps, target_width, c.norm_eps) if c.chunk_norms else None
        self.fc = Plain(c.taps * target_width, c.width)
        self.embed = VocabularyEmbedding(c.vocab_size, c.width) if c.tensors.embed else None
        rope = Rope(c.rotary_dim, c.rope_theta, c.rope_scaling)
        self.first = EagleLayer(
            (self._norm(), self._norm(), self._norm()), self._attention(0, rope), self._mlp(), c.adds_normed
        )
        more = [DecoderLayer(self._norm(), self._attention(i, rope), self._norm(), self._mlp())
                for i in range(1, c.num_layers)]  # fmt: skip
        self.layers: list[DecoderLayer | None] = [None, *more]  # by their numbers in the checkpoint
        self.norm = self._norm()
        tied = self.embed if c.tied and not c.tensors.head else None
        self.lm_head = Head(c.width, c.draft_vocab, tied=tied) if c.tensors.head or tied else None

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.width, self.config.norm_eps)

    def _attention(self, layer: int, rope: Rope) -> Attention:
        c = self.config
        return Attention(
            layer, c.width, c.heads, c.kv_heads, c.head_dim,
            inputs=0 if layer else 2 * c.width,
            rope=rope, bias=c.qkv_bias, out_bias=c.out_bias, head_norm_eps=c.norm_eps if c.head_norm else None,
        )  # fmt: skip

    def _mlp(self) -> GatedMLP:
        c = self.config
        return GatedMLP(c.width, c.inner, c.act, c.mlp_bias)

    @property
    def context_length(self) -> int:
        """The target's, also if the head was trained on shorter texts: its rotary embedding has no end."""
        return max(self.config.context_length, self._target[0].config.context_length)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The KV cache of each of its layers."""
        attn = self.first.attn  # all layers have the same sizes
        return tuple(attn.cache(window) for window in self.config.windows)

    def join(self, taps_TX: Tensor) -> Tensor:
        """As `DraftModel.join`."""
        if self.input_norm is not None:
            taps_TX = self.input_norm(taps_TX)
        if self.fc_norm is not None:
            taps_TX = self.fc_norm(taps_TX)
        return self.fc(taps_TX)

    def forward(self, tokens_T: Tensor, rows_TD: Tensor | None, batch: Batch, layer: int = 0) -> tuple[Tensor, Tensor]:
        """As `DraftModel.forward`. The ids are the target's, also those that it has drafted itself."""
        assert rows_TD is not None
        table = self.embed or self._target[0].embed
        x_TD = self.first(table(tokens_T), rows_TD, batch)
        for block in self.layers:
            x_TD = block(x_TD, batch) if block else x_TD
        normed_TD = self.norm(x_TD)
        return normed_TD, normed_TD if self.config.carries_normed else x_TD

    def logits(self, hidden_RD: Tensor, layer: int = 0) -> Tensor:
        """As `DraftModel.logits`."""
        logits_RV = (self.lm_head or self._target[0].head)(hidden_RD)
        return logits_RV if self.config.logit_scale == 1.0 else logits_RV * self.config.logit_scale

    def parts(self) -> tuple[Any, ...]:
        """The head without the target's tables."""
        return (self,)

    def names(self) -> Mapping[str, Entry]:
        """As `Decoder.names`."""
        norms = {f"fc_norm.{i}": f"fc_norm.{i}" for i in range(self.config.taps)}
        if self.config.taps == len(_OLD_NORMS):
            norms = {path: (path, old) for path, old in zip(norms, _OLD_NORMS, strict=True)}
        own = {name: name for name in ("input_norm", "fc", "norm", "lm_head")} | {"embed": "embed_tokens"}
        first = {
            "embed_norm": "input_layernorm",
            "hidden_norm": "hidden_norm",
            **BLOCK,
        }
        more = {"attn_norm": ("hidden_norm", "input_layernorm"), **BLOCK}
        return {
            **norms,
            **own,
            **{f"first.{path}": tuple(prefix + name for prefix in _MIDDLE) for path, name in first.items()},
            **{f"layers.*.{path}": _numbered(name) for path, name in more.items()},
        }


BLOCK = {
    "mlp_norm": "post_attention_layernorm",
    "attn.qkv.q": "self_attn.q_proj",
    "attn.qkv.k": "self_attn.k_proj",
    "attn.qkv.v": "self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.out": "self_attn.o_proj",
    "mlp.gate_up.gate": "mlp.gate_proj",
    "mlp.gate_up.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def _numbered(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"layers.*.{name}" for name in ((names,) if isinstance(names, str) else names))


def tap_names(c: Eagle3Config, layers: int) -> tuple[str, ...]:
    """The target's rows that a head reads, as `DraftModel.taps`. layers: the target's number of them.

    The makers of heads number them in two ways: SpecForge and ModelOpt mean the rows after layer i, vLLM, speculators
    and llama.cpp those before it. Both have the same default rows, 1, n/2 - 1 and n - 4 in one numbering, 2, n/2 and
    n - 3 in the other, and configs are copied from one maker to another: so ids that are the default of one numbering
    are read in it, and so are ids that exist only before a layer. Raises ModelFileError for layers that the target does
    not have, UnsupportedModel for the rows before its first layer.
    """
    after, before = (1, layers // 2 - 1, layers - 4), (2, layers // 2, layers - 3)
    ids = c.layer_ids or before
    is_before = ids == before or layers in ids or (c.before and ids != after)
    numbers = [i - 1 for i in ids] if is_before else list(ids)
    if not c.layer_ids and (layers < 4 or len(set(before)) < len(before)):
        raise ModelFileError(
            f"config.json: eagle_aux_hidden_state_layer_ids is absent, and {layers} layers of a target have no default",
            "name three of them",
        )
    if 0 in ids and is_before:
        raise UnsupportedModel(
            f"config.json: eagle_aux_hidden_state_layer_ids is {list(ids)}: the rows before layer 0",
            "supported: rows after one of the target's layers",
        )
    if any(not 0 <= i < layers for i in numbers):
        raise ModelFileError(
            f"config.json: the head reads the rows {'before' if is_before else 'after'} layers {list(ids)}"
            f" of its target, which has {layers}",
            "use a head that was trained for this model",
        )
    return tuple(f"layers.{i}" for i in numbers)


def check_target(c: Any, target: Any) -> None:
    """Raises ModelFileError if a head's config does not fit the target's, UnsupportedModel if the target cannot lend a
    table that the head lacks."""
    width, own = target.config.width, c.tensors
    theirs = getattr(c, "target_width", 0)
    _same("target_hidden_size" if theirs else "hidden_size", theirs or c.width, width, "hidden_size")
    _same("vocab_size", c.vocab_size, target.config.vocab_size, "vocab_size")
    lacking = {"embed": not own.embed, "head": not own.head and not (c.tied and own.embed)}
    for part in (part for part, lacks in lacking.items() if lacks):
        tensor = {"embed": "embed_tokens.weight", "head": "lm_head.weight"}[part]
        if c.width != width:
            raise ModelFileError(
                f"the checkpoint has no tensor {tensor}, and the target's is for rows of {width}, not of {c.width}",
                "use a checkpoint that has it",
            )
        ties = part == "head" and c.tied and not getattr(target.config, "tied", False)
        if getattr(target, part, None) is None or ties:
            why = "its embeddings are not its logits' table" if ties else "it has no table to share"
            raise UnsupportedModel(
                f"the checkpoint has no tensor {tensor}, and {type(target).__name__} cannot lend it: {why}",
                "use a checkpoint that has it",
            )


def _same(name: str, given: int, expected: int, what: str) -> None:
    if given != expected:
        raise ModelFileError(
            f"config.json: {name} is {given}, but the target's {what} is {expected}",
            "use a head that was trained for this model",
        )


def target_ids(c: Any) -> np.ndarray | None:
    """As `DraftModel.target_ids`. Raises ModelFileError for a table that does not fit."""
    if c.draft_vocab > c.vocab_size:
        raise ModelFileError(
            f"config.json: draft_vocab_size is {c.draft_vocab}", f"expected at most vocab_size, {c.vocab_size}"
        )
    if c.tensors.target_ids is None:
        if c.draft_vocab != c.vocab_size:
            raise ModelFileError(
                f"config.json: draft_vocab_size is {c.draft_vocab} of {c.vocab_size}, and the checkpoint has no d2t",
                "use a checkpoint with the table of the draft vocabulary",
            )
        return None
    if c.draft_vocab != c.vocab_size and not c.tensors.head:
        raise ModelFileError(
            f"config.json: draft_vocab_size is {c.draft_vocab}, and the checkpoint has no tensor lm_head.weight",
            "the target's has logits for all of its vocabulary",
        )
    ids = c.tensors.target_ids
    if len(ids) != c.draft_vocab:
        raise ModelFileError(
            f"tensor d2t has {len(ids)} ids, but draft_vocab_size is {c.draft_vocab}",
            "does config.json belong to these weights?",
        )
    outside = ids[(ids < 0) | (ids >= c.vocab_size)]
    if len(outside) or len(np.unique(ids)) < len(ids):
        what = f"id {outside[0]}, outside the target's vocabulary of {c.vocab_size}" if len(outside) else "an id twice"
        raise ModelFileError(
            f"tensor d2t names {what}", "each id that is drafted needs another one of the target's; is the file whole?"
        )
    same = len(ids) == c.vocab_size and bool((ids == np.arange(len(ids))).all())
    return None if same else ids.astype(np.int32)
