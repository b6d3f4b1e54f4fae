"""The journal of unfinished requests: what must be sent again when an engine process dies, and what must not.

A pure state machine, without sockets or clocks. The rules:

- a request that was only waiting is sent again as often as needed;
- one that was being computed is sent again once; at its second death it gets a clear error, so that a poison request
  cannot loop;
- after a death those that were being computed go back one at a time (*quarantine*): the next is sent when the one
  before has produced a token. So a poison request dies alone, and its neighbours do not pay for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvasir.types import Delta, Request

MAX_DEATHS = 2


@dataclass(slots=True)
class Entry:
    request: Request
    streamed: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    sent: bool = False
    joined: bool = False
    deaths: int = 0

    def resumed(self) -> Request:
        """The request as it goes to a fresh engine: what was streamed is known, finished answers are left out."""
        if not self.streamed and not self.done:
            return self.request
        ids = tuple(tuple(self.streamed.get(i, ())) for i in range(self.request.params.n))
        return replace(self.request, resume_ids=ids, done=tuple(sorted(self.done)))


class Journal:
    """Entries in order of arrival. `to_send` says what may go to the engine now."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._quarantine: list[str] = []
        self._suspect: str | None = None

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine, or for the end of a quarantine."""
        return sum(not e.sent for e in self.entries.values())

    def add(self, request: Request) -> None:
        self.entries[request.id] = Entry(request, done=set(request.done))

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

    def joining(self, ids: list[str]) -> None:
        for request_id in ids:
            if entry := self.entries.get(request_id):
                entry.joined = True

    def take(self, delta: Delta) -> bool:
        """Notes a delta; False when it belongs to nobody."""
        entry = self.entries.get(delta.id)
        if entry is None:
            return False
        if delta.id == self._suspect:
            self._suspect = None
        entry.streamed.setdefault(delta.index, []).extend(delta.token_ids)
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
            ready = [e for e in self.entries.values() if not e.sent]
        for entry in ready:
            entry.sent = True
        return [entry.resumed() for entry in ready]

    def death(self) -> list[Request]:
        """The engine died. Returns the requests that must get an error; all others will be sent again."""
        sent = [e for e in self.entries.values() if e.sent]
        running = [e for e in sent if e.joined] or sent
        blamed = [self.entries[self._suspect]] if self._suspect else running
        for entry in blamed:
            entry.deaths += 1
        failed = [e for e in blamed if e.deaths >= MAX_DEATHS]
        back = [e.request.id for e in running if e not in failed and e.request.id not in self._quarantine]
        self._suspect = None
        self._quarantine = back + self._quarantine
        for entry in sent:
            entry.sent = entry.joined = False
        for entry in failed:
            self.forget(entry.request.id)
        return [e.request for e in failed]
