"""Turns the ids of one choice into text: a state machine without asyncio, shared by the servers and `LLM`.

Delta (ids) -> AnswerText.push -> TextDelta (text and parsed events) -> Answer.add (the complete choice)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvasir.engine.reading import Reading
from kvasir.errors import InvalidRequest
from kvasir.parse.events import Content, Event, ParsedMessage, Reasoning, merged_counts
from kvasir.text.detokenize import Detokenizer
from kvasir.text.stop import StopStrings
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Delta, FinishReason, Progress, SamplingParams, TokenLogprob, Usage


class Candidate(NamedTuple):
    """One of the most probable tokens at a position. `bytes` is exact even where `text` has U+FFFD for an incomplete
    character."""

    token: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability (None for the first token of a prompt).

    `offset`: where its text begins, in characters from the start of the completion (for a prompt token, of the
    prompt).
    """

    token: int
    text: str
    bytes: bytes
    offset: int
    logprob: float | None
    rank: int = 0
    top: tuple[Candidate, ...] = ()
    drafted: bool = field(default=False, compare=False)  # whether a drafter had proposed it


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step adds to choice `index`, as text.

    `text` may end before `token_ids` do: an incomplete character or a possible prefix of a stop string is held back.
    `events` is the parsed text, only content if the request is not parsed. It may end before the text does.
    `settled` holds for each event the number of tokens of the choice read when the event was complete; a token belongs
    to the same kind of event however the choice is split into deltas.
    `logprobs` runs parallel to `token_ids` if it was requested. The last delta of a choice has a finish reason;
    `stop_reason` is the stop string or the requested stop id that ended it. `usage` counts this choice only, so far.
    `accepted`: so many of the first `token_ids` had been drafted. `at`: the time of its tokens, as in Delta.
    `progress`: of the prompt, if the request asks for it; such a delta has nothing else.
    """

    index: int
    text: str = ""
    events: Sequence[Event] = ()
    settled: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenInfo, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    refused: bool = False  # the error is due to the request itself
    accepted: int = field(default=0, compare=False)
    at: float = field(default=0.0, compare=False)
    progress: Progress | None = None


class AnswerText:
    """The text of one choice. If a stop string completes in the middle of a delta, the choice ends with the token that
    completed it; later tokens are dropped."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        reading: Reading | None = None,
    ):
        """Without a tokenizer all text is empty, and stop strings raise InvalidRequest."""
        if tokenizer is None and params.stop:
            raise InvalidRequest("stop strings need a tokenizer, and this model has none", param="stop")
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_ids = prompt_ids
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output)
        marks = reading.marks if reading else frozenset()
        self._detokenizer = (
            Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, marks) if tokenizer is not None else None
        )
        self._parser = reading.parser() if reading else None
        self.num_tokens = 0
        self.cached_tokens = 0
        self._num_settled = self._num_reasoning = 0
        self._num_accepted = self._num_rejected = 0
        self.done = False

    def push(self, delta: Delta) -> TextDelta:
        """Returns the delta as text. Sets `done` when the choice has ended. If a stop string ended it, the core does
        not know: the caller must then abort the choice and push nothing more."""
        assert not self.done, "the choice has ended"
        pieces: list[str] = []
        read: list[tuple[Event, int]] = []
        offsets: list[int] = []
        matched = None
        for i, token in enumerate(delta.token_ids):
            offsets.append(self._offset)
            self.num_tokens += 1
            if self._is_silent(delta, i):
                continue
            text, matched = self._take(token)
            pieces.append(text)
            read += self._read(text)
            if matched is not None:
                break
        if delta.finish_reason and matched is None:
            text, matched = self._end()
            pieces.append(text)
            read += self._read(text)
        finish = FinishReason.STOP if matched is not None else delta.finish_reason
        self.done = finish is not None
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if self.done and self._parser is not None:
            read += self._settled(self._parser.finish())
        events, settled = merged_counts(read)
        accepted = self._count_drafts(delta, len(offsets))
        drafted = [True] * accepted + [False] * (len(offsets) - accepted)
        return TextDelta(
            index=delta.index,
            text="".join(pieces),
            events=events,
            settled=settled,
            token_ids=delta.token_ids[: len(offsets)],
            logprobs=tuple(map(self._info, delta.logprobs, offsets, drafted)),
            prompt_logprobs=self._prompt_infos(delta),
            finish_reason=finish,
            stop_reason=self._stop_id(delta) if matched is None else matched,
            usage=self._usage(),
            error=delta.error,
            refused=delta.refused,
            accepted=accepted,
            at=delta.at,
            progress=delta.progress,
        )

    def _count_drafts(self, delta: Delta, taken: int) -> int:
        """Counts the delta's draft; returns how many of the `taken` tokens it had right."""
        accepted = min(delta.accepted, taken)
        self._num_accepted += accepted
        self._num_rejected += delta.drafted - accepted
        return accepted

    def _usage(self) -> Usage:
        return Usage(
            len(self._prompt_ids),
            self.num_tokens,
            self.cached_tokens,
            self._num_reasoning,
            self._num_accepted,
            self._num_rejected,
        )

    def _read(self, text: str) -> list[tuple[Event, int]]:
        if not text:
            return []
        return self._settled([Content(text)] if self._parser is None else self._parser.push(text))

    def _settled(self, events: Sequence[Event]) -> list[tuple[Event, int]]:
        """Pairs each event with the number of tokens read so far."""
        for event in events:
            if isinstance(event, Reasoning):
                self._num_reasoning += self.num_tokens - self._num_settled
            self._num_settled = self.num_tokens
        return [(event, self.num_tokens) for event in events]

    @property
    def _offset(self) -> int:
        return self._detokenizer.num_chars if self._detokenizer else 0

    def _is_silent(self, delta: Delta, i: int) -> bool:
        """Whether token `i` ended the choice and must leave no text."""
        ends = delta.stop_token is not None and i == len(delta.token_ids) - 1
        return ends and not self._params.include_stop_str_in_output

    def _take(self, token: int) -> tuple[str, str | None]:
        text = self._detokenizer.push((token,)) if self._detokenizer else ""
        # Nothing may end the choice before min_tokens, so stop strings are not searched.
        return (text, None) if self.num_tokens <= self._params.min_tokens else self._stop.push(text)

    def _end(self) -> tuple[str, str | None]:
        """The text held back, and the stop string that it completes."""
        text, matched = self._stop.push(self._detokenizer.flush() if self._detokenizer else "")
        return text + self._stop.flush(), matched

    def _stop_id(self, delta: Delta) -> int | None:
        return delta.stop_token if delta.stop_token in self._params.stop_token_ids else None

    def _info(self, entry: TokenLogprob, offset: int, drafted: bool = False) -> TokenInfo:
        text, data = self._spell(entry.token)
        top = tuple(Candidate(t, *self._spell(t), logprob) for t, logprob in entry.top)
        return TokenInfo(entry.token, text, data, offset, entry.logprob, entry.rank, top, drafted)

    def _spell(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return "", b""
        return self._tokenizer.token_text(token), self._tokenizer.token_bytes(token)

    def _prompt_infos(self, delta: Delta) -> tuple[TokenInfo, ...] | None:
        if delta.prompt_logprobs is None:
            return None
        offsets = prompt_offsets(self._tokenizer, self._prompt_ids, self._params.skip_special_tokens)
        return tuple(
            self._info(entry, offset) if entry else TokenInfo(token, *self._spell(token), offset, None)
            for token, entry, offset in zip(self._prompt_ids, delta.prompt_logprobs, offsets, strict=True)
        )


def prompt_text(tokenizer: Tokenizer | None, prompt_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The prompt's text before a choice's text. An incomplete character at its end is left to the choice."""
    return Detokenizer(tokenizer, (), skip_special_tokens).push(prompt_ids) if tokenizer else ""


def prompt_offsets(tokenizer: Tokenizer | None, prompt_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Where the text of each prompt token begins in `prompt_text`, in characters."""
    if tokenizer is None:
        return [0] * len(prompt_ids)
    detokenizer, offsets = Detokenizer(tokenizer, (), skip_special_tokens), []
    for token in prompt_ids:
        offsets.append(detokenizer.num_chars)
        detokenizer.push((token,))
    return offsets


@dataclass(slots=True)
class Answer:
    """A choice, complete or partial."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    prompt_logprobs: tuple[TokenInfo, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    refused: bool = False  # the error is due to the request itself
    _pieces: list[str] = field(default_factory=list, compare=False)
    _events: list[Event] = field(default_factory=list, compare=False)

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def message(self) -> ParsedMessage:
        """The choice, parsed."""
        return ParsedMessage.of(self._events)

    def add(self, delta: TextDelta) -> None:
        """Appends the next delta of this choice."""
        if delta.text:
            self._pieces.append(delta.text)
        self._events += delta.events
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.usage, self.error, self.refused = delta.usage, delta.error, delta.refused
