"""A drafter that knows the plain answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.sched.sequence import Sequence
from tests.sched.one_by_one import OneByOne

if TYPE_CHECKING:
    from tests.composition.run import Run


class KnowingDrafter(OneByOne):
    """Drafts of the plain answers, in which some ids are wrong; for requests that have none, of ids that are wrong."""

    def __init__(self, run: Run):
        self._run = run

    def waits(self, seq: Sequence) -> bool:
        return self._run.random.random() < 0.5

    def guess(self, seq: Sequence, most: int) -> list[int]:
        run, begin = self._run, len(seq.tokens) - seq.prompt_len
        known = [r for r in run.requests if r.id == seq.request.id]
        coming = run.expected(known[0])[seq.request.id, seq.index].tokens[begin:] if known else list(seq.tokens[:4])
        right = run.random.choice((0.0, 0.7, 1.0, 1.0))
        return [t if run.random.random() < right else t ^ 1 for t in coming[:most]]
