"""Guides: each sequence has a guide, which holds its state in the rule and the tokens that may come next.

A guide is a function of the ids it was advanced by: it can be rebuilt from them, after a preemption or in another
process. Where the grammar leaves only one continuation, the mask allows its canonical first token and nothing else, so
that taking the whole continuation at once (`forced`) and sampling it token by token give the same ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from kvasir.guided.budget import BudgetGuide
from kvasir.guided.free import FreeGuide, Triggers
from kvasir.guided.grammar import LIMITS, Both, CompiledGrammar, GrammarGuide, GuideError
from kvasir.guided.rule import Rule
from kvasir.guided.vocabulary import Vocabulary

if TYPE_CHECKING:  # the library is loaded with the first grammar
    from llguidance import LLTokenizer

CACHED_GRAMMARS = 64


AnyGuide = GrammarGuide | FreeGuide | BudgetGuide


class Compiled:
    """A compiled rule; `begin` makes a guide for each sequence."""

    def __init__(self, rule: Rule, vocabulary: Vocabulary, tokenizer: LLTokenizer, limits: Both = LIMITS):
        """Raises GuideError."""
        self._rule, self._vocabulary = rule, vocabulary
        self.grammar = CompiledGrammar(tokenizer, rule.grammar, limits, vocabulary.numbers) if rule.grammar else None
        self._end = vocabulary.ids(rule.reasoning.end) if rule.reasoning else []
        self._triggers = None
        if rule.free and self.grammar:
            self._triggers = Triggers(rule, vocabulary, self.grammar.begin())

    def begin(self) -> AnyGuide:
        guide: GrammarGuide | FreeGuide | None = None
        if self._triggers:
            guide = FreeGuide(self._triggers)
        elif self.grammar:
            guide = self.grammar.begin()
        if self._rule.reasoning and self._rule.budget is not None:
            return BudgetGuide(guide, self._vocabulary, self._rule.reasoning, self._end, self._rule.budget)
        assert guide, "a rule without constraints"
        return guide


class GrammarGuides:
    """Makes guides over one vocabulary; compiles in a separate thread and caches the results.

    The tokenizer is loaded with the first rule, or by `warm`.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        """vocabulary: raises KvasirError for a model without a tokenizer."""
        self._load = vocabulary
        self._loaded: tuple[Vocabulary, LLTokenizer] | None = None
        self.limits: Both = LIMITS
        self._thread = ThreadPoolExecutor(1, "kvasir-grammar")
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._lock = Lock()

    def begin(self, rule: str) -> Future[Compiled]:
        """Compiles the text of a Rule unless it is cached. The result is for `take`; it raises GuideError."""
        with self._lock:
            found = self._compiled.get(rule)
            if found is None:
                found = self._compiled[rule] = self._thread.submit(self._compile, rule)
                while len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(rule)
            return found

    def warm(self) -> None:
        """Loads the tokenizer now, in the compiling thread. If that fails, the first rule reports it."""
        self._thread.submit(self._vocabulary)

    @staticmethod
    def ends(rule: str) -> bool:
        """Whether the rule decides where a sequence ends."""
        parts = Rule.of(rule)
        return bool(parts.grammar) and parts.free is None

    @staticmethod
    def take(compiled: Future[Compiled], ids: Iterable[int] = ()) -> AnyGuide:
        """A guide at its beginning, or after `ids`. Raises GuideError."""
        guide = compiled.result().begin()
        guide.advance(ids)
        return guide

    @property
    def renewed(self) -> int:
        """How often guides were rebuilt, over the cached grammars."""
        done = [f.result() for f in self._compiled.values() if f.done() and not f.exception()]
        return sum(compiled.grammar.renewed for compiled in done if compiled.grammar)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, rule: str) -> Compiled:
        return Compiled(Rule.of(rule), *self._vocabulary(), self.limits)

    def _vocabulary(self) -> tuple[Vocabulary, LLTokenizer]:
        if self._loaded is None:
            vocabulary = self._load()
            self._loaded = vocabulary, make_tokenizer(vocabulary)
        return self._loaded


def make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The library's tokenizer. Raises GuideError or UnsupportedModel if no grammar can be followed over the
    vocabulary."""
    from llguidance import LLTokenizer

    wrapped = Wrapped(vocabulary)
    try:
        return LLTokenizer(wrapped, eos_token=list(vocabulary.eos_ids) or None)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise GuideError(f"this model's tokenizer does not support grammars: {error}") from error


class Wrapped:
    """A vocabulary in the form that llguidance takes (its TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        """Raises UnsupportedModel."""
        assert vocabulary.spell
        self._vocabulary = vocabulary
        self.tokens = vocabulary.tokens
        self.eos_token_id = next(iter(vocabulary.eos_ids), None)
        self.special_token_ids = list(vocabulary.hidden.values())

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.spelt_as(text)
