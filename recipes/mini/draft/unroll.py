"""What the target says at the positions that are learned or judged, and what a drafter says there."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Batch
from ..model import Mini
from .heads import Head


@dataclass
class Said:
    """The target's side of a batch.

    logits: [n, V], of each position marked in `learn`, in order. at: int64 [B, S], the index of a position's logits, -1
    without. rows: the output [B, S, D] of each layer of the target.
    """

    batch: Batch
    at: Tensor
    logits: Tensor
    rows: list[Tensor]


@torch.no_grad()
def target_rows(target: Mini, batch: Batch) -> list[Tensor]:
    return target.layer_rows(batch.ids, batch.mask(), torch.arange(batch.ids.shape[1])[None])


@torch.no_grad()
def said(target: Mini, batch: Batch, rows: list[Tensor]) -> Said:
    """rows: as `target_rows` returns them."""
    at = torch.full_like(batch.ids, -1)
    at[batch.learn] = torch.arange(int(batch.learn.sum()))
    return Said(batch, at, target.logits(target.finish(rows[-1][batch.learn])), rows)


@dataclass
class Draft:
    """One draft from many anchors: its logits over the draft vocabulary [n, V'], and which of `Said.logits` judge it [n].

    row, anchor: int64 [n], where it began: the last position whose id was known.
    """

    logits: Tensor
    at: Tensor
    row: Tensor
    anchor: Tensor


def drafts(drafter: Mini | Head, embed: Tensor, all_said: Said, steps: int) -> Iterator[Draft]:
    """The first to the last of `steps` drafts after each position that has the target's logits, the ids before it right.

    A draft model's logits do not depend on where a draft began, so all its drafts are those of the first step.
    """
    if isinstance(drafter, Head):
        yield from head_drafts(drafter, embed, all_said, steps)
        return
    batch = all_said.batch
    hidden = drafter(batch.ids, batch.mask(), torch.arange(batch.ids.shape[1])[None])
    row, anchor = batch.learn.nonzero(as_tuple=True)
    yield Draft(drafter.logits(hidden[batch.learn]), all_said.at[batch.learn], row, anchor)


def head_drafts(head: Head, embed: Tensor, all_said: Said, steps: int) -> Iterator[Draft]:
    """A head's anchor is one row before the last known id, whose hidden states the target has not computed yet."""
    batch, at = all_said.batch, all_said.at
    first = batch.learn[:, 1:] & (batch.docs[:, 1:] == batch.docs[:, :-1])
    anchors, valid = anchors_of(first)
    row = torch.arange(len(anchors))[:, None].expand_as(anchors)
    last = batch.ids.shape[1] - 1
    for step, x in enumerate(head.unroll(embed, batch.ids, batch.docs, all_said.rows, anchors, steps)):
        judge = anchors + 1 + step
        judged = at.gather(1, judge.clamp(max=last))
        same = batch.docs.gather(1, judge.clamp(max=last)) == batch.docs.gather(1, anchors)
        good = valid & (judge <= last) & same & (judged >= 0)
        yield Draft(head.logits(x[good]), judged[good], row[good], anchors[good] + 1)


def anchors_of(marked: Tensor) -> tuple[Tensor, Tensor]:
    """The marked columns of each row [B, A], padded with 0, and which of them are no padding."""
    most = max(1, int(marked.sum(1).max()))
    order = marked.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    valid = marked.gather(1, order)
    return order.where(valid, 0), valid


def distilled(draft: Draft, logits: Tensor, vocab: Tensor | None) -> Tensor:
    """Mean cross-entropy [] of a draft against the target's probabilities.

    With a draft vocabulary (its target ids), the target's probabilities are those among its ids, and positions whose
    likeliest id it lacks do not count: no draft is right there.
    """
    if not len(draft.at):
        return draft.logits.sum() * 0.0
    wanted, guess = logits[draft.at], draft.logits
    if vocab is not None and len(vocab) < wanted.shape[1]:
        known = torch.zeros(wanted.shape[1], dtype=torch.bool)
        known[vocab] = True
        keep = known[wanted.argmax(-1)]
        wanted, guess = wanted[keep][:, vocab], guess[keep]
    return F.cross_entropy(guess, wanted.softmax(-1)) if len(guess) else guess.sum() * 0.0
