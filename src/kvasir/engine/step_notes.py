"""StepNotes: the steps of traced requests, as notes in their deltas. It costs nothing while no request is traced."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvasir.plan import StepPlan
from kvasir.types import Delta, Note, Request, Tokens

MOST = 128  # notes of a request; later steps are one note


@dataclass(slots=True)
class _Traced:
    """added: when the engine got it, in seconds since 1970. left: choices that have not ended. notes: for its next
    delta. count: of its notes so far. rest: the steps after MOST notes. begun: it has a token."""

    added: float
    left: int
    notes: list[Note] = field(default_factory=list)
    count: int = 0
    rest: Note | None = None
    begun: bool = False


class StepNotes:
    """Of the requests of one engine."""

    def __init__(self) -> None:
        self._traced: dict[str, _Traced] = {}

    def __bool__(self) -> bool:
        return bool(self._traced)

    def add(self, request: Request) -> None:
        """Takes a traced request that the engine has taken."""
        self._traced[request.id] = _Traced(time.time(), request.params.n - len(request.done))

    def forget(self, request_id: str) -> None:
        self._traced.pop(request_id, None)

    def step(self, plan: StepPlan, parts: Iterable[tuple[str, int]], seconds: float) -> None:
        """Takes a step that has just ended. parts: the requests in it, each with its number of tokens. seconds: that
        it took."""
        own: dict[str, int] = {}
        for id, count in parts:
            if id in self._traced:
                own[id] = own.get(id, 0) + count
        end = time.time()
        for id, count in own.items():
            self._note(self._traced[id], plan, count, end - seconds, end)

    def _note(self, one: _Traced, plan: StepPlan, count: int, begin: float, end: float) -> None:
        if not one.count:
            one.notes.append(Note("queue", one.added, max(one.added, begin), {"pid": os.getpid()}))
        one.count += 1
        if one.count > MOST:
            rest = one.rest or Note("steps", begin, end, {"count": 0, "tokens": 0})
            facts = {"count": int(rest.facts["count"]) + 1, "tokens": int(rest.facts["tokens"]) + count}
            one.rest = Note(rest.name, rest.begin, end, {**facts})
            return
        rows = len(plan.decodes) + len(plan.work)
        facts = {"step": plan.step, "tokens": count, "step_rows": rows, "step_tokens": plan.num_tokens}
        one.notes.append(Note("decode" if one.begun else "prefill", begin, end, {**facts}))

    def attached(self, added: Iterable[Delta | Tokens]) -> list[Delta | Tokens]:
        """What a step adds, with the notes of traced requests in their deltas."""
        found: list[Delta | Tokens] = []
        for part in added:
            if isinstance(part, Delta):
                found.append(self._with_notes(part))
            elif self._traced.keys().isdisjoint(part.ids):
                found.append(part)
            else:
                found += map(self._with_notes, part.deltas())
        return found

    def _with_notes(self, delta: Delta) -> Delta:
        one = self._traced.get(delta.id)
        if one is None:
            return delta
        one.begun |= bool(delta.token_ids)
        notes, one.notes = tuple(one.notes), []
        if delta.finish_reason:
            one.left -= 1
            if one.left <= 0:
                notes += (one.rest,) if one.rest else ()
                self.forget(delta.id)
        return replace(delta, notes=notes) if notes else delta
