"""A grammar's limits: an answer that passes one ends alone, and no other answer of the grammar sees that it did."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.guided import sources
from kvasir.guided.grammar import LIMITS, CompiledGrammar, GrammarError, GrammarLimits
from kvasir.guided.guide import GrammarGuides, make_tokenizer
from kvasir.guided.vocabulary import Vocabulary
from tests._shared import need
from tests.guided.test_guide import GRAMMARS
from tests.guided.walk import VOCABULARY, ids_of, make_guides, walk
from tests.text.vocabularies import local_folder

LIBRARY = make_tokenizer(VOCABULARY)
# After "X" more text is forced than may be computed, or there are more states than the limit.
FORCED, STATES = sources.regex("([a-z ]+|Xa{1000000})"), sources.regex("([a-z ]+|X(.{0,9}y.{0,9}z){9})")
TIGHT = GrammarLimits(states=60)


def follow(guide, ids: list[int]) -> None:
    for token in ids:
        guide.allowed()
        guide.advance([token])


@pytest.mark.parametrize("trap", [STATES, pytest.param(FORCED, marks=pytest.mark.slow)])
def test_an_answer_that_passes_a_limit_ends_alone(trap):
    guides = make_guides()
    if trap is STATES:
        guides.limits = (TIGHT, TIGHT)
    before, bad = (guides.take(guides.begin(trap)) for _ in range(2))
    follow(before, ids_of("some"))
    with pytest.raises(GrammarError, match="limits"):
        follow(bad, ids_of("Xaybzaaybz"))
        bad.forced()
    with pytest.raises(GrammarError):
        bad.allowed()
    follow(before, ids_of(" words"))
    after = guides.take(guides.begin(trap))
    follow(after, ids_of("some words"))
    assert after.allowed() == before.allowed() and after.complete and not after.done


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7, 1000])
def test_ids_at_once_are_followed_as_one_by_one(step):
    """As after a preemption: the library bounds the work of a lexer from one mask to the next."""
    schema = {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)", "maxLength": 500}
    guides = make_guides()
    rule = sources.json_schema(schema)
    ids = [*ids_of('"some'), *ids_of(" Igor") * 60]
    slow = guides.take(guides.begin(rule))
    follow(slow, ids)
    fast = guides.take(make_guides().begin(rule))
    for start in range(0, len(ids), step):
        fast.advance(ids[start : start + step])
    assert fast.allowed() == slow.allowed()


@pytest.mark.slow
@pytest.mark.parametrize("json", [False, True])
def test_random_letters_leave_the_grammar_as_it_was(json):
    """On the vocabulary of Qwen 3 they fill the lexer with states; that is no fault of the answer."""
    tokenizer = local_folder(need("tokenizers", "hf", "qwen3"))
    guides = GrammarGuides(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))
    pattern = "(.*x.{0,40}y.{0,40}z|[a-z ]+)"
    rule = sources.json_schema({"type": "string", "pattern": f"^{pattern}$"}) if json else sources.regex(pattern)
    rng = random.Random(1)

    def ids(text: str) -> list[int]:
        return tokenizer.encode('"' * json + text, add_special_tokens=False)

    good = ids("the quick brown fox is here")
    first, under_way, bad = (guides.take(guides.begin(rule)) for _ in range(3))
    follow(first, good)
    follow(under_way, good[:3])
    follow(bad, ids("".join(rng.choice("xyab") for _ in range(600))))
    follow(under_way, good[3:])
    later = guides.take(guides.begin(rule))
    follow(later, good)
    assert first.allowed() == under_way.allowed() == later.allowed()


@settings(max_examples=8)
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32), st.integers(3, 60))
def test_small_lexers_change_no_answer(name, seed, states):
    """They are made anew again and again, shared or not, and nothing shows it."""
    small = CompiledGrammar(LIBRARY, GRAMMARS[name], (GrammarLimits(states=states), LIMITS[1]))
    expected = walk(CompiledGrammar(LIBRARY, GRAMMARS[name]).begin(), seed, jump=True)
    a, b = small.begin(), small.begin()
    assert walk(a, seed) == expected
    assert walk(b, seed, jump=True) == expected
    assert walk(small.begin(), seed) == expected


def test_small_lexers_are_made_anew():
    small = CompiledGrammar(LIBRARY, GRAMMARS["schema"], (GrammarLimits(states=20), LIMITS[1]))
    walk(small.begin(), 0)
    assert small.renewed


def test_exceeding_a_limit_alone_is_a_grammar_error():
    tight = GrammarLimits(states=30)
    guide = CompiledGrammar(LIBRARY, GRAMMARS["schema"], (tight, tight)).begin()
    with pytest.raises(GrammarError, match="states"):
        walk(guide, 0)
    with pytest.raises(GrammarError, match="compile"):
        CompiledGrammar(LIBRARY, "start: (")
