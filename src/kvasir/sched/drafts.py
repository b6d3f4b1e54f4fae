"""Drafts: ids that are proposed to follow an answer, and computed in one step instead of one step each.

Each drafted id is checked against the one that the sampler draws from the row before it (runner.drafts); the first
that differs ends the draft. So a draft changes how many ids a step brings, never which.

    known     ... t                   all values are known: no step that samples for it is under way
    work            t  d1  d2  d3     rows; each is sampled as long as all before it were right
    brings             s1  s2  s3     d1 == s1, d2 == s2, d3 != s3: two accepted, three tokens

Until the step is committed the answer's length is not known, so the sequence is part of no other step meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Protocol

from kvasir.plan import Work
from kvasir.sched.sequence import Sequence


class Drafter(Protocol):
    def waits(self, seq: Sequence) -> bool:
        """Whether a sequence had better wait for its last token's value, after which a draft can be made, than have
        its next token computed under the step that samples the last."""
        ...

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        """At most `most` ids that may follow `seq.tokens`; none where there is no good guess. Must not change `seq`."""
        ...


def room(seq: Sequence, budget: int, most: int) -> int:
    """How many ids may be drafted for a sequence that wants its next token. budget: tokens that the step has left for
    it. most: what the runner takes."""
    if seq.counts.in_flight or seq.pending != 1 or seq.embeds:
        return 0
    return max(0, min(budget - 1, most, seq.max_known - 1 - seq.counts.known))


def propose(drafter: Drafter, seq: Sequence, most: int, vocab_size: int) -> array[int]:
    """A draft of ids that exist; what follows one that does not is left out."""
    draft = array("i")
    for token in list(drafter.propose(seq, most))[:most]:
        if not 0 <= token < vocab_size:
            break
        draft.append(token)
    return draft


def settle(seq: Sequence, work: Work, accepted: int, current: bool) -> int:
    """The step is done: what was accepted of its draft is known and, where the sequence kept its blocks (`current`),
    computed. Returns how many of the work's tokens are of use."""
    if not work.drafted:
        return work.count
    seq.counts.drafted = 0
    seq.counts.known += accepted
    seq.emission.plan(seq.emission.unread + accepted)  # their log-probabilities came with them
    if current:
        seq.counts.computed += accepted
    return work.count - work.drafted + accepted
