"""The guesses of a FakeRunner (`Work.propose`): the ids that it will sample, or others."""

from __future__ import annotations

from typing import Any

from kvasir.plan import Ahead, Work
from kvasir.runner.executor import ExecutorStep
from kvasir.runner.fake_content import fake_mixed
from kvasir.runner.proposals import Proposer
from kvasir.runner.rows import Rows


class FakeProposer(Proposer):
    """Guesses the ids that an executor (FakeExecutor) will sample. Checks that a row has blocks for as many as it asks
    for. right: the share of right guesses; whether one is depends on the ids before it alone. positions: as of a
    Proposer."""

    def __init__(self, executor: Any, right: float, positions: int):
        self.executor, self.right, self.positions = executor, right, positions

    def bind(self, rows: Rows) -> None:
        self.rows = rows

    def enter(self, row: int) -> None: ...

    def begin(self, step: ExecutorStep) -> None: ...

    def propose(self, step: ExecutorStep, ahead: Ahead | None = None) -> dict[int, tuple[int, ...]]:
        found = {at: tuple(self._guesses(work, ahead)) for at, work in enumerate(step.works) if work.propose}
        return {at: ids for at, ids in found.items() if ids}

    def _guesses(self, work: Work, ahead: Ahead | None) -> list[int]:
        row, begin = self.rows[work.row], work.end - work.drafted
        if row.fault:
            return []
        assert work.sample and not work.want_pooled, "guesses follow an id that is sampled"
        known, last, cache = row.known, row.known - 1 + work.propose, self.executor.cache
        assert last <= self.positions, "more guesses than there are positions"
        for kind, filled in zip(cache.kinds, row.filled, strict=True):
            assert kind.fixed or filled >= -(-last // cache.size), "there are no blocks for the guesses"
        for at in range(known, known + work.propose):
            mask = ahead(row.number, row.ids[begin:at].tolist()) if ahead and row.spec.guided else None
            if mask == b"":
                return row.ids[known:at].tolist()
            row.ids[at] = self.executor.next_id(row, row.ids[:at], mask)
            if fake_mixed("guess", row.ids[:at].tolist()) % 1000 >= 1000 * self.right:
                row.ids[at] = (row.ids[at] + 1) % self.executor.capacity.vocab_size
            if row.ids[at] in row.spec.stop_ids:
                return row.ids[known : at + 1].tolist()
        return row.ids[known : known + work.propose].tolist()
