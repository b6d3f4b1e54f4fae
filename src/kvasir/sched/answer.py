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
    entries = [_entry(e) for e in row.read]
    of_prompt = min(max(0, seq.prompt_len - 1 - work.read[0]), len(entries))
    if seq.prompt_logprobs is not None and of_prompt:
        first = work.read[0] + 1
        seq.prompt_logprobs[first : first + of_prompt] = entries[:of_prompt]
    seq.owed += entries[of_prompt:]


def take_pooled(seq: Sequence, pooled: bytes) -> Delta:
    """The embedding (float32, little-endian), which is all of the answer."""
    values = struct.unpack(f"<{len(pooled) // 4}f", pooled)
    return Delta(seq.request.id, seq.index, finish_reason=FinishReason.STOP, embedding=values)


def take_tokens(seq: Sequence, row: RowResult) -> Delta:
    """What was sampled, and what a grammar forces after it. Raises KvasirError where it cannot be followed."""
    begin = len(seq.tokens) - seq.unsent
    sampled = len(seq.tokens) + len(row.tokens)
    known = [*row.tokens, *seq.coming]
    seq.coming = []
    finish, stop = _append(seq, known)
    if seq.guide and finish is not FinishReason.STOP:
        finish, stop = _follow(seq, known, finish)
    seq.carry = row.carry
    end = min(sampled, len(seq.tokens)) if seq.holds_back else len(seq.tokens)
    told = seq.tokens[begin:end]
    entries, seq.owed = [*seq.owed, *map(_entry, row.logprobs)], []
    seq.unsent = len(seq.tokens) - end
    return Delta(
        seq.request.id,
        seq.index,
        tuple(told),
        tuple(entries[: len(told)]),
        tuple(seq.prompt_logprobs) if begin == seq.prompt_len and seq.prompt_logprobs is not None else None,
        finish,
        stop,
        cached_tokens=seq.cached,
        carry=seq.carry,
        at=seq.since,
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
    assert seq.guide
    seq.guide.advance(known)
    if finish is None:
        forced = guidance.jump(seq)
        finish, stop = _append(seq, forced)
        if finish:
            return finish, stop
        seq.guide.advance(forced)
    return (FinishReason.STOP if seq.guide.done else finish), None


def _verdict(seq: Sequence, token: int) -> Verdict:
    sampled = len(seq.tokens) - seq.prompt_len
    if token in seq.stop_ids and sampled > seq.request.params.min_tokens:
        return FinishReason.STOP, token
    return (FinishReason.LENGTH, None) if len(seq.tokens) >= seq.max_known else (None, None)


def _entry(raw: tuple) -> TokenLogprob:
    return TokenLogprob(*raw)
