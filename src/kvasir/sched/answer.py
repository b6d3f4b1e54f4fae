"""What a step's result adds to an answer: values become known, its grammar continues after them, and it may end.

Only the sequence changes. That one which has ended gives back its row and blocks is the scheduler's.
"""

from __future__ import annotations

import struct

from kvasir.plan import RowResult, Work
from kvasir.sched import guidance
from kvasir.sched.sequence import Sequence
from kvasir.types import Delta, FinishReason, TokenLogprob

Verdict = tuple[FinishReason | None, int | None]  # why it ends, and the stop id that ended it


def take_read(seq: Sequence, work: Work, row: RowResult) -> None:
    """What was read of ids that were known: the prompt's, or forced ones."""
    seq.emission.read(work.read[0], [_entry(e) for e in row.read], seq.prompt_len)


def take_pooled(seq: Sequence, pooled: bytes) -> Delta:
    """The embedding (float32, little-endian), which is all of the answer."""
    values = struct.unpack(f"<{len(pooled) // 4}f", pooled)
    return Delta(seq.request.id, seq.index, finish_reason=FinishReason.STOP, embedding=values)


def take_tokens(seq: Sequence, row: RowResult) -> Delta:
    """What was sampled, and what a grammar forces after it. Raises KvasirError where it cannot be followed."""
    emission, begin = seq.emission, len(seq.tokens) - seq.emission.unemitted
    sampled = len(seq.tokens) + len(row.tokens)
    known = [*row.tokens, *(seq.guidance.take_pending_forced() if seq.guidance.pending_forced else ())]
    finish, stop = _append(seq, known)
    if seq.guidance.guide and finish is not FinishReason.STOP:
        finish, stop = _follow(seq, known, finish)
    seq.carry = row.carry
    end = min(sampled, len(seq.tokens)) if emission.holds_back else len(seq.tokens)
    told = tuple(seq.tokens[begin:end])
    entries = emission.tell(len(told), len(seq.tokens) - end, map(_entry, row.logprobs))
    of_prompt = emission.prompt_logprobs if begin == seq.prompt_len else None
    return Delta(
        seq.request.id,
        seq.index,
        told,
        entries,
        None if of_prompt is None else tuple(of_prompt),
        finish,
        stop,
        cached_tokens=seq.cached,
        carry=seq.carry,
        at=seq.counts.since,
    )


def _append(seq: Sequence, ids: list[int]) -> Verdict:
    """Ids become known, up to one that ends the answer."""
    for token in ids:
        seq.tokens.append(token)
        finish, stop = _verdict(seq, token)
        if finish:
            return finish, stop
    return None, None


def _follow(seq: Sequence, known: list[int], finish: FinishReason | None) -> Verdict:
    """The grammar continues after what became known; an answer that is complete by it is not cut by its length."""
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
