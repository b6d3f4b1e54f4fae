"""PromptProgress: reports how much of a prompt is computed to requests that ask for it, in deltas without tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvasir.plan import Work
from kvasir.sched.sequence import Sequence
from kvasir.types import Delta, Progress, Request, Tokens


class PromptProgress:
    """Of the requests of one engine. A request with several choices computes its prompt once, for the first of them
    that it joins with."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}  # by request: when its first step began, 0.0 before
        self._index: dict[str, int] = {}  # the choice that is followed
        self._deltas: list[Delta] = []

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, request: Request) -> None:
        """Takes a request that asks for its progress."""
        self._begun[request.id] = 0.0

    def forget(self, request_id: str) -> None:
        self._begun.pop(request_id, None)
        self._index.pop(request_id, None)

    def step(self, pairs: Iterable[tuple[Sequence, Work]], seconds: float) -> None:
        """Takes a step that has just ended, after `seconds`, with the sequences in it."""
        now = time.monotonic()
        for seq, work in pairs:
            id = seq.request.id
            if id not in self._begun or self._index.setdefault(id, seq.index) != seq.index:
                continue
            begun = self._begun[id] = self._begun[id] or now - seconds
            done = min(work.start + work.count, seq.prompt_len)
            self._deltas.append(
                Delta(id, seq.index, cached_tokens=seq.cached, progress=Progress(done, now - begun), at=now)
            )
            if done == seq.prompt_len:
                self.forget(id)

    def with_deltas(self, added: list[Delta | Tokens]) -> list[Delta | Tokens]:
        """What a step adds, with the progress before it. Requests that end are forgotten."""
        for part in added:
            if isinstance(part, Delta) and part.finish_reason:
                self.forget(part.id)
        found, self._deltas = self._deltas, []
        return [*found, *added]
