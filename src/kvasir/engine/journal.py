"""The journal of unfinished requests: which to send again after an engine process dies, and which not.

A pure state machine, without sockets. The rules:

- A request that was only waiting is sent again as often as needed.
- After a death, the requests that were being computed are sent again with all others, and resume where their streams
  stopped. If nothing was being computed, the requests that the engine had taken count as computed.
- A request becomes a suspect if two engines die while they compute it, without a token of it in between. Suspects are
tried in groups while nothing else is sent: the next group is sent once each request of the current group has produced a
token. If the engine dies again, its suspects are split in half. A single suspect is tried in an engine of its own.
- A paused request is not being computed: a death does not make it a suspect, and it is sent again only when it resumes.
- A request fails only if it is a suspect and was the only request in the engine. So p poison requests among n cost
about p log n restarts, and other requests lose only time.
- Two requests that kill an engine only together are never alone when it dies. Each time one of them is tried alone, it
must produce twice as many tokens before others join it, so this also ends after a few restarts.
- If other engines can continue requests (`give_up`), only suspects stay and are tried here. A request takes its counts
of deaths along, so two engines of a fleet die before it is a suspect, and after that only one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Self

from kvasir.types import Delta, FinishReason, Request

SUSPECT_DEATHS = 2  # deaths while a request was computed, with no token of it in between
SUSPECT_LIVES = 4  # engines that died while the request merely waited there: it may kill before it is computed


class RequestStage(IntEnum):
    """How far a request got in the current engine: held back here, sent, in the engine's queue, being added to it, in a
    step. If the engine dies, a request in one of the last two stages may be the cause."""

    HELD = 0
    SENT = 1
    TAKEN = 2
    ADDING = 3
    JOINED = 4


@dataclass(slots=True)
class JournalEntry:
    """arrived: by the journal's clock. returned: an engine that it was sent to has died. deaths: engines whose death
    it may have caused; lives: engines that died with it; both since its last token. trials: how often it was tried
    alone. owed: tokens to come before its trial ends. paused: its client reads too slowly."""

    request: Request
    arrived: float
    streamed: dict[int, list[int]] = field(default_factory=dict)
    carries: dict[int, bytes] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    stage: RequestStage = RequestStage.HELD
    returned: bool = False
    deaths: int = 0
    lives: int = 0
    trials: int = 0
    owed: int = 0
    paused: bool = False

    @classmethod
    def of(cls, request: Request, now: float) -> Self:
        """The entry of a request that arrives; what it brings from other engines counts."""
        entry = cls(request, now - request.waited, done=set(request.done), deaths=request.deaths, lives=request.lives)
        if request.resume_ids:
            entry.returned = True
            entry.streamed = {i: list(ids) for i, ids in enumerate(request.resume_ids)}
            entry.carries = dict(enumerate(request.resume_carries))
        return entry

    @property
    def is_suspect(self) -> bool:
        """Whether it is tried apart from other requests."""
        return self.deaths >= SUSPECT_DEATHS or self.lives >= SUSPECT_LIVES

    @property
    def open(self) -> list[int]:
        """The choices that have not ended."""
        return [i for i in range(self.request.params.n) if i not in self.done]

    def take(self, delta: Delta) -> None:
        """Records a delta."""
        if delta.token_ids:
            self.deaths = self.lives = 0
            self.streamed.setdefault(delta.index, []).extend(delta.token_ids)
            self.carries[delta.index] = delta.carry
        if delta.finish_reason:
            self.done.add(delta.index)

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        deadline = self.request.deadline
        return deadline is not None and now - self.arrived >= deadline

    def last(self, reason: FinishReason, indices: Iterable[int]) -> list[Delta]:
        """The last deltas of choices that end here."""
        return [Delta(self.request.id, i, finish_reason=reason) for i in indices]

    def to_send(self, now: float) -> Request:
        """The request as sent to an engine: with the time it has waited, without ended choices, and, if it is sent
        again, with the ids streamed so far."""
        request = replace(
            self.request,
            waited=now - self.arrived,
            done=tuple(sorted(self.done)),
            deaths=self.deaths,
            lives=self.lives,
        )
        if not self.returned:
            return request
        answers = range(request.params.n)
        return replace(
            request,
            resume_ids=tuple(tuple(self.streamed.get(i, ())) for i in answers),
            resume_carries=tuple(self.carries.get(i, b"") for i in answers),
        )


class Journal:
    """The open requests in order of arrival. `to_send` returns those that may go to the engine now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.entries: dict[str, JournalEntry] = {}
        self._groups: list[list[str]] = []  # of suspects, tried one group after another
        self._adding: str | None = None  # the request that the engine is putting into its queue
        self._trial: set[str] = set()  # requests of the current group that owe tokens

    @property
    def on_trial(self) -> bool:
        """Whether suspects are being tried: each death then narrows them down."""
        return bool(self._groups or self._trial)

    @property
    def in_hand(self) -> bool:
        """Whether the current engine was sent a request that has not ended."""
        return any(e.stage is not RequestStage.HELD for e in self.entries.values())

    @property
    def num_held(self) -> int:
        """The number of choices that wait for an engine, or for the end of a trial."""
        return sum(len(e.open) for e in self.entries.values() if e.stage is RequestStage.HELD)

    def add(self, request: Request) -> None:
        """Takes a request, which may have been in other engines before."""
        self.entries[request.id] = JournalEntry.of(request, self._clock())

    def forget(self, request_id: str) -> None:
        """Removes a request that has ended, was refused, or whose client left."""
        self.entries.pop(request_id, None)
        self._trial.discard(request_id)

    def pause(self, request_id: str, whether: bool) -> None:
        """Records that the engine pauses or resumes the request. A trial does not wait for it."""
        if entry := self.entries.get(request_id):
            entry.paused = whether
            self._trial.discard(request_id)

    def abandon(self, request_id: str, index: int) -> None:
        """Records that a choice is no longer wanted."""
        if entry := self.entries.get(request_id):
            self._finish(entry, index)

    def reached(self, ids: Iterable[str], stage: RequestStage) -> None:
        """Records the stage that the engine reports for these requests."""
        for request_id in ids:
            if entry := self.entries.get(request_id):
                entry.stage = stage

    def take_report(self, reported: str | list[str] | None) -> None:
        """Takes a report of stages from the engine's standard output (worker.py)."""
        if isinstance(reported, list):
            self.reached(reported, RequestStage.JOINED)
            return
        if self._adding is not None:
            self.reached([self._adding], RequestStage.TAKEN)
        if reported is not None:
            self.reached([reported], RequestStage.ADDING)
        self._adding = reported

    def overdue(self) -> list[Delta]:
        """Ends held-back requests whose deadline has passed; returns their last deltas."""
        now, ended = self._clock(), []
        for entry in list(self.entries.values()):
            if entry.stage is RequestStage.HELD and entry.is_overdue(now):
                ended += entry.last(FinishReason.TIMEOUT, entry.open)
                self.forget(entry.request.id)
        return ended

    def take(self, delta: Delta) -> bool:
        """Records a delta; False if its request is unknown."""
        entry = self.entries.get(delta.id)
        if entry is None:
            return False
        entry.take(delta)
        entry.owed -= len(delta.token_ids)
        if delta.token_ids and entry.owed <= 0:
            self._trial.discard(delta.id)
        if delta.finish_reason:
            self._finish(entry, delta.index)
        return True

    def _finish(self, entry: JournalEntry, index: int) -> None:
        entry.done.add(index)
        if len(entry.done) >= entry.request.params.n:
            self.forget(entry.request.id)

    def to_send(self) -> list[Request]:
        """Returns the requests that go to the engine now, and marks them as sent."""
        if self._trial:
            return []
        held = [e for e in self.entries.values() if e.stage is RequestStage.HELD and not e.paused]
        ready = self._next_group() or held
        for entry in ready:
            entry.stage = RequestStage.SENT
        now = self._clock()
        return [entry.to_send(now) for entry in ready]

    def _next_group(self) -> list[JournalEntry]:
        """Starts the next trial, if one is left; returns its requests."""
        while self._groups:
            found = (self.entries.get(name) for name in self._groups.pop(0))
            group = [entry for entry in found if entry and not entry.paused]
            for entry in group:
                entry.trials += len(group) == 1
                entry.owed = 2 ** (entry.trials - 1) if len(group) == 1 else 1
            self._trial = {entry.request.id for entry in group}
            if group:
                return group
        return []

    def death(self) -> list[Request]:
        """Records the death of the engine. Returns the requests that must get an error; all others are sent again."""
        sent = [e for e in self.entries.values() if e.stage is not RequestStage.HELD]
        taken = [e for e in sent if e.stage >= RequestStage.TAKEN and not e.paused]
        untouched = [e.request.id for e in sent if e.request.id in self._trial and e not in taken]
        for entry in taken:
            entry.lives += 1
        for entry in [e for e in taken if e.stage >= RequestStage.ADDING] or taken:
            entry.deaths += 1
        for entry in sent:
            entry.stage, entry.returned = RequestStage.HELD, True
            entry.request = replace(entry.request, takes=None)  # the blocks that came for it are lost
        suspects = [e.request.id for e in taken if e.is_suspect]
        failed = taken if len(taken) == 1 and taken[0].deaths >= SUSPECT_DEATHS else []
        self._trial, self._adding = set(), None
        for entry in failed:
            self.forget(entry.request.id)
            suspects.remove(entry.request.id)
        half = (len(suspects) + 1) // 2
        self._groups = [g for g in (suspects[:half], suspects[half:], untouched) if g] + self._groups
        return [entry.request for entry in failed]

    def give_up(self) -> list[JournalEntry]:
        """Removes and returns the held requests that another engine can continue: all that are not on trial here."""
        tried = {name for group in self._groups for name in group} | self._trial
        entries = self.entries.items()
        found = [e for name, e in entries if e.stage is RequestStage.HELD and name not in tried and not e.is_suspect]
        for entry in found:
            self.forget(entry.request.id)
        return found
