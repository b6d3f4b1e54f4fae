"""Drafters of tests, which guess for one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvasir.sched.drafts import Asked, StepTime
from kvasir.sched.sequence import Sequence


class OneByOne:
    """A Drafter that asks `guess`, and learns nothing."""

    saved = 0.0

    def pays(self, rows: int, predicted: bool) -> bool:
        return True

    def measured(self, rows: int, drafted: int, time: StepTime) -> None:
        pass

    def waits(self, sequences: Seq[Sequence]) -> bool:
        return True

    def guess(self, seq: Sequence, most: int) -> Seq[int]:
        raise NotImplementedError

    def propose(self, asked: Seq[Asked], budget: int) -> list[Seq[int]]:
        return [self.guess(seq, most) for seq, most in asked]

    def asks(self, seq: Sequence, most: int) -> int:
        return 0

    def proposed(self, seq: Sequence, ids: Seq[int], after: int) -> None:
        pass

    def measured_proposals(self, rows: int, most: int, seconds: float) -> None:
        pass

    def settle(self, seq: Sequence, drafted: int, accepted: int) -> None:
        pass

    def leave(self, seq: Sequence) -> None:
        pass

    learns = False

    def learn(self, most: int) -> int:
        return 0
