"""Responses in Ollama's formats: one object, or lines, the last of which is `done` and has the counts and times.

With n > 1 every line has the `index` of its choice; the last line of a choice has its done_reason and eval_count, and
after all of them comes the `done` line, whose eval_count is the sum. The single object has choice 0 where clients
expect it, and all choices in `answers`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import TextDelta
from kvasir.engine.pace import moment
from kvasir.engine.reading import Reading
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from kvasir.serve.conversation.calls import call_id
from kvasir.serve.conversation.event_ids import EventIds
from kvasir.serve.conversation.logprobs import chat_logprobs
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.dialects.ollama.route import line, stream_lines
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.responses import write_json
from kvasir.types import FinishReason, Request


class Clock:
    """The timestamps of an HTTP request; durations are reported in nanoseconds.

    prompt_eval_duration is the time from the arrival of the request in the engine to its first token, including
    queueing; eval_duration is from there to the last token.
    """

    def __init__(self) -> None:
        self._begun = self._loaded = self._asked = self._first = self._last = time.monotonic_ns()

    def loaded(self) -> None:
        self._loaded = self._asked = self._first = self._last = time.monotonic_ns()

    def asked(self) -> None:
        self._asked = time.monotonic_ns()
        self._first = self._last = 0

    def token(self, at: float) -> None:
        """at: time of a delta."""
        self._last = max(self._last, int(1e9 * moment(at, self._asked / 1e9)))
        self._first = self._first or self._last

    def loading(self) -> dict[str, int]:
        """The durations of a request that generates nothing."""
        return {"total_duration": time.monotonic_ns() - self._begun, "load_duration": self._loaded - self._begun}

    def durations(self, prompt_tokens: int, tokens: int) -> dict[str, int]:
        now = time.monotonic_ns()
        first = self._first or now
        return {
            "total_duration": now - self._begun,
            "load_duration": self._loaded - self._begun,
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": first - self._asked,
            "eval_count": tokens,
            "eval_duration": max(self._last, first) - first,
        }


def head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time())}


def timestamp(seconds: float) -> str:
    """RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class AnswerPart:
    """A part of a choice, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls)

    @classmethod
    def all(cls, parts: Sequence[AnswerPart]) -> AnswerPart:
        content, thinking = "".join(part.content for part in parts), "".join(part.thinking for part in parts)
        return cls(content, thinking, [call for part in parts for call in part.calls])


class CallCollector:
    """Collects the tool calls of one choice: clients get complete calls. A call that was cut off, or whose arguments
    are not an object, becomes content."""

    def __init__(self, reading: Reading | None):
        self._id_size = reading.format.calls.id_size if reading else 0
        self._start: CallStart | None = None
        self._arguments: list[str] = []

    def push(self, events: Iterable[Event]) -> AnswerPart:
        part = AnswerPart()
        for event in events:
            match event:
                case Content(text):
                    part.content += text
                case Reasoning(text):
                    part.thinking += text
                case CallStart():
                    self._start, self._arguments = event, []
                case Arguments(_, text):
                    self._arguments.append(text)
                case CallEnd():
                    self._end(part)
        return part

    def _end(self, part: AnswerPart) -> None:
        assert self._start is not None, "a call ends after its start"
        start, text = self._start, "".join(self._arguments)
        try:
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            part.content += f"{start.name}({text}"
            return
        function = {"index": start.index, "name": start.name, "arguments": arguments}
        part.calls.append({"id": call_id(start.id, self._id_size), "function": function})


Shape = Callable[[AnswerPart], dict[str, Any]]


def as_message(part: AnswerPart) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def as_response(part: AnswerPart) -> dict[str, Any]:
    return {"response": part.content, **({"thinking": part.thinking} if part.thinking else {})}


@dataclass(slots=True)
class Whole:
    """One complete choice, in parts."""

    parts: list[AnswerPart] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass(slots=True)
class OllamaJob:
    """One request of /api/chat or /api/generate: the engine's request, and how its choices are encoded.

    truncated: numbers of items left out of the prompt, by kind. with_context: the response carries the ids of the
    conversation.
    """

    model: str
    serving: Serving
    core: Request
    reading: Reading | None
    clock: Clock
    shape: Shape
    truncated: dict[str, int] = field(default_factory=dict)
    with_context: bool = False
    ids: EventIds | None = None  # of the lines of a stream

    async def respond(self, request: HTTPRequest, streams: bool) -> Response:
        self.clock.asked()
        if streams:
            alive = {**head(self.model), **self.shape(AnswerPart()), "done": False}
            return stream_lines(self.serving.settings.ping, self.lines(), alive, self.ids)
        answers = await while_connected(request.receive, self.answers())
        return await write_json(self.core.params.logprobs is not None, self.whole, answers)

    @property
    def _several(self) -> bool:
        return self.core.params.n > 1

    async def answers(self) -> list[Whole]:
        answers = [Whole() for _ in range(self.core.params.n)]
        async with aclosing(self._parts()) as parts:
            async for delta, part in parts:
                answer = answers[delta.index]
                answer.parts.append(part)
                answer.logprobs += self._logprobs(delta)
                answer.token_ids += delta.token_ids
                answer.reason = delta.finish_reason or answer.reason
        return answers

    def whole(self, answers: list[Whole]) -> dict[str, Any]:
        contents = [self._content(AnswerPart.all(answer.parts), answer.logprobs) for answer in answers]
        counts = [len(answer.token_ids) for answer in answers]
        several = [
            {"index": i, **content, "done_reason": answer.reason, "eval_count": count}
            for i, (content, answer, count) in enumerate(zip(contents, answers, counts, strict=True))
        ]
        return {
            **head(self.model),
            **contents[0],
            **({"answers": several} if self._several else {}),
            "done": True,
            "done_reason": answers[0].reason,
            **self._ending(sum(counts), answers[0].token_ids),
        }

    async def lines(self) -> AsyncGenerator[bytes]:
        several = self._several
        counts = [0] * self.core.params.n
        ids: list[int] = []
        reasons: dict[int, str] = {}
        async with aclosing(self._parts()) as parts:
            async for delta, part in parts:
                index = {"index": delta.index} if several else {}
                counts[delta.index] += len(delta.token_ids)
                if self.with_context:
                    ids += delta.token_ids
                logprobs = self._logprobs(delta)
                if part or logprobs:
                    yield line({**head(self.model), **index, **self._content(part, logprobs), "done": False})
                if delta.finish_reason:
                    reasons[delta.index] = delta.finish_reason
                    if several:
                        end = {"done_reason": delta.finish_reason, "eval_count": counts[delta.index]}
                        yield line({**head(self.model), **index, **self.shape(AnswerPart()), "done": False, **end})
        ending = {"done": True, "done_reason": reasons[0], **self._ending(sum(counts), ids)}
        yield line({**head(self.model), **self.shape(AnswerPart()), **ending})

    async def _parts(self) -> AsyncGenerator[tuple[TextDelta, AnswerPart]]:
        """The engine's deltas with their parsed content. Raises AnswerFailed, DeadlineExceeded."""
        calls = [CallCollector(self.reading) for _ in range(self.core.params.n)]
        stream = self.serving.front.stream(self.core, self.reading, self.ids and self.ids.through)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                check_finish(delta, self.core.id)
                self.clock.token(delta.at)
                yield delta, calls[delta.index].push(delta.events)

    def _content(self, part: AnswerPart, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.shape(part), **({"logprobs": logprobs} if logprobs else {})}

    def _logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        return chat_logprobs(delta.logprobs)["content"] if self.core.params.logprobs is not None else []

    def _ending(self, tokens: int, ids: list[int]) -> dict[str, Any]:
        """Counts, times, the seed that reproduces the choices, and what was left out of the prompt."""
        core = self.core
        ending: dict[str, Any] = self.clock.durations(len(core.prompt_ids), tokens)
        if not core.params.greedy:
            ending["seed"] = core.params.seed
        if self.truncated:
            ending["truncated"] = self.truncated
        if self.with_context and not self._several:
            ending["context"] = [*core.prompt_ids, *ids]
        return ending
