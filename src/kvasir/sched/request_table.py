"""The status of every sequence, the rows of the running ones, and the unfinished sequences of each request."""

from __future__ import annotations

from collections import Counter

from kvasir.sched import slo
from kvasir.sched.lane import Lane
from kvasir.sched.sequence import Sequence, Status
from kvasir.types import Request, ServiceClass


class RequestTable:
    """Owns the status of all sequences, and the rows. waits, runs: number of waiting and running sequences per class.
    weights: by class, of the tenants that have such sequences. Paused sequences do not count."""

    def __init__(self, max_rows: int):
        self.max_rows = max_rows
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.requests: dict[str, list[Sequence]] = {}
        self.moved: set[Sequence] = set()  # began or stopped waiting since it was last cleared
        self.lane = Lane(max_rows)
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.left: list[int] = []  # freed rows not yet reported to the runner
        self.waits: Counter[ServiceClass] = Counter()
        self.runs: Counter[ServiceClass] = Counter()
        self.weights: dict[ServiceClass, dict[str, float]] = {c: {} for c in ServiceClass}
        self._deadlines: list[Sequence] = []  # sequences with a deadline, some ended
        self._shares: Counter[tuple[ServiceClass, str]] = Counter()

    def enter(self, request_id: str, sequences: list[Sequence]) -> None:
        """Adds the sequences of a new request as waiting."""
        self.requests[request_id] = sequences
        for seq in sequences:
            self._queue(seq)
            self._present(seq.request)
        self._deadlines += [s for s in sequences if s.request.deadline is not None]

    def join(self, seq: Sequence) -> None:
        """Gives a waiting sequence a row."""
        self._unqueue(seq)
        self.running.append(seq)
        self.runs[seq.request.slo] += 1
        seq.status, seq.row = Status.RUNNING, self.free_rows.pop()

    def wait(self, seq: Sequence) -> None:
        """Frees the row of a running sequence; it waits again."""
        self._leave(seq)
        self._queue(seq)

    def pause(self, seq: Sequence) -> None:
        """Makes a waiting sequence paused."""
        self._unqueue(seq)
        self._absent(seq.request)
        self.paused.append(seq)
        seq.status = Status.PAUSED

    def resume(self, seq: Sequence) -> None:
        """Makes a paused sequence wait again."""
        self.paused.remove(seq)
        self._queue(seq)
        self._present(seq.request)

    def end(self, seq: Sequence) -> bool:
        """Ends a sequence; returns whether it was the last of its request."""
        request = seq.request
        if seq.status is Status.PAUSED:
            self.paused.remove(seq)
        else:
            self._leave(seq) if seq.status is Status.RUNNING else self._unqueue(seq)
            self._absent(request)
        seq.status = Status.FINISHED
        siblings = self.requests[request.id]
        siblings.remove(seq)
        if siblings:
            return False
        del self.requests[request.id]
        return True

    def _queue(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        self.moved.add(seq)
        self.waits[seq.request.slo] += 1
        seq.status = Status.WAITING

    def _unqueue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.moved.add(seq)
        self.waits[seq.request.slo] -= 1

    def _present(self, request: Request) -> None:
        self._shares[request.slo, request.tenant] += 1
        self.weights[request.slo][request.tenant] = request.weight

    def _absent(self, request: Request) -> None:
        self._shares[request.slo, request.tenant] -= 1
        if not self._shares[request.slo, request.tenant]:
            del self._shares[request.slo, request.tenant], self.weights[request.slo][request.tenant]

    def outside(self) -> list[Sequence]:
        """Running sequences that are not in the lane."""
        if not self.lane:
            return self.running
        return [] if len(self.lane) == len(self.running) else [s for s in self.running if s not in self.lane]

    def _leave(self, seq: Sequence) -> None:
        self.lane.leave(seq)
        self.running.remove(seq)
        self.runs[seq.request.slo] -= 1
        self.left.append(seq.row)
        self.free_rows.append(seq.row)
        seq.row = -1

    def take_left(self) -> tuple[int, ...]:
        """Returns and clears the freed rows that the runner must be informed of."""
        left, self.left = tuple(self.left), []
        return left

    def expires(self, now: float) -> float | None:
        """Seconds until the next deadline, 0 if one has passed; None if there is none."""
        living = [s for s in self._deadlines if s.status is not Status.FINISHED]
        ends = [s.arrived + s.request.deadline for s in living if s.request.deadline is not None]
        return max(0.0, min(ends) - now) if ends else None

    def expired(self, now: float) -> list[Sequence]:
        """The unfinished sequences whose deadline has passed."""
        self._deadlines = [s for s in self._deadlines if s.status is not Status.FINISHED]
        return [s for s in self._deadlines if slo.expired(now - s.arrived, s.request.deadline)]

    def all(self) -> list[Sequence]:
        """All unfinished sequences."""
        return self.waiting + self.running + self.paused

    def check(self) -> None:
        """Raises AssertionError."""
        everybody = self.all()
        rows = [s.row for s in self.running] + self.free_rows
        assert sorted(rows) == list(range(self.max_rows)), "rows are lost or used twice"
        held = (id(s) for sequences in self.requests.values() for s in sequences)
        self.lane.check()
        assert sorted(map(id, everybody)) == sorted(held), "a sequence is lost"
        shares = Counter((s.request.slo, s.request.tenant) for s in self.waiting + self.running)
        assert self._shares == shares, "tenants are miscounted"
        assert {(c, t) for c, tenants in self.weights.items() for t in tenants} == set(shares), "weights are miscounted"
        for counted, there in ((self.waits, self.waiting), (self.runs, self.running)):
            assert +counted == Counter(s.request.slo for s in there), "a class is miscounted"
