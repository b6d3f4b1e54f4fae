"""Answers that follow a grammar: when their guides are made, what may be sampled, and what need not be.

Ids that the grammar forces become known at once instead of one by one, each by a step of its own; their keys and values
are computed in the next step. Sampled one by one they would be the same, since the mask of each allows nothing else. So
it is left where that may not be all: where the sampler has a carry, or banned words.

    tokens          ... t               known to the scheduler
    pending_forced         f2 f3 f4     forced after the id that a pending step samples (f1); they wait for its value
    unplanned_ids                       those of both that no plan has carried to the runner yet

Where log-probabilities are wanted, those of forced ids are read from the rows before them when these are computed.
Until then no delta tells of the ids, and the last of a run is left to be sampled, so that an answer's end has them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvasir.errors import KvasirError
from kvasir.plan import SamplingSpec, Work, unpack_ids
from kvasir.sched.guide import Guide, Guides
from kvasir.sched.sequence import Sequence

NOTHING = bytes(4)  # a mask that allows no id: the sampler fails the row


def jumps(spec: SamplingSpec) -> bool:
    """Whether no state comes of what is forced, and nothing else can forbid it."""
    return not spec.mirostat and not spec.bad_words


def ready(seq: Sequence) -> bool:
    return seq.guidance.compiling is not None and seq.guidance.compiling.done()


def begin(seq: Sequence, guides: Guides, rule: str, jump_ahead: bool) -> None:
    """A new sequence is to follow a rule, as soon as it is compiled. jump_ahead: whether what is forced is taken."""
    seq.guidance.compiling = guides.begin(rule)
    seq.guidance.jumps = jump_ahead and jumps(seq.spec)


def enter(seq: Sequence, guides: Guides) -> int:
    """Gives a waiting sequence its guide, and what is forced at its beginning: so many ids. Raises KvasirError."""
    at = seq.guidance
    assert at.compiling is not None
    compiled, at.compiling = at.compiling, None
    at.guide = guides.take(compiled, seq.tokens[seq.prompt_len :])
    forced = _forced(seq)
    at.guide.advance(forced)
    if forced and at.guide.done:  # all of it is forced; what ends it is sampled, as every last id is
        forced.pop()
        at.guide = guides.take(compiled, [*seq.tokens[seq.prompt_len :], *forced])
    seq.tokens.extend(forced)
    seq.counts.known += len(forced)
    return len(forced)


def jump(seq: Sequence) -> list[int]:
    """Takes what is forced after the last known token; returns those of which the values are known by that."""
    assert seq.guidance.guide is not None
    forced = _forced(seq)[seq.counts.in_flight :]
    seq.counts.known += len(forced)
    seq.guidance.unplanned_ids += forced
    if seq.counts.in_flight:
        seq.guidance.pending_forced = forced
        return []
    return forced


def take_back(seq: Sequence) -> None:
    """What would have come after an id that was never sampled."""
    seq.counts.known -= len(seq.guidance.take_pending_forced())


def masked(seq: Sequence) -> bool:
    """Whether a mask is to be expected for what is sampled next, as far as is known by now."""
    return seq.guidance.guide is not None and not seq.guidance.guide.quiet


def mask(seq: Sequence, work: Work, vocab_size: int) -> bytes | None:
    """What the step under way may sample for it; None for everything. With a draft, one mask each, after
    the last known id and after each drafted one. Where the guide cannot say, nothing, and `astray` says why."""
    guide = seq.guidance.guide
    assert guide is not None
    seq.guidance.astray = None
    try:
        first = guide.allowed()
    except KvasirError as error:
        seq.guidance.astray = error
        first = NOTHING
    if not work.drafted:
        return first
    masks = [first, *_along(guide.copy(), unpack_ids(work.appended)[-work.drafted :])]
    if all(m is None for m in masks):
        return None
    size = max(-(-vocab_size // 32) * 4, *(len(m) for m in masks if m is not None))  # a guide's may be longer
    return b"".join(b"\xff" * size if m is None else m.ljust(size, b"\0") for m in masks)


def _along(guide: Guide, draft: list[int]) -> Iterator[bytes | None]:
    """The masks after each drafted id. None of what follows is sampled after one that is not allowed, or at which the
    answer ends, or where the guide cannot say: the draft ends before that."""
    for i, token in enumerate(draft):
        try:
            guide.advance((token,))
            mask = NOTHING if guide.done else guide.allowed()
        except KvasirError:
            mask = NOTHING
        yield mask
        if mask is NOTHING:
            yield from itertools.repeat(NOTHING, len(draft) - i - 1)
            return


def _forced(seq: Sequence) -> list[int]:
    """What is forced after the last known id; whatever may end the answer is left to be sampled."""
    guide = seq.guidance.guide
    assert guide is not None
    room = seq.max_known - 1 - seq.counts.known
    if room < 1 or guide.done or not seq.guidance.jumps:
        return []
    forced = guide.forced()[: room + seq.counts.in_flight]
    if seq.emission.holds_back:
        forced = forced[:-1]
    return list(itertools.takewhile(lambda token: token not in seq.stop_ids, forced))
