"""One answer on its way: what the scheduler knows of it. Changed by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvasir.kv.blocks import SequenceBlocks
from kvasir.plan import SamplingSpec
from kvasir.types import FinishReason, Request, Task, TokenLogprob


class Status(Enum):
    WAITING = "waiting"  # no row; may hold the shared prompt blocks of a sibling
    RUNNING = "running"  # has a row and blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Answer `index` of a request.

    known:    tokens that exist or are being sampled by a step under way (counts; values may lag)
    computed: tokens whose keys and values are in the cache once all planned steps are done
    tokens:   the values known on this side; len(tokens) == known - in_flight
    """

    request: Request
    index: int
    spec: SamplingSpec
    order: int  # of arrival, over all sequences
    tokens: list[int]
    known: int
    stop_ids: frozenset[int]
    max_known: int  # prompt + max_tokens, within the context
    blocks: SequenceBlocks
    status: Status = Status.WAITING
    row: int = -1
    computed: int = 0
    in_flight: int = 0
    carry: bytes = b""
    preemptions: int = 0
    suspect: int = 0  # was part of a step that failed: computed alone until it has passed this position
    leader: Sequence | None = None  # the sibling whose prompt blocks this one waits for
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: FinishReason | None = None
    siblings: list[Sequence] = field(default_factory=list)  # waiting for this one's prompt

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def embeds(self) -> bool:
        return self.request.task is Task.EMBED

    @property
    def pending(self) -> int:
        """Tokens to compute; 0 when all that is known is computed or planned, or the answer is at its length."""
        if not self.embeds and self.known >= self.max_known:
            return 0
        return self.known - self.computed

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: priority class, then arrival."""
        return self.request.priority, self.order
