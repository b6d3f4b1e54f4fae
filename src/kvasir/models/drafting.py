"""Models that draft: the interface between the runner and a model whose only use is to guess the next ids of another
model, its target; and which layers for multi-token prediction a decoder has, and where its checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

from kvasir.layers.kv_layout import KVLayout, Spec
from kvasir.layers.module import Entry

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch
    from kvasir.layers.markov import MarkovHead

TARGET, DRAFT = "", "draft"  # names of the two models in their common KVLayout


class DraftModel(Protocol):
    """A model that drafts. Its forward is traced like any other, so it uses ops only (`kvasir.ops.graph`).

        target    hidden rows of the positions [.., p] --join--> rows_TD      (taps: which hidden rows)
        first     tokens after p, rows_TD  --forward--> rows for logits, carried rows
        then      the drafted id, the carried row of its position  --forward--> ..., once for each drafted id

    A head may have several layers, each with a forward of its own, that draft one id each at the position p:

        layer i   tokens i after those of layer 0, rows  --forward--> rows for logits, carried rows

    The rows are those of the same positions that layer i - 1 has carried, or those of `join` again. Ids beyond the
    number of layers come from the last one, each computed one position later.

    taps: the target's outputs that it reads, as `program.trace.trace` names them ("layers.<i>": the residual stream
    after layer i, "last": after the last norm); empty for a model that reads ids only.
    ahead: how far the token of the row at position p lies after p: 1 for a head, which continues the target's row of p
    with the token that follows, 0 for a model that reads ids only.
    width: of the carried rows, 0 if there are none.
    depth: how many layers draft an id each. chained: whether each reads what the one before has carried.
    target_ids: int32 [draft vocabulary], the target's id of each of its ids, -1 for an id that the target lacks; None
    if the ids are the same.
    advances: whether each further id of a draft is computed one position later; without caches of its own, a head
    computes all of them at the position of the first.
    draft_ids: int32 [target vocabulary], its id of each of the target's ids, always valid; None if it embeds the
    target's ids.
    context_length: positions from here on cannot be computed.

    A head with a checkpoint of its own is a Module as well, made by `kind(kind.Config.from_hf(config), target)` and
    filled like a model. It keeps parts of the target that it uses (embeddings, logits) in a tuple: attributes that are
    modules count as its own.
    """

    taps: tuple[str, ...]
    ahead: int
    advances: bool
    width: int
    depth: int
    chained: bool
    target_ids: np.ndarray | None
    draft_ids: np.ndarray | None

    @property
    def context_length(self) -> int: ...

    def cache_spec(self) -> Spec:
        """The caches of its layers, numbered as `forward` numbers them. They share a pool with the target's as the
        model DRAFT beside the model TARGET; `Shared(i, TARGET)` reads the cache of the target's layer i."""
        ...

    def join(self, taps_TX: Tensor) -> Tensor:
        """Float32 [T, width] of the outputs in `taps`, which lie side by side: float32 [T, sum of their widths]."""
        ...

    def forward(
        self, tokens_T: Tensor, rows_TD: Tensor | None, batch: Batch, layer: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """tokens: int64 [T], the token `ahead + layer` after each row's position. rows: float32 [T, width], of `join`,
        or carried by the layer before, or from the row of the position before. Returns the rows for `logits` and those
        to carry, float32 [T, width]; None for both if there are none."""
        ...

    def logits(self, hidden_RD: Tensor, layer: int = 0) -> Tensor:
        """Float32 [R, draft vocabulary] logits of selected rows of a layer: of the token that follows the one
        embedded."""
        ...

    def parts(self) -> tuple[Any, ...]:
        """The modules that are its own, without the target's."""
        ...


class BlockDraft(DraftModel, Protocol):
    """A model that guesses several ids in one pass.

        target       hidden rows of the positions [.., p] --keep--> keys and values of these positions
        a guess      the token at p + 1, masks after it  --forward--> rows for the logits of each mask's own position

    `width` is 0, and `join` is not called.

    block: the most rows of such a pass, the first token included. mask: the id of the others. causal: whether they see
    the rows before them only, or the whole block. anchored: whether the row of the first token gives the next id, and
    that of a mask the one after it; else the row of a mask gives the id in its place. markov: a head that corrects the
    logits of each id by the id before, None without.
    """

    block: int
    mask: int
    causal: bool
    anchored: bool
    markov: MarkovHead | None

    def keep(self, taps_TX: Tensor, batch: Batch) -> Tensor:
        """Writes keys and values of the outputs in `taps`, float32 [T, sum of their widths], into the cache. Returns
        the rows that they were computed of, float32 [T, D]."""
        ...

    def correct(self, tokens_T: Tensor, rows_TX: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Of ids in blocks that have been computed, as MarkovHead's forward: the rows for `corrections`, and those that
        are left to the id after it, with how sure it is."""
        ...

    def corrections(self, rows_RX: Tensor) -> Tensor:
        """Float32 [R, draft vocabulary], to be added to the logits of these ids."""
        ...


def drafts_blocks(draft: DraftModel) -> TypeGuard[BlockDraft]:
    """Whether a model that drafts is a BlockDraft."""
    return hasattr(draft, "keep")


def joint_layout(target: Any, draft: DraftModel | None) -> KVLayout:
    """The caches of a model and of its draft model in one pool."""
    specs = {TARGET: target.cache_spec()}
    return KVLayout(specs if draft is None else {**specs, DRAFT: draft.cache_spec()})


@dataclass(frozen=True, slots=True)
class Drafting:
    """A decoder's layers for multi-token prediction, and where its checkpoint has them.

    config: of a decoder that has these layers after its own. layer: the prefix of their tensors, with "*" for the
    layer's number; first: the number of the first one. joint, embed_norm, hidden_norm, norm: the names of the matrix
    over both inputs, of its inputs' norms, and of the last norm. renamed: parts of a block with other names than in the
    decoder's own layers. head: the name of a layer's own matrix of logits, None if all have the decoder's. tap: the
    decoder's rows that are read, as in `DraftModel.taps`. carries_normed: whether the next layer reads the rows after
    the last norm. hidden_first: whether the matrix has the hidden rows' columns before those of the embeddings.
    chained: whether each of several layers reads the rows of the one before; else all read the decoder's.
    """

    config: Any
    layer: str
    first: int
    joint: str
    embed_norm: str
    hidden_norm: str
    norm: Entry
    renamed: Mapping[str, str] = field(default_factory=dict)
    head: Entry | None = None
    tap: str = "last"
    carries_normed: bool = True
    hidden_first: bool = False
    chained: bool = True


def numbered_after(layers: int, config: Any) -> Drafting:
    """The form of DeepSeek-V3's checkpoints: layers for multi-token prediction are numbered after the decoder's own
    `layers`. config: see Drafting."""
    layer = "model.layers.*."
    return Drafting(
        config,
        layer,
        layers,
        joint=layer + "eh_proj",
        embed_norm=layer + "enorm",
        hidden_norm=layer + "hnorm",
        norm=layer + "shared_head.norm",
        carries_normed=False,
    )


def ignored_after(layers: int, count: int) -> tuple[str, ...]:
    """Patterns of the tensors of such layers, for a decoder that is loaded without them."""
    return tuple(rf"model\.layers\.{layers + i}\..*" for i in range(count))


def longer(config: Any, count: int, **settings: Any) -> Any:
    """A decoder's config with `count` more layers. settings: their value of each field that has one per layer."""
    more = {name: (*getattr(config, name), *(value,) * count) for name, value in settings.items()}
    return replace(config, num_layers=config.num_layers + count, **more)
