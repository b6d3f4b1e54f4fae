"""Encoder outputs: which the runner holds, which a step makes, and which it drops.

    absent --make--> needed --pass--> kept --evict--> absent       bytes of needed and kept <= max_bytes
                        ^--- join ------'

When a sequence joins, it reserves memory for all outputs that it still has to read, and releases it as its spans are
computed or when it leaves its row. So needed outputs always fit, and a running sequence always gets its outputs. Kept
outputs stay for other sequences until their memory is needed; the least recently used is evicted first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvasir.inputs import Source
from kvasir.plan import Encoders, EncoderWork, StepPlan
from kvasir.sched.sequence import Sequence


class Outputs:
    """Tracks the runner's encoder outputs. limits: None if the runner has no encoders."""

    def __init__(self, limits: Encoders | None):
        self.limits = limits
        self._held: dict[bytes, Source] = {}  # least recently used first
        self._readers: dict[bytes, dict[Sequence, Source]] = {}  # by content: running sequences that still read it
        self._gone: list[bytes] = []  # evicted, not yet reported to the runner
        self.made = 0  # embeddings made

    # -- needed outputs ----------------------------------------------------------------------------------------

    def fits(self, seq: Sequence, start: int) -> bool:
        """Whether all needed outputs still fit if the sequence joins and begins at `start`."""
        if not seq.content.sources:
            return True
        needed = {content: next(iter(readers.values())) for content, readers in self._readers.items()}
        needed.update({source.content: source for _, source in seq.content.needs(start)})
        assert self.limits
        return self._bytes(needed.values()) <= self.limits.max_bytes

    def join(self, seq: Sequence) -> None:
        """Reserves the outputs that a sequence still has to read when it gets a row."""
        for _, source in seq.content.needs(seq.counts.computed):
            self._readers.setdefault(source.content, {})[seq] = source

    def move(self, seq: Sequence) -> None:
        """Releases the outputs that the sequence has read, once more of its tokens are computed."""
        self._keep(seq, {source.content for _, source in seq.content.needs(seq.counts.computed)})

    def leave(self, seq: Sequence) -> None:
        """Releases all outputs of a sequence that leaves its row."""
        if seq.content.sources:
            self._keep(seq, set())

    def _keep(self, seq: Sequence, needed: set[bytes]) -> None:
        for content in seq.content.sources.keys() - needed:
            readers = self._readers.get(content, {})
            if readers.pop(seq, None) and not readers:
                del self._readers[content]

    # -- making outputs ----------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, start: int, end: int, room: int) -> int:
        """The last position up to `end` that a step from `start` on can reach if it may make `room` more embeddings."""
        for position, source in self._absent(seq, start, end):
            room -= source.length
            if room < 0:
                return max(start, position)
        return end

    def make(self, seq: Sequence, start: int, end: int) -> list[EncoderWork]:
        """Encoder jobs of a step that computes positions [start, end) of the sequence. Evicts outputs to make room."""
        jobs = [EncoderWork(source.content, source.length, source.data) for _, source in self._absent(seq, start, end)]
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
        """Sources that [start, end) reads and the runner does not hold, each with the first position that reads it."""
        first: dict[bytes, tuple[int, Source]] = {}
        for position, source in self._read(seq, start, end) if seq.content.sources else ():
            if source.content not in self._held:
                first.setdefault(source.content, (position, source))
        return list(first.values())

    def _evict(self, coming: Source) -> None:
        """Evicts outputs that no running sequence needs until `coming` fits."""
        assert self.limits
        spare = [content for content in self._held if content not in self._readers]
        while self._bytes([*self._held.values(), coming]) > self.limits.max_bytes:
            content = spare.pop(0)
            del self._held[content]
            self._gone.append(content)

    def _bytes(self, sources: Iterable[Source]) -> int:
        assert self.limits
        return self.limits.bytes_each * sum(source.length for source in sources)

    # -- reports to the runner ---------------------------------------------------------------------------------

    def take_gone(self) -> tuple[bytes, ...]:
        """Returns and clears the evicted outputs that the runner must still drop."""
        gone, self._gone = tuple(self._gone), []
        return gone

    def forget(self, plan: StepPlan) -> None:
        """Call it if the step failed or will not run: outputs that it should have made may be missing, and those that
        it should have dropped may still be held. The next step drops all of them."""
        self._gone += plan.dropped
        for job in plan.encodes:
            if self._held.pop(job.content, None):
                self._gone.append(job.content)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        needed = {(s, source.content) for s in running for _, source in s.content.needs(s.counts.computed)}
        held = {(s, content) for content, readers in self._readers.items() for s in readers}
        assert needed == held, "the uses of an output are miscounted"
        if self.limits:
            everything = {c: next(iter(r.values())) for c, r in self._readers.items()} | self._held
            assert self._bytes(self._held.values()) <= self.limits.max_bytes, "outputs exceed their capacity"
            needed_bytes = self._bytes(everything[c] for c in self._readers)
            assert needed_bytes <= self.limits.max_bytes, "needed outputs exceed the capacity"
