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

import concurrent.futures
import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from kvasir.errors import InvalidRequest, KvasirError
from kvasir.plan import SamplingSpec, Work, unpack_ids
from kvasir.sched.guide import Guide, Guides
from kvasir.sched.sequence import Sequence, Status
from kvasir.types import Request, Task

NOTHING = bytes(4)  # a mask that allows no id: the sampler fails the row


def jumps(spec: SamplingSpec) -> bool:
    """Whether forced ids can be taken unsampled: they change no sampler state, and nothing else can ban them."""
    return not spec.carries and not spec.bad_words


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


class MasksAhead:
    """A `plan.Ahead` for a step's guided sequences, by row. Their guides stay as they are: copies follow the guesses. A
    grammar that cannot be followed allows none."""

    def __init__(self, guided: Mapping[int, Sequence]):
        self._guided = guided
        self._followed: dict[int, tuple[Guide, int]] = {}  # a copy, and how many of the ids it has followed

    def __call__(self, row: int, ids: Seq[int]) -> bytes | None:
        seq = self._guided.get(row)
        if seq is None or seq.guidance.guide is None:
            return None
        try:
            guide, count = self._followed.pop(row, None) or (seq.guidance.guide.copy(), 0)
            guide.advance(ids[count:])
            mask = b"" if guide.done else guide.allowed()
        except KvasirError:
            return b""
        self._followed[row] = guide, len(ids)
        return mask if mask is None or any(mask) else b""


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


class Compiling:
    """The sequences whose grammars are being compiled: they wait, and join once they have guides. guides: None if the
    engine supports no grammars. jump_ahead: whether forced ids are taken unsampled."""

    def __init__(self, guides: Guides | None, jump_ahead: bool):
        self._guides, self._jump_ahead = guides, jump_ahead
        self._sequences: list[Sequence] = []  # also some that no longer wait

    def begin(self, request: Request, sequences: list[Sequence]) -> None:
        """Starts compiling the request's grammar, if it has one. Raises InvalidRequest if it cannot be followed."""
        if not request.grammar:
            return
        if self._guides is None or request.task is not Task.GENERATE:
            raise InvalidRequest("this engine does not support grammars", "leave it out", param="structured_outputs")
        if request.params.min_tokens and self._guides.ends(request.grammar):
            message = "min_tokens cannot be combined with a grammar, which decides where the choice ends"
            raise InvalidRequest(message, "leave it out", param="min_tokens")
        for seq in sequences:
            seq.guidance.compiling = self._guides.begin(request.grammar)
            seq.guidance.jumps = self._jump_ahead and jumps(seq.spec)
        self._sequences += sequences

    def ready(self) -> list[Sequence]:
        """The waiting sequences whose grammar is compiled, or has failed to compile: `enter` gives them guides."""
        self._sequences = [s for s in self._sequences if s.guidance.compiling and s.status is not Status.FINISHED]
        waiting = (s for s in self._sequences if s.status is Status.WAITING)
        return [s for s in waiting if s.guidance.compiling and s.guidance.compiling.done()]

    def enter(self, seq: Sequence) -> int:
        """Gives a ready sequence its guide; returns how many ids are forced at once. Raises KvasirError if its grammar
        cannot be followed."""
        assert self._guides is not None
        forced = enter(seq, self._guides)
        seq.emission.hold(forced)
        return forced

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for a grammar that a waiting sequence needs; returns at once, False, if none does."""
        waiting = (s.guidance.compiling for s in self._sequences if s.status is Status.WAITING)
        futures = [future for future in waiting if future]
        if futures:
            concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)
        return bool(futures)
