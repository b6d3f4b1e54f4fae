"""Patterns of adapter configs: the same answers as `re`, in bounded time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.lora.patterns import Budget, Pattern, matches_end
from tests.examples import examples

TEXTS = st.text("ab.1_-", max_size=12)
ATOMS = st.sampled_from(
    [*"ab1_", r"\.", ".", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[a-b1]", r"[\d.]", "[]a]", r"\b", "^", "$", "(?=a)"]
)


def grown(inner):
    joined = st.lists(inner, min_size=1, max_size=3).map("".join)
    repeated = st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{1,}"]))
    return st.one_of(
        joined,
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        repeated.map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from(["(", "(?:", "(?=", "(?!", "(?P<x>"]), inner).map(
            lambda pair: f"{pair[0]}{pair[1]})"
        ),
    )


PATTERNS = st.recursive(ATOMS, grown, max_leaves=6).filter(lambda p: p.count("(?P<x>") < 2)


@given(PATTERNS, TEXTS)
@examples(1500)
def test_a_pattern_matches_as_in_re(pattern, text):
    assert Pattern(pattern).fullmatch(text, Budget()) == bool(re.fullmatch(pattern, text))


@given(st.one_of(PATTERNS, st.text("ab.1_", min_size=1, max_size=6)), TEXTS)
@examples(1500)
def test_a_key_matches_as_in_peft(key, name):
    assert matches_end(key, name, Budget()) == bool(re.match(rf"(.*\.)?({key})$", name))


@pytest.mark.parametrize("pattern", ["a{", "a{x}", "{}", "a{,}", "-", "[a-]", r"[\]-_]", "a|", "|", "()", r"\-", r"\Z"])
@pytest.mark.parametrize("text", ["a{", "a", "{}", "-", "a{x}", "]", "_", "", "aa"])
def test_unusual_spellings(pattern, text):
    assert Pattern(pattern).fullmatch(text, Budget()) == bool(re.fullmatch(pattern, text))


def test_published_patterns():
    unsloth = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))"
    )
    swift = r"^(model\.language_model(?=\.).*\.(o_proj|q_proj))$"
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.language_model.layers.3.self_attn.o_proj",
        "model.layers.0.mlp.up",
    ]
    for pattern in (unsloth, swift, r"^(?!.*(visual|aligner)).*\.q_proj$"):
        for name in names:
            assert Pattern(pattern).fullmatch(name, Budget()) == bool(re.fullmatch(pattern, name))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "missing"), (")", "unbalanced"), ("*", "nothing to repeat"), ("a**", "multiple repeat"), ("[a", "set"),
        ("a++", "possessive"), (r"(a)\1", "escape"), ("(?<=a)b", "not supported"), ("(?i)a", "not supported"),
        ("a{2,1}", "ascend"), ("a{99999999999999999999}", "at most"), ("\\", "end of pattern"), ("[b-a]", "range"),
        ("a" * 5000, "characters"), ("(" * 100 + ")" * 100, "nested"), ("(?P<1>a)", "name"),
        ("^*", "nothing to repeat"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(pattern, why):
    with pytest.raises(ValueError, match=why):
        Pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+$b", "((a+)+)+b", "(.*a){20}b", "(?:(?:a?){30}a{30})b"]
)
def test_patterns_on_which_re_hangs_are_quick(pattern):
    begin = time.process_time()
    assert not Pattern(pattern).fullmatch("a" * 200, Budget())
    assert time.process_time() - begin < 5


def test_the_budget_ends_what_is_too_long():
    pattern = "(((((a{0,900}){0,900}){0,900}){0,900}){0,900}){0,900}"
    budget, begin = Budget(300_000), time.process_time()
    with pytest.raises(ValueError, match="too long"):
        for _ in range(10**6):
            Pattern(pattern + "b").fullmatch("a" * 300, budget)
    assert time.process_time() - begin < 20
