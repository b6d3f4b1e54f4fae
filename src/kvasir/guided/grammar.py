"""Grammar: a text of rules, and guides, which are the states of sequences in it.

The library's copies of a matcher share its lexer: a cache of automaton states, filled as sequences advance, with limits
on its size and on the work of a token. A lexer that has exceeded a limit gives wrong results to all matchers that share
it, sometimes silently. So a matcher's result counts only if its lexer is still sound afterwards. If it is not, the
guide is rebuilt from its ids, as a last resort on a lexer of its own with wider limits. If that fails, it fails for
these ids, independently of other sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from kvasir.errors import InvalidRequest, KvasirError

if TYPE_CHECKING:  # the library is loaded with the first grammar
    from llguidance import LLMatcher, LLTokenizer

    from kvasir.guided.numbers import NumberLimits

T = TypeVar("T")

MAX_ERROR_CHARS = 500
_NOT_ALLOWED = "doesn't satisfy the grammar"  # the library's message for an id that is not allowed


class GuideError(KvasirError):
    """A grammar that cannot be followed, or cannot be followed any further."""


class GrammarError(GuideError, InvalidRequest):
    """The grammar is at fault: it exceeds the limits, or leads to a state where nothing can follow."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one lexer. states: that it keeps, 1 to 2 kB each. fuel: for the work of one mask, 10 to 100 ns each."""

    states: int = 100_000
    fuel: int = 200_000


Both = tuple[GrammarLimits, GrammarLimits]  # of the lexer that sequences share, and of a lexer for a single sequence
LIMITS: Both = (GrammarLimits(), GrammarLimits(250_000, 1_600_000))


class Lexer:
    """A matcher at its beginning, whose copies share its lexer. alone: there is only one copy."""

    def __init__(
        self, tokenizer: LLTokenizer, text: str, limits: GrammarLimits, first: int | None = None, alone: bool = False
    ):
        """first: an id that may come first, if known. Raises GrammarError if the grammar does not compile."""
        from llguidance import LLMatcher, LLParserLimits

        bounds = LLParserLimits(max_lexer_states=limits.states, step_lexer_fuel=limits.fuel, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, text, log_level=0, limits=bounds)
        self.first, self.alone = first, alone
        if self._matcher.is_error():
            raise GrammarError(f"the grammar does not compile: {_reason(self._matcher)}", "make it simpler")

    def begin(self) -> LLMatcher:
        return self._matcher.deep_copy()

    def failure(self) -> str:
        """The limit that it has exceeded, as a message; "" if none: then an id that may come first can be consumed."""
        probe = self.begin()
        return "" if self.first is None or probe.consume_token(self.first) else _reason(probe)


class CompiledGrammar:
    """A grammar over one vocabulary. Owns the lexer that its guides share."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        text: str,
        limits: Both = LIMITS,
        numbers: NumberLimits | None = None,
    ):
        """numbers: keeps numbers in JSON within bounds. Raises GrammarError."""
        self.number_state = numbers.state(text) if numbers else None
        self._tokenizer, self._text, self._limits = tokenizer, text, limits
        self._lock = Lock()
        self.renewed = 0  # how often the guide of a sequence was rebuilt
        self._first: int | None = None
        self._lexer: Lexer | None = Lexer(tokenizer, text, limits[0])
        begin = GrammarGuide(self, self._lexer)
        mask = int.from_bytes(begin.allowed(), "little")
        for i in tokenizer.eos_tokens:
            mask &= ~(1 << i) if i < mask.bit_length() else -1
        self._first = (mask & -mask).bit_length() - 1 if mask else None
        if self._lexer:
            self._lexer.first = self._first
        self.renewed = 0

    def begin(self) -> GrammarGuide:
        with self._lock:
            return GrammarGuide(self, self._shared())

    def instead_of(self, failed: Lexer) -> Lexer:
        """The lexer on which a guide continues. The first guide that finds the shared lexer failed gets a lexer of its
        own, since its own sequence is the most likely cause; the others share the next one. Raises GrammarError."""
        with self._lock:
            self.renewed += 1
            if not failed.alone and failed is not self._lexer:
                return self._shared()
            if failed is self._lexer:
                self._lexer = None
            return Lexer(self._tokenizer, self._text, self._limits[1], self._first, alone=True)

    def _shared(self) -> Lexer:
        if self._lexer is None:
            self._lexer = Lexer(self._tokenizer, self._text, self._limits[0], self._first)
        return self._lexer


class GrammarGuide:
    """The state of one sequence that follows its grammar from the first token to the last.

    quiet: whether most likely all ids are allowed. in_call: whether a call has begun in free text.
    """

    __slots__ = ("_failure", "_grammar", "_ids", "_lexer", "_matcher", "_number_state")
    quiet = in_call = False

    def __init__(self, grammar: CompiledGrammar, lexer: Lexer):
        self._grammar, self._lexer = grammar, lexer
        self._matcher = lexer.begin()
        self._ids: list[int] = []
        self._failure: GuideError | None = None
        self._number_state = grammar.number_state and grammar.number_state.copy()

    def copy(self) -> GrammarGuide:
        other = GrammarGuide(self._grammar, self._lexer)
        other._matcher, other._ids, other._failure = self._matcher.deep_copy(), list(self._ids), self._failure
        other._number_state = self._number_state and self._number_state.copy()
        return other

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the sequence may end here."""
        return self._matcher.is_accepting()

    def allowed(self) -> bytes:
        """int32 words; bit i & 31 of word i >> 5 allows id i. Raises GuideError."""
        # The library checks its lexer after a mask, except where the mask comes from forced ids.
        mask, forced = self._ask(_mask, lambda answer: answer[1])
        return self._number_state.bounded(mask) if self._number_state and not forced else mask

    def forced(self) -> list[int]:
        """The ids that must come next, in order; empty if there is a choice. Raises GuideError."""
        return self._ask(lambda matcher: matcher.compute_ff_tokens(), bool)

    def accepts(self, ids: list[int]) -> bool:
        """Whether all these ids may come next, in order. Raises GuideError."""
        return self._ask(lambda matcher: matcher.validate_tokens(ids)) == len(ids)

    def advance(self, ids: Iterable[int]) -> None:
        """Raises GuideError for an id that is not allowed."""
        ids = list(ids)
        slowly = itertools.chain([False], itertools.repeat(True))  # one by one after the attempt at once has failed
        self._ask(lambda matcher: _consume(matcher, ids, next(slowly)))
        self._ids += ids
        if self._number_state:
            self._number_state.feed(ids)

    def _ask(self, question: Callable[[LLMatcher], T], doubtful: Callable[[T], object] = lambda _: True) -> T:
        """The matcher's result on a sound lexer. doubtful: whether a result may be wrong without the library reporting
        it."""
        if self._failure:
            raise self._failure
        alone = False
        while True:
            answer = question(self._matcher)
            failure = _reason(self._matcher)
            if _NOT_ALLOWED in failure or (not failure and doubtful(answer)):
                failure = self._lexer.failure() or failure
            if not failure:
                return answer
            if alone:
                self._failure = _error(failure)
                raise self._failure
            alone = self._renew()

    def _renew(self) -> bool:
        """Rebuilds the matcher from the ids; returns whether it has a lexer of its own."""
        self._lexer = self._grammar.instead_of(self._lexer)
        self._matcher = self._lexer.begin()
        if not _consume(self._matcher, self._ids) and self._lexer.alone:
            self._lexer = self._grammar.instead_of(self._lexer)
            self._matcher = self._lexer.begin()
            _consume(self._matcher, self._ids, slowly=True)
        return self._lexer.alone


def _consume(matcher: LLMatcher, ids: list[int], slowly: bool = False) -> bool:
    """Consumes ids until one is not allowed; returns whether all were. slowly: with a mask before each id, as in a real
    sequence. The library limits a lexer's work between two masks, so many ids at once may exceed a limit that they do
    not exceed one by one. Consuming them at once creates fewer states."""
    for token in ids:
        if slowly:
            matcher.compute_bitmask()
        if not matcher.consume_token(token):
            return False
    return True


def _mask(matcher: LLMatcher) -> tuple[bytes, bool]:
    """The mask, and whether it comes from forced ids."""
    forced = not matcher.is_stopped() and bool(matcher.compute_ff_tokens())
    return matcher.compute_bitmask(), forced


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher has failed; "" if it has not."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_ERROR_CHARS]


def _error(reason: str) -> GuideError:
    if _NOT_ALLOWED in reason:
        return GuideError(f"the grammar cannot be followed: {reason}")
    if "NoExtension" in reason:
        return GrammarError(
            "the grammar reached a state in which no token of this model is allowed", "change the grammar"
        )
    return GrammarError(f"the grammar cannot be followed within its limits: {reason}", "make it simpler")
