"""Encoder jobs: which outputs of encoders the runner holds, which a step makes, and which it lets go.

    absent --make--> needed --pass--> kept --evict--> absent       bytes of needed and kept <= max_bytes
                        ^--- join ------'

A sequence reserves room for all that it still has to read when it joins, and gives it back as its spans are computed or
when it leaves its row. So what is needed always fits, and a running sequence gets its outputs in the end. What is kept
is there for others until the room is wanted: the one used longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvasir.inputs import Source
from kvasir.plan import Encode, Encoders, StepPlan
from kvasir.sched.sequence import Sequence


class Outputs:
    """Owns what is known of the runner's outputs. limits: None where it has no encoders."""

    def __init__(self, limits: Encoders | None):
        self.limits = limits
        self._held: dict[bytes, Source] = {}  # the one used longest ago first
        self._readers: dict[bytes, dict[Sequence, Source]] = {}  # by content: who runs and has to read it
        self._gone: list[bytes] = []  # of which the runner does not know yet
        self.made = 0  # embeddings

    # -- who needs what ----------------------------------------------------------------------------------------

    def fits(self, seq: Sequence, start: int) -> bool:
        """Whether a sequence that begins at `start` may join: all that is needed then fits."""
        if not seq.content.sources:
            return True
        needed = {content: next(iter(readers.values())) for content, readers in self._readers.items()}
        needed.update({source.content: source for _, source in seq.content.needs(start)})
        assert self.limits
        return self._bytes(needed.values()) <= self.limits.max_bytes

    def join(self, seq: Sequence) -> None:
        """It runs, and its first tokens are computed."""
        for _, source in seq.content.needs(seq.counts.computed):
            self._readers.setdefault(source.content, {})[seq] = source

    def move(self, seq: Sequence) -> None:
        """More of its tokens are computed."""
        self._keep(seq, {source.content for _, source in seq.content.needs(seq.counts.computed)})

    def leave(self, seq: Sequence) -> None:
        """It runs no more."""
        if seq.content.sources:
            self._keep(seq, set())

    def _keep(self, seq: Sequence, needed: set[bytes]) -> None:
        for content in seq.content.sources.keys() - needed:
            readers = self._readers.get(content, {})
            if readers.pop(seq, None) and not readers:
                del self._readers[content]

    # -- what a step makes -------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, start: int, end: int, room: int) -> int:
        """The last position up to `end` before which a step that begins at `start` may end, where it may make `room`
        embeddings more."""
        for position, source in self._absent(seq, start, end):
            room -= source.length
            if room < 0:
                return max(start, position)
        return end

    def make(self, seq: Sequence, start: int, end: int) -> list[Encode]:
        """What a step has to make that computes [start, end)."""
        jobs = [Encode(source.content, source.length, source.data) for _, source in self._absent(seq, start, end)]
        for job in jobs:
            source = seq.content.sources[job.content]
            self._evict(source)
            self._held[job.content] = source
            self.made += job.length
        for _, source in self._read(seq, start, end):
            self._held[source.content] = self._held.pop(source.content)
        return jobs

    def _read(self, seq: Sequence, start: int, end: int) -> Iterator[tuple[int, Source]]:
        return ((p, source) for p, source in seq.content.needs(start) if p < end)

    def _absent(self, seq: Sequence, start: int, end: int) -> list[tuple[int, Source]]:
        """With the first position that reads it."""
        first: dict[bytes, tuple[int, Source]] = {}
        for position, source in self._read(seq, start, end) if seq.content.sources else ():
            if source.content not in self._held:
                first.setdefault(source.content, (position, source))
        return list(first.values())

    def _evict(self, coming: Source) -> None:
        """Lets go of what no one needs until there is room for another."""
        assert self.limits
        spare = [content for content in self._held if content not in self._readers]
        while self._bytes([*self._held.values(), coming]) > self.limits.max_bytes:
            content = spare.pop(0)
            del self._held[content]
            self._gone.append(content)

    def _bytes(self, sources: Iterable[Source]) -> int:
        assert self.limits
        return self.limits.bytes_each * sum(source.length for source in sources)

    # -- what the runner is to know ----------------------------------------------------------------------------

    def take_gone(self) -> tuple[bytes, ...]:
        gone, self._gone = tuple(self._gone), []
        return gone

    def forget(self, plan: StepPlan) -> None:
        """The step failed or does not run: what it was to make may not be there, what it was to let go may."""
        self._gone += plan.dropped
        for job in plan.encodes:
            if self._held.pop(job.content, None):
                self._gone.append(job.content)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        needed = {(s, source.content) for s in running for _, source in s.content.needs(s.counts.computed)}
        held = {(s, content) for content, readers in self._readers.items() for s in readers}
        assert needed == held, "an output is needed by someone else than is counted"
        if self.limits:
            everything = {c: next(iter(r.values())) for c, r in self._readers.items()} | self._held
            assert self._bytes(self._held.values()) <= self.limits.max_bytes, "outputs have more than their room"
            needed_bytes = self._bytes(everything[c] for c in self._readers)
            assert needed_bytes <= self.limits.max_bytes, "more is needed than there is room for"
