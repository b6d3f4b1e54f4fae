"""The journal of unfinished requests: what must be sent again when an engine process dies, and what must not.

A pure state machine, without sockets. The rules:

- a request that was only waiting is sent again as often as needed;
- one that was being computed is sent again once; at its second death it gets a clear error, so that a poison request
  cannot loop. When nothing was being computed, those that the engine had taken stand in: one of them may have killed
  it before its first step. What an engine never took loses no life with it;
- after a death those that were being computed go back one at a time (*quarantine*): the next is sent when the one
  before has produced a token. So a poison request dies alone, and its neighbours do not pay for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from kvasir.types import Delta, FinishReason, Request

MAX_DEATHS = 2


class Stage(IntEnum):
    """How far a request came with the engine of now: held back here, sent, taken by it, in a step of it."""

    HELD = 0
    SENT = 1
    TAKEN = 2
    JOINED = 3


@dataclass(slots=True)
class Entry:
    """arrived: by the journal's clock. returned: an engine died that it had been sent to. deaths: those it may have
    caused."""

    request: Request
    arrived: float
    streamed: dict[int, list[int]] = field(default_factory=dict)
    carries: dict[int, bytes] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    stage: Stage = Stage.HELD
    returned: bool = False
    deaths: int = 0

    @property
    def open(self) -> list[int]:
        """The answers that have not ended."""
        return [i for i in range(self.request.params.n) if i not in self.done]

    def to_send(self, now: float) -> Request:
        """The request as it goes to an engine: it has waited so long, what was streamed is known, finished answers are
        left out."""
        request = replace(self.request, waited=now - self.arrived, done=tuple(sorted(self.done)))
        if not self.returned:
            return request
        answers = range(request.params.n)
        return replace(
            request,
            resume_ids=tuple(tuple(self.streamed.get(i, ())) for i in answers),
            resume_carries=tuple(self.carries.get(i, b"") for i in answers),
        )


class Journal:
    """Entries in order of arrival. `to_send` says what may go to the engine now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.entries: dict[str, Entry] = {}
        self._quarantine: list[str] = []
        self._suspect: str | None = None

    @property
    def num_held(self) -> int:
        """Answers that wait for an engine, or for the end of a quarantine."""
        return sum(len(e.open) for e in self.entries.values() if e.stage is Stage.HELD)

    def add(self, request: Request) -> None:
        self.entries[request.id] = Entry(request, self._clock(), done=set(request.done))

    def forget(self, request_id: str) -> None:
        """The request has ended, was refused, or its client left."""
        self.entries.pop(request_id, None)
        if request_id in self._quarantine:
            self._quarantine.remove(request_id)
        if self._suspect == request_id:
            self._suspect = None

    def abandon(self, request_id: str, index: int) -> None:
        """One answer is not wanted any more."""
        if entry := self.entries.get(request_id):
            self._finish(entry, index)

    def reached(self, ids: Iterable[str], stage: Stage) -> None:
        """The engine says how far these came."""
        for request_id in ids:
            if entry := self.entries.get(request_id):
                entry.stage = stage

    def overdue(self) -> list[Delta]:
        """Ends what is held back beyond its deadline; its last deltas."""
        now, ended = self._clock(), []
        for entry in list(self.entries.values()):
            deadline = entry.request.deadline
            if entry.stage is Stage.HELD and deadline is not None and now - entry.arrived >= deadline:
                ended += [Delta(entry.request.id, i, finish_reason=FinishReason.TIMEOUT) for i in entry.open]
                self.forget(entry.request.id)
        return ended

    def take(self, delta: Delta) -> bool:
        """Notes a delta; False when it belongs to nobody."""
        entry = self.entries.get(delta.id)
        if entry is None:
            return False
        if delta.id == self._suspect:
            self._suspect = None
        if delta.token_ids:
            entry.streamed.setdefault(delta.index, []).extend(delta.token_ids)
            entry.carries[delta.index] = delta.carry
        if delta.finish_reason:
            self._finish(entry, delta.index)
        return True

    def _finish(self, entry: Entry, index: int) -> None:
        entry.done.add(index)
        if len(entry.done) >= entry.request.params.n:
            self.forget(entry.request.id)

    def to_send(self) -> list[Request]:
        """Requests that go to the engine now; they count as sent."""
        if self._suspect is not None:
            return []
        if self._quarantine:
            self._suspect = self._quarantine.pop(0)
            ready = [self.entries[self._suspect]]
        else:
            ready = [e for e in self.entries.values() if e.stage is Stage.HELD]
        for entry in ready:
            entry.stage = Stage.SENT
        now = self._clock()
        return [entry.to_send(now) for entry in ready]

    def death(self) -> list[Request]:
        """The engine died. Returns the requests that must get an error; all others will be sent again."""
        sent = [e for e in self.entries.values() if e.stage is not Stage.HELD]
        furthest = max((e.stage for e in sent), default=Stage.HELD)
        running = [e for e in sent if e.stage is furthest] if furthest > Stage.SENT else []
        suspect = self.entries[self._suspect] if self._suspect else None
        blamed = [suspect] if suspect and suspect.stage > Stage.SENT else running
        for entry in blamed:
            entry.deaths += 1
        failed = [e for e in blamed if e.deaths >= MAX_DEATHS]
        back = [e.request.id for e in sent if (e is suspect or e in running) and e not in failed]
        self._suspect = None
        self._quarantine = back + self._quarantine
        for entry in sent:
            entry.stage, entry.returned = Stage.HELD, True
        for entry in failed:
            self.forget(entry.request.id)
        return [e.request for e in failed]
