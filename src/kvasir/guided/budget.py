"""A reasoning budget: after this many reasoning tokens, the mark that ends the reasoning is forced, id by id."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.guided.free import FreeGuide
from kvasir.guided.grammar import GrammarGuide, GuideError
from kvasir.guided.reasoning_tracker import ReasoningTracker
from kvasir.guided.rule import ReasoningMarks
from kvasir.guided.vocabulary import Vocabulary


class BudgetGuide:
    """The guide of one sequence; apart from the forced mark it follows `guide`, if given. Like every guide, it is a
    function of the ids alone.

    Reasoning is counted over all its parts in a sequence. A call that begins inside the reasoning ends it.
    """

    __slots__ = ("_budget", "_end", "_guide", "_pending", "_reasoning", "_vocabulary")

    def __init__(
        self,
        guide: GrammarGuide | FreeGuide | None,
        vocabulary: Vocabulary,
        reasoning: ReasoningMarks,
        end: list[int],
        budget: int,
    ):
        """end: the ids of the mark that ends the reasoning."""
        self._guide, self._vocabulary, self._end, self._budget = guide, vocabulary, end, budget
        self._reasoning = ReasoningTracker(reasoning)
        self._pending: list[int] = []
        self._look()

    def copy(self) -> BudgetGuide:
        other = BudgetGuide.__new__(BudgetGuide)
        other._guide, other._vocabulary = self._guide and self._guide.copy(), self._vocabulary
        other._end, other._budget, other._pending = self._end, self._budget, list(self._pending)
        other._reasoning = self._reasoning.copy()
        return other

    @property
    def done(self) -> bool:
        return self._guide is not None and self._guide.done

    @property
    def quiet(self) -> bool:
        return not self._pending and (self._guide is None or self._guide.quiet)

    def allowed(self) -> bytes | None:
        """See Guide; None for all ids."""
        if not self._pending:
            return self._guide.allowed() if self._guide else None
        token = self._pending[0]
        words = bytearray(-(-self._vocabulary.size // 32) * 4)
        words[token >> 3] = 1 << (token & 7)
        return bytes(words)

    def forced(self) -> list[int]:
        if self._pending:
            return list(self._pending)
        return self._guide.forced() if self._guide else []

    def advance(self, ids: Iterable[int]) -> None:
        """Raises GuideError for an id that is not allowed."""
        for token in ids:
            if self._pending and token != self._pending.pop(0):
                raise GuideError(f"id {token} where the reasoning must end")
            if self._guide:
                self._guide.advance((token,))
            self._reasoning.feed(self._vocabulary.tokenizer.token_bytes(token))
            self._look()

    def _look(self) -> None:
        calls = self._guide is not None and self._guide.in_call
        if calls:
            self._reasoning.leave()
        if self._reasoning.inside and not self._pending and self._reasoning.tokens >= self._budget:
            self._pending = list(self._end)
