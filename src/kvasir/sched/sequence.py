"""One answer on its way: what the scheduler knows of it. Changed by the scheduler alone."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvasir.kv.blocks import SequenceBlocks
from kvasir.kv.store import Fetch
from kvasir.plan import SamplingSpec
from kvasir.types import FinishReason, Request, TokenLogprob

if TYPE_CHECKING:
    from kvasir.sched.guidance import Guide
    from kvasir.sched.prefixes import Ahead


class Status(Enum):
    WAITING = "waiting"  # no row, no blocks
    RUNNING = "running"  # has a row and blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Answer `index` of a request.

    known:    tokens that exist or are being sampled by a step under way (counts; values may lag)
    computed: tokens whose keys and values are in the cache once all planned steps are done
    stored:   those of them that are there now
    tokens:   the values known on this side; len(tokens) == known - in_flight - len(coming)
    cached:   tokens that were found in the prefix tree when it first joined
    expected: tokens that it had of this sequence when it came
    arrived, since: by the scheduler's clock; `since` is its last token's time, before that `arrived`
    ahead: while it waits, whom it lets go first
    fetch: while it waits, what was asked of a tier; None: nothing yet
    promoted: goes first until it ends, having waited too long
    guide, coming, untold, jumps: see guidance; compiling: what the guide is made of, as long as there is none
    unsent: so many of the last tokens no delta has told of
    """

    request: Request
    index: int
    spec: SamplingSpec
    order: int  # of arrival, over all sequences
    tokens: array[int]
    known: int
    stop_ids: frozenset[int]
    max_known: int  # prompt + max_tokens, within the context
    blocks: SequenceBlocks
    namespace: bytes  # of the prefix tree
    embeds: bool  # wants no token
    prompt_len: int
    packed_prompt: bytes
    beginning: bytes  # namespace and first block: who has an equal one begins alike
    status: Status = Status.WAITING
    row: int = -1
    computed: int = 0
    stored: int = 0
    cached: int = 0
    expected: int = 0
    arrived: float = 0.0
    since: float = 0.0
    promoted: bool = False
    in_flight: int = 0
    carry: bytes = b""
    ahead: Ahead | None = None
    fetch: Fetch | None = None
    preemptions: int = 0
    suspect: int = 0  # was part of a step that failed: computed alone until it has passed this position
    prompt_logprobs: list[TokenLogprob | None] | None = None
    compiling: Future[Any] | None = None
    guide: Guide | None = None
    coming: list[int] = field(default_factory=list)
    untold: list[int] = field(default_factory=list)
    jumps: bool = False
    unsent: int = 0
    finish: FinishReason | None = None

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether outputs of prompt rows are still owed, which only computing gives."""
        return self.embeds or (self.prompt_logprobs is not None and any(e is None for e in self.prompt_logprobs[1:]))

    @property
    def under_way(self) -> bool:
        """Whether steps that compute some of it are planned and not yet committed."""
        return self.computed > self.stored

    @property
    def pending(self) -> int:
        """Tokens to compute; 0 when all that is known is computed or planned, or the answer is at its length."""
        if not self.embeds and self.known >= self.max_known:
            return 0
        return self.known - self.computed
