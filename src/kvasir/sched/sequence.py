"""Sequence: the scheduler's state of one choice of a request. Only the scheduler changes it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvasir.kv.blocks import SequenceBlocks
from kvasir.kv.store import Fetch
from kvasir.plan import SamplingSpec
from kvasir.sched.content import SequenceContent
from kvasir.sched.counts import Counts
from kvasir.sched.emission import Emission
from kvasir.sched.guide import Guidance
from kvasir.types import FinishReason, Request


class Status(Enum):
    """The states of a sequence."""

    WAITING = "waiting"  # no row, no blocks
    RUNNING = "running"  # has a row and blocks
    PAUSED = "paused"  # no row, no blocks, and wants none: its client has not read its deltas
    FINISHED = "finished"


class SharedPrefix(NamedTuple):
    """A waiting sequence lets `seq`, which computes a prefix of both, go first until `tokens` of it are computed."""

    seq: Sequence
    preemptions: int  # of `seq` when the waiting began
    tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Choice `index` of a request.

    tokens: ids known to the scheduler; len(tokens) == known - in_flight - len(guidance.pending_forced)
    cached: tokens of its prompt found in the prefix tree when the sequence first joined
    expected: how many of its tokens the prefix tree held when it arrived
    arrived: arrival, by the scheduler's clock
    shares_with: while it waits, the sequence that computes a prefix of both
    fetch: while it waits, its fetch from a tier; None if none was started
    promoted: it waited too long and goes first until it ends
    """

    request: Request
    index: int
    spec: SamplingSpec
    order: int  # of arrival, over all sequences
    tokens: array[int]
    counts: Counts  # while the sequence is in the lane, a view of the lane's columns
    stop_ids: frozenset[int]
    max_known: int  # prompt + max_tokens, within the context
    blocks: SequenceBlocks
    content: SequenceContent  # what it is computed from besides its ids
    emission: Emission  # what its deltas have emitted
    embeds: bool  # wants a pooled result, and samples nothing
    prompt_len: int
    guidance: Guidance = field(default_factory=Guidance)  # its grammar state
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
    suspect: int = 0  # not 0 after a failed step: computed alone until it has passed this position
    finish: FinishReason | None = None

    @property
    def to_read(self) -> range:
        """Positions of known ids whose log-probabilities later steps must read."""
        return self.emission.to_read(self.counts.known, self.prompt_len)

    @property
    def reusable(self) -> int:
        """The most tokens that may come from the prefix cache or a tier: wanted outputs require computing the rest."""
        if self.embeds:
            return 0
        wanted = self.to_read
        return (wanted[0] if wanted else self.counts.known) - 1

    @property
    def under_way(self) -> bool:
        """Whether steps that compute tokens of it are planned and not yet committed."""
        return self.counts.computed > self.counts.stored

    @property
    def pending(self) -> int:
        """Known tokens not yet planned. 0 also if the sequence has its full length, or if a pending step with a draft
        decides its length."""
        if self.counts.drafted or (not self.embeds and self.counts.known >= self.max_known):
            return 0
        return self.counts.known - self.counts.computed
