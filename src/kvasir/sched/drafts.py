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
from typing import Protocol

from kvasir.plan import Work
from kvasir.sched.sequence import Sequence


class Drafter(Protocol):
    """Proposes drafts."""

    def waits(self, seq: Sequence) -> bool:
        """Whether the sequence should wait until its last token is known, and get a draft then, instead of being
        planned while the step that samples that token is pending."""
        ...

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        """At most `most` ids that may follow `seq.tokens`; empty if there is no good guess. Must not change `seq`."""
        ...


def room(seq: Sequence, budget: int, most: int) -> int:
    """How many ids may be drafted for a decoding sequence. budget: tokens that the step has left for it. most: the
    runner's limit."""
    if seq.counts.in_flight or seq.pending != 1 or seq.embeds:
        return 0
    return max(0, min(budget - 1, most, seq.max_known - 1 - seq.counts.known))


def propose(drafter: Drafter, seq: Sequence, most: int, vocab_size: int) -> array[int]:
    """The drafter's ids, cut before the first that is outside the vocabulary."""
    draft = array("i")
    for token in list(drafter.propose(seq, most))[:most]:
        if not 0 <= token < vocab_size:
            break
        draft.append(token)
    return draft


def settle(seq: Sequence, work: Work, accepted: int, current: bool) -> int:
    """Settles the counts when a step with a draft is done: accepted ids are known and, if the sequence kept its blocks
    (`current`), computed. Returns how many of the work's tokens are kept."""
    seq.counts.drafted = 0
    seq.counts.known += accepted
    seq.emission.plan(seq.emission.unread + accepted)  # their log-probabilities came with the result
    if current:
        seq.counts.computed += accepted
    return work.count - work.drafted + accepted
