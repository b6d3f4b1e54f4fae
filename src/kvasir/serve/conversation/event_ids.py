"""Event ids: names of places in a stream, from which any server of the same model can continue it.

A client asks for them with the header X-Kvasir-Event-Ids. When its connection breaks, it sends the same body again, to
this server or another one, with the last id that it got as Last-Event-ID. Because results are exact, nothing has to be
stored: the server computes the answer again with the same seed and sends what comes after that place. An id is

    name . time . seed . request . begin . end . events . tokens

the stream (24 hex digits of its response's id, time of creation, seed, checksum of what is computed), and the place in
it: so many events of the delta with the tokens from `begin` to `end`, with a checksum of all tokens up to there.
Numbers are hexadecimal. Deltas may be cut differently each time; that one is put together again.
"""

from __future__ import annotations

import re
import secrets
import time
import zlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.faults import CannotContinue
from kvasir.server_statistics import HttpStats
from kvasir.types import Delta, Request

ASKED_HEADER = "x-kvasir-event-ids"
LAST_HEADER = "last-event-id"
_NO = ("", "0", "false", "off")
_ID = re.compile(
    r"(?P<name>[0-9a-f]{24})\.(?P<created>[0-9a-f]{1,9})\.(?P<seed>-?[0-9a-f]{1,16})\.(?P<request>[0-9a-f]{8})"
    r"\.(?P<begin>[0-9a-f]{1,8})\.(?P<end>[0-9a-f]{1,8})\.(?P<events>[0-9a-f]{1,8})\.(?P<tokens>[0-9a-f]{8})"
)


@dataclass(frozen=True, slots=True)
class Place:
    """So many events of the delta with the tokens from `begin` to `end`. tokens: the CRC-32 of all tokens to there."""

    begin: int = 0
    end: int = 0
    events: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.begin:x}.{self.end:x}.{self.events:x}.{self.tokens:08x}"


class EventIds:
    """Of one stream of one choice. core: its request, with the id and the seed of the stream. created: seconds since
    1970."""

    def __init__(self, core: Request, serving: Serving, meter: HttpStats, prefix: str, last: str | None, lines: bool):
        """prefix: of the response's id. last: the client's last id, None for a new stream. lines: the stream consists
        of JSON objects, one per line, rather than of events. Raises CannotContinue, InvalidRequest."""
        self._meter = meter
        self._lines = lines
        self._last: Place | None = None  # None: a new stream, or one that has passed the client's place
        self._renamed = last is not None
        self._held: Delta | None = None
        self._begin = self._end = self._events = self._tokens = 0  # the place, as in Place
        name, self.created, seed, checksum = secrets.token_hex(12), int(time.time()), core.params.seed, None
        if last is not None:
            if not (parts := _ID.fullmatch(last)):
                meter.continuations["refused"] += 1
                raise InvalidRequest("Last-Event-ID is no id of an event of this server", "send the last one received")
            found = {key: int(parts[key], 16) for key in parts.groupdict() if key != "name"}
            name, self.created, seed, checksum = parts["name"], found["created"], found["seed"], found["request"]
            self._last = Place(*(found[key] for key in ("begin", "end", "events", "tokens")))
        assert seed is not None
        self.core = replace(core, id=prefix + name, params=replace(core.params, seed=seed))
        own = _checksum(self.core, serving)
        self._head = f"{name}.{self.created:x}.{seed:x}.{own:08x}"
        if checksum not in (None, own):
            self._refuse("the request, the model or the version of the server is another one")

    def _refuse(self, why: str) -> None:
        self._meter.continuations["refused"] += 1
        raise CannotContinue(f"the stream cannot be continued: {why}", "send the request without Last-Event-ID")

    # -- what comes from the engine ------------------------------------------------------------------------------

    async def through(
        self, request: Request, submit: Callable[[Request], AsyncIterator[Delta]]
    ) -> AsyncGenerator[Delta]:
        """The engine's deltas, cut so that one of them is the delta of the client's place. Raises CannotContinue."""
        if self._renamed:  # the stream that broke may still be open here
            request = replace(request, id=f"{request.id}/{secrets.token_hex(4)}")
        async with aclosing(submit(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                for part in self._parts(delta):
                    self._enter(part)
                    yield part

    def _parts(self, delta: Delta) -> Iterator[Delta]:
        """The delta, cut at the client's place, and put together with the one before within it."""
        if self._last is None:
            yield delta
            return
        for cut in (self._last.begin, self._last.end):
            if 0 < (room := cut - self._seen) < len(delta.token_ids):
                head, delta = _cut(delta, room)
                yield from self._joined(head)
        yield from self._joined(delta)

    @property
    def _seen(self) -> int:
        return self._end + (len(self._held.token_ids) if self._held else 0)

    def _joined(self, delta: Delta) -> Iterator[Delta]:
        delta = _join(self._held, delta) if self._held else delta
        self._held = None
        last, end = self._last, self._end + len(delta.token_ids)
        if last and last.begin < end < last.end and not delta.finish_reason:
            self._held = delta
        else:
            yield delta

    def _enter(self, delta: Delta) -> None:
        """Makes the delta the one whose events come next."""
        self._begin, self._end, self._events = self._end, self._end + len(delta.token_ids), 0
        self._tokens = zlib.crc32(array("i", delta.token_ids).tobytes(), self._tokens)
        if (last := self._last) is None:
            return
        differs = self._end == last.end and self._tokens != last.tokens
        if differs or (delta.finish_reason and self._end < last.end):
            self._refuse("this server computes other tokens")
        if self._end > last.end:
            self._pass()

    def _pass(self) -> None:
        if self._last is not None:
            self._last = None
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
        if (self._begin, self._end) == (last.begin, last.end):
            known = self._events <= last.events
        else:
            known = self._end <= last.end
        if not known:
            self._pass()
        return known

    def _with_id(self, event: bytes) -> bytes:
        id = f"{self._head}.{Place(self._begin, self._end, self._events, self._tokens)}".encode()
        if self._lines:
            return event[: event.rindex(b"}")] + b',"event_id":"' + id + b'"}\n'
        return b"id: " + id + b"\n" + event

    def end(self) -> None:
        """Called when all events were sent. Raises CannotContinue if the client's place did not come."""
        if self._last is not None and self._end < self._last.end:
            self._refuse("this server computes a shorter answer")
        self._pass()


def with_event_ids(
    request: HTTPRequest, serving: Serving, cores: list[Request], *, stream: bool, prefix: str = "", lines: bool = False
) -> tuple[list[Request], EventIds | None]:
    """The engine's requests of an HTTP request, and the ids of its events if the client asks for them. Streams of
    several choices have none. Raises InvalidRequest, CannotContinue."""
    last = request.headers.get(LAST_HEADER) or None
    asked = last is not None or request.headers.get(ASKED_HEADER, "").lower() not in _NO
    single = stream and len(cores) == 1 and cores[0].params.n == 1
    if last is not None and not single:
        raise InvalidRequest("Last-Event-ID without a stream of one choice", "send the body of the stream that broke")
    if not (asked and single):
        return cores, None
    ids = EventIds(cores[0], serving, request.app.state.http_meter, prefix, last, lines)
    return [ids.core], ids


def _checksum(core: Request, serving: Serving) -> int:
    """The CRC-32 of all that the answer is computed from."""
    contents = {one.name: one.content for one in serving.front.adapters.known}
    adapters = [(contents.get(one.name), one.scale, one.start) for one in core.adapters]
    rules = (core.grammar, core.bad_word_ids, core.dry_breakers, core.dry_breaker_sequences, core.eos_ids)
    return zlib.crc32(repr((serving.fingerprint, core.prompt_ids, core.params, adapters, core.inputs, rules)).encode())


def _events(data: bytes) -> Iterator[bytes]:
    """The single events, whose data has no line breaks."""
    return (part + b"\n\n" for part in data.split(b"\n\n") if part)


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
