"""Applies a step's result to a sequence: sampled ids become known, its guide advances, and the sequence may end.

Only the sequence changes. The scheduler takes back the row and the blocks of a sequence that ended.
"""

from __future__ import annotations

import struct

from kvasir.plan import RowResult, Work
from kvasir.sched import guidance
from kvasir.sched.sequence import Sequence
from kvasir.types import Delta, FinishReason, TokenLogprob

Verdict = tuple[FinishReason | None, int | None]  # the finish reason, and the stop id that ended the sequence


def take_read(seq: Sequence, work: Work, row: RowResult) -> None:
    """Takes the log-probabilities read for known ids: prompt ids or forced ids."""
    seq.emission.read(work.read[0], [_entry(e) for e in row.read], seq.prompt_len)


def take_pooled(seq: Sequence, pooled: bytes) -> Delta:
    """The delta of an embedding (float32, little-endian), which completes the choice."""
    values = struct.unpack(f"<{len(pooled) // 4}f", pooled)
    return Delta(seq.request.id, seq.index, finish_reason=FinishReason.STOP, embedding=values)


def take_tokens(seq: Sequence, row: RowResult, drafted: int = 0) -> Delta:
    """Appends the sampled ids and the ids that the grammar forces after them; returns their delta. drafted: ids of the
    draft that they were checked against. Raises KvasirError where the grammar cannot be followed."""
    emission, begin = seq.emission, len(seq.tokens) - seq.emission.unemitted
    sampled = len(seq.tokens) + len(row.tokens)
    known = [*row.tokens, *(seq.guidance.take_pending_forced() if seq.guidance.pending_forced else ())]
    finish, stop = _append(seq, known)
    if seq.guidance.guide and finish is not FinishReason.STOP:
        finish, stop = _follow(seq, known, finish)
    seq.carry = row.carry
    end = min(sampled, len(seq.tokens)) if emission.holds_back else len(seq.tokens)
    emitted = tuple(seq.tokens[begin:end])
    entries = emission.emit(len(emitted), len(seq.tokens) - end, map(_entry, row.logprobs))
    of_prompt = emission.prompt_logprobs if begin == seq.prompt_len else None
    return Delta(
        seq.request.id,
        seq.index,
        emitted,
        entries,
        None if of_prompt is None else tuple(of_prompt),
        finish,
        stop,
        cached_tokens=seq.cached,
        carry=seq.carry,
        drafted=drafted,
        accepted=min(row.accepted, len(emitted)),
        at=seq.counts.since,
    )


def _append(seq: Sequence, ids: list[int]) -> Verdict:
    """Appends ids, up to and including the first that ends the sequence."""
    for token in ids:
        seq.tokens.append(token)
        finish, stop = _verdict(seq, token)
        if finish:
            return finish, stop
    return None, None


def _follow(seq: Sequence, known: list[int], finish: FinishReason | None) -> Verdict:
    """Advances the guide over the ids that became known. A sequence that completes its grammar ends with STOP, even at
    its length limit."""
    assert seq.guidance.guide
    seq.guidance.guide.advance(known)
    if finish is None:
        forced = guidance.jump(seq)
        finish, stop = _append(seq, forced)
        if finish:
            return finish, stop
        seq.guidance.guide.advance(forced)
    return (FinishReason.STOP if seq.guidance.guide.done else finish), None


def _verdict(seq: Sequence, token: int) -> Verdict:
    sampled = len(seq.tokens) - seq.prompt_len
    if token in seq.stop_ids and sampled > seq.request.params.min_tokens:
        return FinishReason.STOP, token
    return (FinishReason.LENGTH, None) if len(seq.tokens) >= seq.max_known else (None, None)


def _entry(raw: tuple) -> TokenLogprob:
    return TokenLogprob(*raw)
