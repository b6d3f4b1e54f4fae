"""Event ids: names of places in a stream, from which any server of the same model can continue it.

A client asks for them with the header X-Kvasir-Event-Ids. When its connection breaks, it sends the same body again, to
this server or another one, with the last id that it got as Last-Event-ID. Because results are exact, nothing has to be
stored: the server computes the answer again with the same seed and sends what comes after that place. An id is

    name . time . seed . request . begin . end . events . tokens [ . choice . ends ]

the stream (24 hex digits of its response's id, time of creation, seed, checksum of what is computed), and the place in
it: so many events of the delta with the tokens from `begin` to `end`, with a checksum of all tokens up to there. With
several choices, that delta is one of `choice`, and `ends` are the numbers of tokens of all choices, joined by hyphens.
Choice j of prompt i has the number i * n + j. Numbers are hexadecimal.

Deltas may be cut differently each time, and those of several choices come in another order. So the tokens that the
client has are collected first; then they pass in such a way that the delta of the client's place is the last of them.
Several prompts take turns: a delta passes when the events of the one before are encoded.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import zlib
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import reduce

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.seeds import DRAWN
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.concurrent import AT_ONCE
from kvasir.serve.http.faults import CannotContinue
from kvasir.server_statistics import HttpStats
from kvasir.types import Delta, FinishReason, Request

ASKED_HEADER = "x-kvasir-event-ids"
LAST_HEADER = "last-event-id"
_NO = ("", "0", "false", "off")
_ID = re.compile(
    r"(?P<name>[0-9a-f]{24})\.(?P<created>[0-9a-f]{1,9})\.(?P<seed>-?[0-9a-f]{1,16})\.(?P<request>[0-9a-f]{8})"
    r"\.(?P<begin>[0-9a-f]{1,8})\.(?P<end>[0-9a-f]{1,8})\.(?P<events>[0-9a-f]{1,8})\.(?P<tokens>[0-9a-f]{8})"
    r"(\.(?P<choice>[0-9a-f]{1,3})\.(?P<ends>[0-9a-f]{1,8}(-[0-9a-f]{1,8}){1,255}))?"
)
_OTHER_TOKENS = "this server computes other tokens"
MAX_CHOICES = 256  # of all prompts together


@dataclass(frozen=True, slots=True)
class Place:
    """So many events of the delta of `choice` with its tokens from `begin` to `ends[choice]`. ends: of each choice, the
    number of tokens up to there. tokens: their checksum."""

    begin: int
    events: int
    tokens: int
    choice: int
    ends: tuple[int, ...]

    @property
    def before(self) -> tuple[int, ...]:
        """Of each choice, the number of tokens before the delta."""
        return (*self.ends[: self.choice], self.begin, *self.ends[self.choice + 1 :])

    def __str__(self) -> str:
        place = f"{self.begin:x}.{self.ends[self.choice]:x}.{self.events:x}.{self.tokens:08x}"
        several = f".{self.choice:x}.{'-'.join(f'{end:x}' for end in self.ends)}"
        return place + several if len(self.ends) > 1 else place


class EventIds:
    """Of one stream. id: of its response. cores: its requests, one per prompt, with ids and seeds of the stream.
    engine_ids: for the id of each, the request's id in the engine. created: seconds since 1970."""

    def __init__(
        self, cores: Sequence[Request], serving: Serving, meter: HttpStats, prefix: str, last: str | None, lines: bool
    ):
        """prefix: of the response's id. last: the client's last id, None for a new stream. lines: the stream consists
        of JSON objects, one per line, rather than of events. Raises CannotContinue, InvalidRequest."""
        self._meter = meter
        self._lines = lines
        self._last: Place | None = None  # None: a new stream, or one that has passed the client's place
        self._there = False  # whether the delta of the client's place is the current one
        self._refused = False
        self._begin = self._events = self._tokens = self._choice = 0  # the place, as in Place
        self._ends = [0 for core in cores for _ in range(core.params.n)]
        self._checksums = [0] * len(self._ends)  # CRC-32 of each choice's tokens
        self._turns = asyncio.Condition()
        name, self.created, seed, checksum = secrets.token_hex(12), int(time.time()), cores[0].params.seed, None
        if last is not None:
            parts, self._last = self._read(last, len(self._ends))
            name, self.created, seed, checksum = (parts[0], *(int(part, 16) for part in parts[1:]))
        assert seed is not None
        self.id = prefix + name
        self.cores = _of_stream(cores, self.id, seed)
        # The stream that broke may still be open in the same engine.
        again = "" if last is None else f"/{secrets.token_hex(4)}"
        self.engine_ids = {core.id: core.id + again for core in self.cores}
        self._first = {core.id: i * core.params.n for i, core in enumerate(self.cores)}  # number of its first choice
        own = _checksum(self.cores, serving)
        self._head = f"{name}.{self.created:x}.{seed:x}.{own:08x}"
        if checksum not in (None, own):
            self._refuse("the request, the model or the version of the server is another one")
        if self._last is not None and self._last.begin == self._last.ends[self._last.choice]:
            self._refuse("a choice ended there without a token, for a reason that is not repeated")

    def _read(self, last: str, choices: int) -> tuple[tuple[str, ...], Place]:
        """The parts of an id that name the stream, and its place. Raises InvalidRequest."""
        if parts := _ID.fullmatch(last):
            numbers = {key: int(parts[key] or "0", 16) for key in ("begin", "end", "events", "tokens", "choice")}
            end, choice = numbers.pop("end"), numbers["choice"]
            ends = tuple(int(each, 16) for each in (parts["ends"] or parts["end"]).split("-"))
            if len(ends) == choices and choice < choices and numbers["begin"] <= end == ends[choice]:
                return parts.group("name", "created", "seed", "request"), Place(**numbers, ends=ends)
        self._meter.continuations["refused"] += 1
        raise InvalidRequest("Last-Event-ID is no id of an event of this stream", "send the last one received")

    def _refuse(self, why: str) -> None:
        self._meter.continuations["refused"] += not self._refused
        self._refused = True
        raise CannotContinue(f"the stream cannot be continued: {why}", "send the request without Last-Event-ID")

    # -- what comes from the engine ------------------------------------------------------------------------------

    async def through(
        self, request: Request, submit: Callable[[Request], AsyncIterator[Delta]]
    ) -> AsyncGenerator[Delta]:
        """The engine's deltas for one of the prompts. Those that the client has come first, and the one of its place as
        the last of them. With several prompts, a caller must not ask for the next delta of one before the events of the
        last are encoded (`merge` without `ahead`). Raises CannotContinue."""
        first = self._first[request.id]
        async with aclosing(submit(replace(request, id=self.engine_ids[request.id]))) as deltas:  # type: ignore[type-var]
            if self._last is not None:
                known = deque(await self._collected(deltas, first, request.params.n, self._last))
                try:
                    while known:
                        async with self._turn(first, delta := known.popleft()):
                            yield delta
                        await asyncio.sleep(0)  # they may be many
                finally:  # a stop string may have ended the last choice before all of its tokens passed
                    while known and self._is_early(first, known[0]):
                        async with self._turn(first, known.popleft()):
                            pass
            async for delta in deltas:
                async with self._turn(first, delta):
                    yield delta

    @asynccontextmanager
    async def _turn(self, first: int, delta: Delta) -> AsyncGenerator[None]:
        """Waits until the delta may pass, and makes it the one whose events come next."""
        async with self._turns:
            await self._turns.wait_for(lambda: self._may_pass(first, delta))
            self._enter(first + delta.index, delta)
            try:
                yield
            finally:
                self._turns.notify_all()

    def _may_pass(self, first: int, delta: Delta) -> bool:
        """Whether all deltas that come earlier have passed."""
        if (last := self._last) is None or self._there or delta.finish_reason is FinishReason.ERROR:
            return True
        is_place = first + delta.index == last.choice and tuple(self._ends) == last.before
        return is_place or self._is_early(first, delta)

    def _is_early(self, first: int, delta: Delta) -> bool:
        """Whether the delta comes before that of the client's place."""
        choice = first + delta.index
        return self._last is not None and self._ends[choice] < self._last.before[choice]

    async def _collected(self, deltas: AsyncIterator[Delta], first: int, choices: int, last: Place) -> list[Delta]:
        """The deltas of a prompt until all of its choices have the client's tokens: these first, and then what came
        after. first: the number of its first choice."""
        ends = last.ends[first : first + choices]
        found: list[list[Delta]] = [[] for _ in ends]
        lacking = {i: end for i, end in enumerate(ends) if end}
        while lacking:
            if (delta := await anext(deltas, None)) is None:
                self._refuse("this server computes a shorter answer")
                break
            if delta.finish_reason is FinishReason.ERROR:
                return [delta]
            found[delta.index].append(delta)
            if delta.index not in lacking:
                continue
            lacking[delta.index] -= len(delta.token_ids)
            if lacking[delta.index] <= 0:
                del lacking[delta.index]
            elif delta.finish_reason:
                self._refuse(_OTHER_TOKENS)
        split = [_split(of_choice, end) for of_choice, end in zip(found, ends, strict=True)]
        own: list[Delta] = []
        if 0 <= (place := last.choice - first) < choices:
            known, parts = _split(split[place][0], last.begin)
            own = [*known, reduce(_join, parts)]
        others = [delta for i, (head, _) in enumerate(split) if i != place for delta in head]
        return [*others, *own, *(delta for _, rest in split for delta in rest)]

    def _enter(self, i: int, delta: Delta) -> None:
        """Makes the delta of choice `i` the one whose events come next."""
        if self._there:
            self._pass()
        self._choice = i
        self._begin, self._events = self._ends[i], 0
        self._ends[i] += len(delta.token_ids)
        self._checksums[i] = zlib.crc32(array("i", delta.token_ids).tobytes(), self._checksums[i])
        several = len(self._ends) > 1
        self._tokens = zlib.crc32(array("I", self._checksums).tobytes()) if several else self._checksums[i]
        if (last := self._last) is None:
            return
        self._there = (i, self._begin, *self._ends) == (last.choice, last.begin, *last.ends)
        if self._there and self._tokens != last.tokens:
            self._refuse(_OTHER_TOKENS)

    def _pass(self) -> None:
        if self._last is not None:
            self._last, self._there = None, False
            self._meter.continuations["continued"] += 1

    # -- what goes to the client ---------------------------------------------------------------------------------

    def numbered(self, data: bytes) -> bytes:
        """The events with their ids, without those that the client has."""
        found = []
        for event in data.splitlines(keepends=True) if self._lines else _events(data):
            self._events += 1
            if not self._is_known():
                found.append(self._with_id(event))
        return b"".join(found)

    def _is_known(self) -> bool:
        if (last := self._last) is None:
            return False
        if not self._there or self._events <= last.events:
            return True
        self._pass()
        return False

    def _with_id(self, event: bytes) -> bytes:
        place = Place(self._begin, self._events, self._tokens, self._choice, tuple(self._ends))
        id = f"{self._head}.{place}".encode()
        if self._lines:
            return event[: event.rindex(b"}")] + b',"event_id":"' + id + b'"}\n'
        return b"id: " + id + b"\n" + event

    def end(self) -> None:
        """Called when all events were sent. Raises CannotContinue if the client's place did not come."""
        if self._last is not None and not self._there:
            self._refuse(_OTHER_TOKENS)
        self._pass()


def with_event_ids(
    request: HTTPRequest, serving: Serving, cores: list[Request], *, stream: bool, prefix: str = "", lines: bool = False
) -> tuple[list[Request], EventIds | None]:
    """The engine's requests of an HTTP request, and the ids of its events if the client asks for them. Streams of more
    than AT_ONCE prompts or MAX_CHOICES choices have none. Raises InvalidRequest, CannotContinue."""
    last = request.headers.get(LAST_HEADER) or None
    asked = last is not None or request.headers.get(ASKED_HEADER, "").lower() not in _NO
    fits = len(cores) <= AT_ONCE and sum(core.params.n for core in cores) <= MAX_CHOICES
    if last is not None and not (stream and fits):
        expected = f"a stream of at most {AT_ONCE} prompts and {MAX_CHOICES} choices"
        raise InvalidRequest(f"Last-Event-ID without {expected}", "send the body of the stream that broke")
    if not (asked and stream and fits):
        return cores, None
    ids = EventIds(cores, serving, request.app.state.http_meter, prefix, last, lines)
    request.scope["state"]["engine_ids"] = tuple(ids.engine_ids.values())
    return ids.cores, ids


def _of_stream(cores: Sequence[Request], id: str, seed: int) -> list[Request]:
    """The requests of a stream's prompts with the stream's id and seed. Seeds that were drawn follow from the first."""
    drawn = any(core.params.seed != cores[0].params.seed for core in cores)
    seeds = [(seed + i) % DRAWN if drawn else seed for i in range(len(cores))]
    ids = [f"{id}-{i}" for i in range(len(cores))] if len(cores) > 1 else [id]
    return [
        replace(core, id=own, params=replace(core.params, seed=seed))
        for core, own, seed in zip(cores, ids, seeds, strict=True)
    ]


def _checksum(cores: Sequence[Request], serving: Serving) -> int:
    """The CRC-32 of all that the answer is computed from."""
    contents = {one.name: one.content for one in serving.front.adapters.known}
    checksum = zlib.crc32(repr(serving.fingerprint).encode())
    for core in cores:
        adapters = [(contents.get(one.name), one.scale, one.start) for one in core.adapters]
        rules = (core.grammar, core.bad_word_ids, core.dry_breakers, core.dry_breaker_sequences, core.eos_ids)
        whole = (core.prompt_ids, core.params, adapters, core.inputs, rules)
        checksum = zlib.crc32(repr(whole).encode(), checksum)
    return checksum


def _events(data: bytes) -> Iterator[bytes]:
    """The single events, whose data has no line breaks."""
    return (part + b"\n\n" for part in data.split(b"\n\n") if part)


def _split(deltas: Sequence[Delta], count: int) -> tuple[list[Delta], list[Delta]]:
    """The first `count` tokens of the deltas of a choice, and the rest."""
    before: list[Delta] = []
    for i, delta in enumerate(deltas):
        if count <= 0:
            return before, list(deltas[i:])
        if count < len(delta.token_ids):
            head, tail = _cut(delta, count)
            return [*before, head], [tail, *deltas[i + 1 :]]
        before.append(delta)
        count -= len(delta.token_ids)
    return before, []


def _cut(delta: Delta, count: int) -> tuple[Delta, Delta]:
    """The first `count` tokens of a delta, and the rest."""
    right = min(delta.accepted, count)
    head = replace(
        delta,
        token_ids=delta.token_ids[:count],
        logprobs=delta.logprobs[:count],
        finish_reason=None,
        stop_token=None,
        drafted=right,
        accepted=right,
    )
    rest = replace(
        delta,
        token_ids=delta.token_ids[count:],
        logprobs=delta.logprobs[count:],
        prompt_logprobs=None,
        drafted=delta.drafted - right,
        accepted=delta.accepted - right,
    )
    return head, rest


def _join(one: Delta, other: Delta) -> Delta:
    """Two deltas of a choice as one."""
    return replace(
        other,
        token_ids=one.token_ids + other.token_ids,
        logprobs=one.logprobs + other.logprobs,
        prompt_logprobs=one.prompt_logprobs or other.prompt_logprobs,
        cached_tokens=max(one.cached_tokens, other.cached_tokens),
        drafted=one.drafted + other.drafted,
        accepted=one.accepted + other.accepted,
    )
