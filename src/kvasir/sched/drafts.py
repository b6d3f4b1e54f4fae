"""Drafts (speculative decoding): proposed next ids of a sequence, computed and checked in one step.

Each drafted id is compared with the id that the sampler draws from the logits before it (runner.drafts); the first
mismatch ends the draft. So a draft changes how many ids a step returns, never which.

    known     ... t                   all values are known: no pending step samples for the sequence
    work            t  d1  d2  d3     computed tokens; each is followed by a sampled id while all drafts up to it match
    returns            s1  s2  s3     d1 == s1, d2 == s2, d3 != s3: two accepted, three tokens

The sequence's length is unknown until the step is committed, so no other step includes the sequence meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from kvasir.plan import StepPlan, Work
from kvasir.sched.sequence import Sequence


class Asked(NamedTuple):
    """A sequence that may have a draft of at most `most` ids."""

    seq: Sequence
    most: int


class StepTime(NamedTuple):
    """How long a step took. seconds: computing it. period: from the end of the step before it, or from when there was
    something to compute, so it includes the host's work. proposing: the part of both spent on `Work.propose`. ahead:
    whether it was planned while the step before it was computed."""

    seconds: float
    period: float
    proposing: float = 0.0
    ahead: bool = False


class Drafter(Protocol):
    """Proposes drafts. Its methods run between steps and must not change a sequence. saved: estimated seconds that
    drafts have saved, less those that they cost."""

    saved: float

    def pays(self, rows: int, predicted: bool) -> bool:
        """Whether drafts may pay in a step of so many decoding sequences. If not, none is asked for. predicted: whether
        the answer of one of them is predicted."""
        ...

    def waits(self, sequences: Seq[Sequence]) -> bool:
        """Whether these sequences should wait until their last tokens are known, and get drafts then, instead of being
        planned while the step that samples these tokens is pending."""
        ...

    def propose(self, asked: Seq[Asked], budget: int) -> Seq[Seq[int]]:
        """For each sequence the ids that may follow `seq.tokens`, none if there is no good guess; together at most
        `budget`. What is beyond a limit is cut."""
        ...

    def asks(self, seq: Sequence, most: int) -> int:
        """How many ids, at most `most`, the runner should propose after a step that samples for the sequence."""
        ...

    def proposed(self, seq: Sequence, ids: Seq[int], after: int) -> None:
        """The ids that the runner proposes to follow the first `after` of `seq.tokens`, as the step's work had asked.
        Further tokens were forced by the sequence's grammar."""
        ...

    def settle(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A step that sampled for the sequence is done: it checked `drafted` ids, of which the first `accepted` were
        right."""
        ...

    def measured(self, rows: int, drafted: int, time: StepTime) -> None:
        """How long a step took, before its sequences are settled. rows: its token rows, of which `drafted` are drafts;
        0 if it did not only decode."""
        ...

    def measured_proposals(self, rows: int, most: int, seconds: float) -> None:
        """The runner took `seconds` to propose ids for so many sequences, at most `most` for one."""
        ...

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended. Takes no time: what is learnt from it waits for `learn`."""
        ...

    def learn(self, most: int) -> int:
        """Learns from at most `most` ids of sequences that have ended. Called while a step is computed elsewhere, or
        if there is nothing to compute. Returns how many ids it took."""
        ...

    @property
    def learns(self) -> bool:
        """Whether `learn` has anything to do."""
        ...


def room(seq: Sequence, budget: int, most: int) -> int:
    """How many ids may be drafted after all known ones of a sequence. budget: tokens that the step has left for it.
    most: the runner's limit."""
    if seq.counts.in_flight or seq.pending < 1 or seq.embeds:
        return 0
    return max(0, min(budget - seq.pending, most, seq.max_known - 1 - seq.counts.known))


def unplanned(seq: Sequence, count: int, drafted: int, most: int, positions: int) -> int:
    """How many ids the runner may propose after a step that computes `count` tokens of a sequence and `drafted` ids: 0
    if that step does not sample. most, positions: the runner's limits, of a step and of a sequence."""
    if seq.embeds or seq.counts.computed + count != seq.counts.known:
        return 0
    return max(0, min(most, min(seq.max_known - 2, positions) - seq.counts.known - drafted))


def propose(drafter: Drafter, asked: Seq[Asked], budget: int, vocab_size: int) -> list[array[int]]:
    """The drafter's ids for each sequence, cut before the first that is outside the vocabulary and at the limits."""
    found = []
    for (_, most), ids in zip(asked, drafter.propose(asked, budget), strict=True):
        draft = array("i")
        for token in list(ids)[: min(most, budget)]:
            if not 0 <= token < vocab_size:
                break
            draft.append(token)
        budget -= len(draft)
        found.append(draft)
    return found


def settle(seq: Sequence, work: Work, accepted: int, current: bool) -> int:
    """Settles the counts when a step with a draft is done: accepted ids are known and, if the sequence kept its blocks
    (`current`), computed. Returns how many of the work's tokens are kept."""
    seq.counts.drafted = 0
    seq.counts.known += accepted
    seq.emission.plan(seq.emission.unread + accepted)  # their log-probabilities came with the result
    if current:
        seq.counts.computed += accepted
    return work.count - work.drafted + accepted


def observe(drafter: Drafter, plan: StepPlan, time: StepTime) -> None:
    """Tells the drafter how long a step took. Only steps that did nothing but decode show the cost of drafts."""
    decodes = all(work.count == 1 + work.drafted and work.sample for work in plan.work)
    drafter.measured(plan.num_tokens if decodes else 0, sum(work.drafted for work in plan.work), time)
    asked = [work.propose for work in plan.work if work.propose]
    if asked and all(work.count <= 1 + work.drafted for work in plan.work):
        drafter.measured_proposals(len(asked), max(asked), time.proposing)
