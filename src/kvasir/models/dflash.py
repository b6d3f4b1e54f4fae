"""DFlash (arXiv:2602.06036): a drafter of a few decoder layers that guesses a block of ids in one pass. Hidden rows of
the target's layers give the keys and values of all positions that the target has computed. The block after them, the
last known id and masks, attends to these and to itself, and the row of each mask gives the id at its own position.

    taps_TX --fc, hidden_norm--> rows_TD --k, v of each layer--> cache
    embed(last id, mask, mask, ...) --layers, norm, head--> logits of the masks

DSpark (DeepSeek's DeepSpec) is a DFlash whose rows give the id after their own, with a Markov head over the block: what
the id before adds to the logits of an id, and how sure the drafter is of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import CacheKind, CausalWindow
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.block import DecoderLayer
from kvasir.layers.draft import ContextAttention
from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.linear import Head, Plain
from kvasir.layers.markov import MarkovHead
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope
from kvasir.layers.softcap import SoftCap
from kvasir.models.dflash_config import DFlashConfig
from kvasir.models.eagle3 import BLOCK, UNREAD, check_target, target_ids

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class DFlash(Module):
    """A `BlockDraft` (kvasir.models.drafting) with a checkpoint of its own. Tables that the checkpoint lacks are the
    target's."""

    Config = DFlashConfig
    prefix = "model."
    ignored: Iterable[str] = UNREAD
    ahead = 1
    advances = True
    width = 0
    depth, chained = 1, True
    draft_ids: np.ndarray | None = None

    def __init__(self, config: DFlashConfig, target: Any):
        """Raises ModelFileError if the drafter was made for another target, UnsupportedModel for a target that lacks a
        table that it needs."""
        self.config = c = config
        self._target = (target,)  # in a tuple: its modules are not the drafter's
        self.taps = tap_names(c, len(target.layers))
        check_target(c, target)
        self.target_ids = target_ids(c)
        self.block, self.mask, self.causal, self.anchored = c.block, c.mask, c.causal, c.anchored
        self.fc = Plain(len(c.layer_ids) * target.config.width, c.width)
        self.hidden_norm, self.norm = self._norm(), self._norm()
        rope = Rope(c.rotary_dim, c.rope_theta, c.rope_scaling)
        self.attns = tuple(self._attention(i, rope) for i in range(c.num_layers))
        self.layers = [
            DecoderLayer(self._norm(), attn, self._norm(), GatedMLP(c.width, c.inner, c.act)) for attn in self.attns
        ]
        self.embed = VocabularyEmbedding(c.vocab_size, c.width) if c.tensors.embed else None
        tied = self.embed if c.tied and not c.tensors.head else None
        self.lm_head = Head(c.width, c.draft_vocab, tied=tied) if c.tensors.head or tied else None
        self.softcap = SoftCap(c.final_cap)
        self.markov = (
            MarkovHead(
                c.vocab_size, c.draft_vocab, c.width, c.markov_rank, c.markov_kind, c.confidence, c.confidence_pairs
            )
            if c.markov_rank
            else None
        )

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.width, self.config.norm_eps)

    def _attention(self, layer: int, rope: Rope) -> ContextAttention:
        c = self.config
        return ContextAttention(
            layer, c.width, c.heads, c.kv_heads, c.head_dim,
            rope=rope, bias=c.qkv_bias, out_bias=c.out_bias, head_norm_eps=c.norm_eps,
        )  # fmt: skip

    @property
    def context_length(self) -> int:
        """The target's, also if the drafter was trained on shorter texts: its rotary embedding has no end."""
        return max(self.config.context_length, self._target[0].config.context_length)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The KV cache of each of its layers."""
        return tuple(self._cache(attn, window) for attn, window in zip(self.attns, self.config.windows, strict=True))

    def _cache(self, attn: ContextAttention, window: int) -> CacheKind:
        if window and self.config.mixed:
            return CausalWindow(attn.kv_heads, attn.head_dim, attn.value_dim, window=window)
        return attn.cache(window)

    def join(self, taps_TX: Tensor) -> Tensor:
        """There are no rows to carry."""
        raise AssertionError("a drafter of blocks keeps the target's rows as keys and values")

    def keep(self, taps_TX: Tensor, batch: Batch) -> Tensor:
        """As `BlockDraft.keep`."""
        rows_TD = self.hidden_norm(self.fc(taps_TX))
        for attn in self.attns:
            attn.keep(rows_TD, batch)
        return rows_TD

    def forward(self, tokens_T: Tensor, rows_TD: Tensor | None, batch: Batch, layer: int = 0) -> tuple[Tensor, None]:
        """As `BlockDraft.forward`."""
        x_TD = (self.embed or self._target[0].embed)(tokens_T)
        if self.config.embed_scale != 1.0:
            x_TD = x_TD * self.config.embed_scale
        for block in self.layers:
            x_TD = block(x_TD, batch)
        return self.norm(x_TD), None

    def logits(self, hidden_RD: Tensor, layer: int = 0) -> Tensor:
        """As `DraftModel.logits`."""
        logits_RV = (self.lm_head or self._target[0].head)(hidden_RD)
        if self.config.logit_scale != 1.0:
            logits_RV = logits_RV * self.config.logit_scale
        return self.softcap(logits_RV)

    def correct(self, tokens_T: Tensor, rows_TX: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `BlockDraft.correct`."""
        assert self.markov is not None
        return self.markov(tokens_T, rows_TX, batch)

    def corrections(self, rows_RX: Tensor) -> Tensor:
        """As `BlockDraft.corrections`."""
        assert self.markov is not None
        return self.markov.w2(rows_RX)

    def parts(self) -> tuple[Any, ...]:
        """The drafter without the target's tables."""
        return (self,)

    def names(self) -> Mapping[str, Entry]:
        """As `Decoder.names`."""
        own = {name: name for name in ("fc", "hidden_norm", "norm", "lm_head")} | {"embed": "embed_tokens"}
        block = {"attn_norm": "input_layernorm", **BLOCK}
        heads = {
            **{path: (f"markov_head.markov_{path}", f"markov_{path}") for path in ("w1", "w2")},
            **{path: f"markov_head.{path}_proj" for path in ("gate", "joint")},
            "sure": "confidence_head.proj",
        }
        return {
            **own,
            **{f"markov.{path}": names for path, names in heads.items()},
            **{f"layers.*.{path}": f"layers.*.{name}" for path, name in block.items()},
        }


def tap_names(c: DFlashConfig, layers: int) -> tuple[str, ...]:
    """The target's rows that are read, as `DraftModel.taps`: z-lab's id i means those after layer i, and after the last
    norm where that is the last layer. layers: the target's number of them. Raises ModelFileError for layers that it
    does not have."""
    if c.target_layers not in (0, layers) or max(c.layer_ids) >= layers:
        raise ModelFileError(
            f"config.json: the drafter reads the rows after layers {list(c.layer_ids)} of"
            f" {c.target_layers or 'its target'}, and the target has {layers}",
            "use a drafter that was trained for this model",
        )
    if layers - 1 in c.layer_ids:
        raise UnsupportedModel(
            f"config.json: target_layer_ids is {list(c.layer_ids)}: the last of {layers} layers",
            "engines differ in whether these rows are normalised; supported: earlier layers",
        )
    return tuple(f"layers.{i}" for i in c.layer_ids)
