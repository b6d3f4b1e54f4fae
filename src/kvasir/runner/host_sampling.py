"""Sampling and log-probabilities from logits with the reference, for executors whose results are torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import numpy as np
from torch import Tensor

from kvasir.plan import Work
from kvasir.runner.drafts import accepted, along, masks_of
from kvasir.runner.executor import Entry, Taken
from kvasir.runner.rows import Row
from kvasir.sampling.rows import BadLogits, RowContext, Sampled
from kvasir.sampling.sampler import sample


def take(logits_nV: Tensor, rows: Sequence[Row], works: Sequence[Work], masks: Sequence[bytes | None]) -> list[Taken]:
    """Samples for works. logits_nV: of each work's last 1 + drafted token rows, one work after another."""
    ends = list(accumulate((1 + work.drafted for work in works), initial=0))
    carrying = {i for i, work in enumerate(works) if work.drafted and rows[i].spec.carries}
    at_once = [i for i in range(len(works)) if i not in carrying]
    contexts = [
        _context(rows[i], mask, works[i].end - works[i].drafted + at, rows[i].carry)
        for i in at_once
        for at, mask in enumerate(masks_of(works[i], masks[i]))
    ]
    chosen = logits_nV[[n for i in at_once for n in range(ends[i], ends[i + 1])]] if carrying else logits_nV
    found = map(taken, sample(chosen, contexts) if contexts else ())
    return [
        _take_along(logits_nV[ends[i] : ends[i + 1]], rows[i], work, masks[i])
        if i in carrying
        else accepted(work, list(islice(found, 1 + work.drafted)))
        for i, work in enumerate(works)
    ]


def _take_along(logits_nV: Tensor, row: Row, work: Work, mask: bytes | None) -> Taken:
    """Samples along a draft. logits_nV: of the last known id and of the drafted ids."""

    def draw(i: int, known: int, mask: bytes | None, carry: bytes) -> Taken:
        [found] = sample(logits_nV[i : i + 1], [_context(row, mask, known, carry)])
        return taken(found)

    return along(work, row, mask, draw)


def read(
    row: Row, work: Work, size: int, entries: Callable[[int, int, Sequence[int], Sequence[int]], Sequence[Entry]]
) -> tuple[tuple[Entry, ...], str]:
    """Log-probabilities of known ids, computed for `size` token rows at a time, or an error. entries: of token rows
    begin to end of the work, of these ids and numbers of best tokens; may raise BadLogits."""
    found: list[Entry] = []
    for begin in range(*work.read, size):
        end = min(begin + size, work.read[1])
        try:
            found += entries(begin - work.start, end - work.start, *row.read(begin, end))
        except BadLogits as error:
            return (), str(error)
    return tuple(found), ""


def taken(found: Sampled) -> Taken:
    """The result of one sampled row."""
    if found.error:
        return Taken(error=found.error)
    return Taken((found.token,), () if found.logprob is None else (found.logprob,), found.carry)


def _context(row: Row, mask: bytes | None, known: int, carry: bytes) -> RowContext:
    words = None if mask is None else np.frombuffer(mask, np.int32)
    return RowContext(row.spec, row.ids[:known], row.prompt_len, known, words, carry)
