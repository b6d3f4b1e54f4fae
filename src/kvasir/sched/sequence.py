"""One answer on its way: what the scheduler knows of it. Changed by the scheduler alone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvasir.kv.blocks import SequenceBlocks
from kvasir.kv.store import Fetch
from kvasir.plan import SamplingSpec
from kvasir.sched.content import Content
from kvasir.sched.counts import Counts
from kvasir.sched.emission import Emission
from kvasir.sched.guide import Guidance
from kvasir.types import FinishReason, Request


class Status(Enum):
    WAITING = "waiting"  # no row, no blocks
    RUNNING = "running"  # has a row and blocks
    PAUSED = "paused"  # no row, no blocks, and wants none: its reader has not taken what there is
    FINISHED = "finished"


class SharedPrefix(NamedTuple):
    """A waiting sequence lets `seq`, which computes a prefix of both, go first until `tokens` of it are computed."""

    seq: Sequence
    preemptions: int  # of `seq` when the waiting began
    tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Answer `index` of a request.

    tokens: the values known on this side; len(tokens) == known - in_flight - len(guidance.pending_forced)
    cached: tokens that were found in the prefix tree when it first joined
    expected: tokens that it had of this sequence when it came
    arrived: by the scheduler's clock
    shares_with: while it waits, the sequence that computes a prefix of both
    fetch: while it waits, what was asked of a tier; None: nothing yet
    promoted: goes first until it ends, having waited too long
    """

    request: Request
    index: int
    spec: SamplingSpec
    order: int  # of arrival, over all sequences
    tokens: array[int]
    counts: Counts  # of its tokens; while it is in the lane, the lane has them
    stop_ids: frozenset[int]
    max_known: int  # prompt + max_tokens, within the context
    blocks: SequenceBlocks
    content: Content  # what it is computed from beside its ids
    emission: Emission  # what deltas have said
    embeds: bool  # wants no token
    prompt_len: int
    guidance: Guidance = field(default_factory=Guidance)  # the grammar that it follows
    status: Status = Status.WAITING
    row: int = -1
    cached: int = 0
    expected: int = 0
    arrived: float = 0.0
    promoted: bool = False
    carry: bytes = b""
    shares_with: SharedPrefix | None = None
    fetch: Fetch | None = None
    preemptions: int = 0
    suspect: int = 0  # was part of a step that failed: computed alone until it has passed this position
    finish: FinishReason | None = None

    @property
    def to_read(self) -> range:
        """Known ids of which log-probabilities are to be read, by steps not planned yet."""
        return self.emission.to_read(self.counts.known, self.prompt_len)

    @property
    def reusable(self) -> int:
        """The most of its tokens that may come from elsewhere: outputs that are wanted, only computing gives."""
        if self.embeds:
            return 0
        wanted = self.to_read
        return (wanted[0] if wanted else self.counts.known) - 1

    @property
    def under_way(self) -> bool:
        """Whether steps that compute some of it are planned and not yet committed."""
        return self.counts.computed > self.counts.stored

    @property
    def pending(self) -> int:
        """Tokens to compute; 0 when all that is known is computed or planned, or the answer is at its length, or a step
        under way decides how long it is."""
        if self.counts.drafted or (not self.embeds and self.counts.known >= self.max_known):
            return 0
        return self.counts.known - self.counts.computed
