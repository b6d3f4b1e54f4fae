"""Free text in which a call may begin: it is unconstrained, and costs no computation, until a trigger appears.

The state of a sequence is a function of its text: the text from the trigger on is given to the grammar in the
tokenizer's own tokenization. Of the tokens that would complete a trigger, those after which the grammar allows no call
are forbidden; all other tokens are allowed, whatever their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.guided.grammar import GrammarGuide
from kvasir.guided.reasoning_tracker import ReasoningTracker, overlap
from kvasir.guided.rule import Rule
from kvasir.guided.vocabulary import Vocabulary


class Triggers:
    """State that the sequences of one rule share: the tokens that complete a trigger, and masks by the text's end."""

    def __init__(self, rule: Rule, vocabulary: Vocabulary, guide: GrammarGuide):
        """Takes ownership of the guide, which must be at its beginning. Raises GuideError."""
        assert rule.free
        self.vocabulary, self._guide = vocabulary, guide
        self.reasoning = rule.reasoning
        self.first = rule.free.first.encode()
        self._marks = tuple(tuple(t.encode() for t in texts) for texts in (rule.free.triggers, rule.free.inside))
        self._completing = [vocabulary.containing(frozenset(mark[-1] for mark in marks)) for marks in self._marks]
        self._opening = [(i, data) for i, data in vocabulary.containing(frozenset(self.first)) if self.opens(data)]
        self._masks: dict[tuple[bool, bool, bytes], bytes | None] = {}
        self._valid: dict[bytes, bool] = {}
        for inside in (False, True):
            self.mask(inside, bool(self.first) and not inside, b"")

    def find(self, text: bytes, inside: bool) -> int:
        """Where the first complete trigger begins, in bytes; -1 if there is none."""
        places = (text.find(mark) for mark in self._marks[inside])
        return min((at for at in places if at >= 0), default=-1)

    def tail(self, text: bytes, inside: bool) -> bytes:
        """The end of the text that may become a trigger."""
        marks = [mark for mark in self._marks[inside] if mark[0] in text[1 - len(mark) :]]
        return overlap(text, marks) if marks else b""

    def opens(self, text: bytes) -> bytes:
        """The text without leading blanks if it may be a call without a mark; else b""."""
        text = text.lstrip()
        return text if text[:1] and text[:1] in self.first else b""

    def guide(self, text: bytes) -> GrammarGuide | None:
        """The guide after this text; None if the grammar does not allow it. Raises GuideError."""
        guide, ids = self._guide.copy(), self._ids(text)
        if not ids or not guide.accepts(ids):
            return None
        guide.advance(ids)
        return guide

    def mask(self, inside: bool, start: bool, tail: bytes) -> bytes | None:
        """The ids allowed after free text that ends with `tail`; None for all. start: there is no content yet."""
        key = inside, start, tail
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        return self._masks[key]

    def _mask(self, inside: bool, start: bool, tail: bytes) -> bytes | None:
        begun = [(i, self.opens(data)) for i, data in self._opening] if start else []
        for token, data in self._completing[inside]:
            at = self.find(tail + data, inside)
            if at >= 0:
                begun.append((token, (tail + data)[at:]))
        forbidden = [token for token, text in begun if not self._is_valid(text)]
        if not forbidden:
            return None
        words = bytearray(b"\xff" * (-(-self.vocabulary.size // 32) * 4))
        for token in forbidden:
            words[token >> 3] &= ~(1 << (token & 7))
        return bytes(words)

    def _is_valid(self, text: bytes) -> bool:
        if text not in self._valid:
            ids = self._ids(text)
            self._valid[text] = bool(ids) and self._guide.accepts(ids)
        return self._valid[text]

    def _ids(self, text: bytes) -> list[int]:
        try:
            return self.vocabulary.ids(text.decode())
        except UnicodeDecodeError:  # an incomplete character
            return []


class FreeGuide:
    """The guide of one sequence of free text; it follows the grammar within calls only."""

    __slots__ = ("_anchored", "_call", "_reasoning", "_start", "_tail", "_triggers")

    def __init__(self, triggers: Triggers):
        self._triggers = triggers
        self._reasoning = ReasoningTracker(triggers.reasoning) if triggers.reasoning else None
        self._call: GrammarGuide | None = None
        self._anchored = False  # the call began without a mark, and may turn out to be text
        self._start = bool(triggers.first)  # there is no content yet
        self._tail = b""

    def copy(self) -> FreeGuide:
        other = FreeGuide(self._triggers)
        other._reasoning = self._reasoning and self._reasoning.copy()
        other._call = self._call and self._call.copy()
        other._anchored, other._start, other._tail = self._anchored, self._start, self._tail
        return other

    @property
    def done(self) -> bool:
        return self._call is not None and self._call.done

    @property
    def quiet(self) -> bool:
        """Whether most likely all ids are allowed."""
        return self._call is None

    @property
    def in_call(self) -> bool:
        return self._call is not None

    def allowed(self) -> bytes | None:
        """See Guide; None for all ids."""
        if self._call:
            return self._call.allowed()
        return self._triggers.mask(self._inside, self._start and not self._inside, self._tail)

    def forced(self) -> list[int]:
        return self._call.forced() if self._call else []

    def advance(self, ids: Iterable[int]) -> None:
        """Raises GuideError for an id that is not allowed."""
        for token in ids:
            data = self._triggers.vocabulary.tokenizer.token_bytes(token)
            if self._call is None:
                self._feed_text(data)
                continue
            if self._anchored and token in self._triggers.vocabulary.eos_ids:
                self._leave(b"")  # the id has not ended the sequence, so it only ends the call
                continue
            self._call.advance((token,))
            if self._call.complete and not (self._anchored or self._call.done):
                self._leave(data)

    @property
    def _inside(self) -> bool:
        return self._reasoning is not None and self._reasoning.inside

    def _feed_text(self, data: bytes) -> None:
        inside, text = self._inside, self._tail + data
        if self._reasoning:
            self._reasoning.feed(data)
            if self._reasoning.rest is not None and self._triggers.find(text, inside) < 0:
                text, inside = self._reasoning.rest, self._inside
                self._start = bool(self._triggers.first)
        at, opening = self._triggers.find(text, inside), b""
        if self._start and not inside:
            opening = self._triggers.opens(text)
            self._start = not text.strip() or (self._reasoning is not None and not self._reasoning.over)
        call = self._triggers.guide(text[at:] if at >= 0 else opening) if at >= 0 or opening else None
        if call:
            self._call, self._anchored, self._start = call, at < 0, False
            if self._reasoning:
                self._reasoning.leave()
        else:
            self._tail = self._triggers.tail(text, inside)

    def _leave(self, data: bytes) -> None:
        self._call, self._anchored = None, False
        self._tail = self._triggers.tail(data, False)
