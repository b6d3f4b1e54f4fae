"""A step while it is planned: what its sequences compute, and how many more tokens it may hold."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvasir.plan import Bytes, Decodes, EncoderWork, Join, StepPlan, Work, pack_ids
from kvasir.sched import guidance, policy
from kvasir.sched.budget import MOST_READ
from kvasir.sched.encoders import Outputs
from kvasir.sched.lane import Lane, Members
from kvasir.sched.sequence import Sequence
from kvasir.sched.service import Decoding

Added = tuple[tuple[int, tuple[int, ...]], ...]  # per cache group: first new index of the block table, new block ids
Copy = tuple[int, int, int]  # group, source, target
Load = tuple[int, int, Bytes]  # group, block id, content


class Step:
    """Owns the step's budget and the parts of its plan; `compute` advances a sequence's counts."""

    __slots__ = (
        *("_outputs", "budget", "copies", "decodes", "encodable", "encodes", "indivisible", "joined", "loads"),
        *("max_chunk", "members", "missed", "now"),
        *("planned", "prefill", "reads", "sequences", "work"),
    )

    def __init__(self, budget: int, max_chunk: int, indivisible: bool, now: float, outputs: Outputs):
        """max_chunk: most tokens of one sequence. indivisible: whether a prompt is computed in a single step. now: time
        of planning. outputs: of encoders."""
        self._outputs = outputs
        self.encodes: list[EncoderWork] = []
        self.encodable = outputs.limits.per_step if outputs.limits else 0  # embeddings that may still be made
        self.budget = budget
        self.prefill = budget  # tokens of the budget left for prefills, which compute more than one token
        self.reads = MOST_READ  # prompt positions whose log-probabilities may still be read
        self.max_chunk = max_chunk
        self.indivisible = indivisible
        self.now = now
        self.missed = 0  # tokens of an indivisible span that did not fit
        self.planned: set[int] = set()  # identities of `sequences`
        self.joined: list[Join] = []
        self.work: list[Work] = []
        self.copies: list[Copy] = []
        self.loads: list[Load] = []
        self.sequences: list[Sequence] = []
        self.members: Members | None = None  # the lane's sequences, if it is part of the step
        self.decodes = Decodes()

    @property
    def computes(self) -> bool:
        """Whether the step computes any tokens."""
        return bool(self.work or self.members)

    def decode(self, members: Members, decodes: Decodes) -> None:
        """Adds the lane to the step: each of its sequences computes a token."""
        self.members, self.decodes = members, decodes
        self.budget -= len(decodes)

    def decoding(self, lane: Lane) -> Decoding:
        """The decodes of the step; call it before prefills are added."""
        context, found = sum(s.counts.known for s in self.sequences), {s.request.slo for s in self.sequences}
        if self.members is None:
            return Decoding(len(self.sequences), context, frozenset(found))
        found.update(service_class for service_class, _ in self.members.shares)
        return Decoding(len(self.sequences) + len(self.decodes), context + lane.context, frozenset(found))

    def chunk(self, seq: Sequence, start: int) -> int:
        """How many tokens from `start` on the sequence may compute in this step."""
        pending = seq.counts.known - start
        most = policy.chunk_tokens(pending, self.budget, 0, self.max_chunk, self.indivisible, self.prefill)
        end = seq.content.stop(start + min(most, self.room(seq, start)))
        end = end if end > start else start + self._whole(seq, start)
        reach = self._outputs.reach(seq, start, end, self.encodable)
        return 0 if self.indivisible and reach < end else reach - start

    def _whole(self, seq: Sequence, start: int) -> int:
        """Tokens of the indivisible span at `start`, 0 if there is none or it exceeds the budget. Not bound by the
        allowance for prefills."""
        whole = seq.content.whole(start)
        if whole == 1:
            return 0
        self.missed = max(self.missed, whole if whole > self.budget else 0)
        return whole if whole <= self.budget else 0

    def room(self, seq: Sequence, start: int) -> int:
        """Tokens from `start` on that a step can compute without reading more log-probabilities than `reads` allows."""
        first, end = _rows(seq.to_read, start, seq.counts.known)
        return seq.counts.known if self.indivisible or first == end else first - start + max(0, self.reads)

    def join(self, seq: Sequence, copies: list[Copy], loads: list[Load]) -> None:
        """Adds a sequence that got its row."""
        seq.guidance.take_unplanned()  # the Join carries all known ids
        self.copies += copies
        self.loads += loads
        ids, content = seq.tokens.tobytes(), seq.content
        self.joined.append(
            Join(seq.row, ids, seq.prompt_len, seq.spec, content.adapted, seq.carry, content.inputs),
        )

    def compute(self, seq: Sequence, count: int, blocks: Added, draft: Seq[int] = (), propose: int = 0) -> None:
        """Plans `count` more tokens of the sequence, and the draft. blocks: those that the runner does not know yet.
        propose: ids that the runner proposes afterwards."""
        start, seq.counts.drafted = seq.counts.computed, len(draft)
        unplanned = seq.guidance.take_unplanned() if seq.guidance.unplanned_ids else ()
        appended = pack_ids([*unplanned, *draft])
        seq.counts.computed += count
        if seq.content.sources:
            self._encode(seq, start)
        reached = seq.counts.computed == seq.counts.known
        sample = reached and not seq.embeds
        read = _rows(seq.to_read, start, seq.counts.computed)
        if read[1]:
            seq.emission.plan(read[1] + 1)
            self.reads -= read[1] - read[0]
        if sample:
            seq.counts.known += 1
            seq.counts.in_flight += 1
            seq.emission.plan(seq.counts.known)
        self.budget -= count + len(draft)
        if count > 1:
            self.prefill -= count
        self.sequences.append(seq)
        self.planned.add(id(seq))
        self.work.append(
            Work(
                row=seq.row,
                start=start,
                count=count + len(draft),
                blocks=blocks,
                appended=appended,
                drafted=len(draft),
                sample=sample,
                masked=sample and guidance.masked(seq),
                read=read,
                want_pooled=seq.request.task.value if seq.embeds and reached else "",
                indivisible=self.indivisible,
                propose=propose,
            )
        )

    def _encode(self, seq: Sequence, start: int) -> None:
        """Adds encoder jobs for the outputs that the tokens planned from `start` on need and the runner lacks."""
        jobs = self._outputs.make(seq, start, seq.counts.computed)
        self._outputs.move(seq)
        self.encodes += jobs
        self.encodable -= sum(job.length for job in jobs)

    def plan(
        self, number: int, left: tuple[int, ...], saves: list[tuple[int, int]], adapters: tuple[tuple[int, str], ...]
    ) -> StepPlan:
        """left: freed rows. saves: (group, block id) to export before anything else happens to the cache. adapters: to
        install."""
        work, joined, copies, loads = tuple(self.work), tuple(self.joined), tuple(self.copies), tuple(self.loads)
        encodes, dropped = tuple(self.encodes), self._outputs.take_gone() if self._outputs.limits else ()
        return StepPlan(
            number, joined, work, left, copies, tuple(saves), loads, encodes, dropped, self.decodes, adapters
        )


def _rows(ids: range, start: int, end: int) -> tuple[int, int]:
    """The positions [first, last) within [start, end) right before the given ids; usually empty, (0, 0)."""
    if not ids or ids.start > end:
        return 0, 0
    first, last = max(start, ids.start - 1), min(end, ids.stop - 1)
    return (first, last) if first < last else (0, 0)


class UnderWay(NamedTuple):
    """A planned step. sequences: of the plan's `work`, each with its `preemptions` at that time. members: the lane's
    sequences, of the plan's `decodes`."""

    sequences: tuple[tuple[Sequence, int], ...] = ()
    members: Members | None = None

    def pairs(self, plan: StepPlan) -> list[tuple[Sequence, Work]]:
        """The sequences of the step, each with its work."""
        decoding = self.members.sequences if self.members else ()
        return list(zip((*decoding, *(s for s, _ in self.sequences)), plan.works, strict=True))
