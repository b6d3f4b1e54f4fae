"""Sequences that follow a grammar: when they get their guides, their masks, and their forced ids.

Forced ids become known at once instead of one step at a time; the next step computes their keys and values. Sampling
them one by one would give the same ids, since their masks allow nothing else. They are sampled only if other state
depends on it: if the sampler has a carry or banned words.

    tokens          ... t               known to the scheduler
    pending_forced         f2 f3 f4     forced after the id that a pending step samples (f1); they wait for its value
    unplanned_ids                       ids of both kinds that no plan has carried to the runner yet

If log-probabilities are wanted, those of forced ids are read at the positions before them when these are computed.
Until then no delta emits the ids, and the last id of a forced run is sampled, so that all entries exist when the
sequence ends.
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
    """Whether forced ids can be taken unsampled: they change no sampler state, and nothing else can ban them."""
    return not spec.carries and not spec.bad_words


def ready(seq: Sequence) -> bool:
    """Whether the sequence's grammar is compiled, or has failed to compile."""
    return seq.guidance.compiling is not None and seq.guidance.compiling.done()


def begin(seq: Sequence, guides: Guides, rule: str, jump_ahead: bool) -> None:
    """Starts compiling the grammar that a new sequence follows. jump_ahead: whether forced ids are taken unsampled."""
    seq.guidance.compiling = guides.begin(rule)
    seq.guidance.jumps = jump_ahead and jumps(seq.spec)


def enter(seq: Sequence, guides: Guides) -> int:
    """Gives a waiting sequence its guide and appends the ids that are forced next; returns how many. Raises KvasirError
    if the grammar failed to compile or cannot be followed."""
    at = seq.guidance
    assert at.compiling is not None
    compiled, at.compiling = at.compiling, None
    at.guide = guides.take(compiled, seq.tokens[seq.prompt_len :])
    forced = _forced(seq)
    at.guide.advance(forced)
    if forced and at.guide.done:  # the whole completion is forced; its last id is sampled like any other
        forced.pop()
        at.guide = guides.take(compiled, [*seq.tokens[seq.prompt_len :], *forced])
    seq.tokens.extend(forced)
    seq.counts.known += len(forced)
    return len(forced)


def jump(seq: Sequence) -> list[int]:
    """Takes the ids forced after the last known token. Returns them if no pending step samples for the sequence;
    otherwise they become pending forced ids, and none are returned."""
    assert seq.guidance.guide is not None
    forced = _forced(seq)[seq.counts.in_flight :]
    seq.counts.known += len(forced)
    seq.guidance.unplanned_ids += forced
    if seq.counts.in_flight:
        seq.guidance.pending_forced = forced
        return []
    return forced


def take_back(seq: Sequence) -> None:
    """Drops the pending forced ids: the id before them was never sampled."""
    seq.counts.known -= len(seq.guidance.take_pending_forced())


def masked(seq: Sequence) -> bool:
    """Whether the next id will probably be sampled with a mask."""
    return seq.guidance.guide is not None and not seq.guidance.guide.quiet


def mask(seq: Sequence, work: Work, vocab_size: int) -> bytes | None:
    """The mask with which the pending step samples for the sequence; None if every id is allowed. With a draft, the
    concatenated masks after the last known id and after each drafted id. If the guide fails, the mask is NOTHING and
    `astray` holds the error."""
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
    size = max(-(-vocab_size // 32) * 4, *(len(m) for m in masks if m is not None))  # a guide's mask may be longer
    return b"".join(b"\xff" * size if m is None else m.ljust(size, b"\0") for m in masks)


def _along(guide: Guide, draft: list[int]) -> Iterator[bytes | None]:
    """The masks after each drafted id. After a drafted id that is not allowed, that ends the sequence, or at which the
    guide fails, all masks are NOTHING: the draft ends there."""
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
    """The ids forced after the last known id, up to but excluding one that may end the sequence, which is sampled."""
    guide = seq.guidance.guide
    assert guide is not None
    room = seq.max_known - 1 - seq.counts.known
    if room < 1 or guide.done or not seq.guidance.jumps:
        return []
    forced = guide.forced()[: room + seq.counts.in_flight]
    if seq.emission.holds_back:
        forced = forced[:-1]
    return list(itertools.takewhile(lambda token: token not in seq.stop_ids, forced))
