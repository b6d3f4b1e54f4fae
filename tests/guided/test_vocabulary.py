"""Text that looks like a special token is text; a special token is one where a grammar names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvasir.guided import sources
from kvasir.guided.guide import make_tokenizer
from kvasir.guided.vocabulary import REMEMBERED_CHARS, Vocabulary
from kvasir.text.tokenizer import Speller
from tests._shared import need
from tests.guided.walk import SPECIALS, TOKENIZER, make_guides, walk
from tests.text.vocabularies import local_folder

GUIDES = make_guides()
MARK, MARK_ID = next((text, i) for text, i in SPECIALS.items() if text.startswith("<"))


@pytest.mark.parametrize(
    "grammar",
    [
        sources.choice([f"{MARK}y"]),
        sources.choice([f"{MARK}x", "y"]),
        sources.json_schema({"const": f"a {MARK}"}),
        f'start: "{MARK}" /[a-z]+/',
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_looks_like_a_special_token_is_spelt(grammar, seed):
    ids = walk(GUIDES.take(GUIDES.begin(grammar)), seed)
    assert ids and MARK_ID not in ids
    text = TOKENIZER.decode(ids)
    assert MARK in text or text == "y"


def test_a_special_token_is_meant_by_its_name():
    named = sources.by_id(f'start: {MARK} "{MARK}" /[a-c]{MARK}/ // {MARK}', SPECIALS)
    assert named == f'start: <[{MARK_ID}]> "{MARK}" /[a-c]{MARK}/ // {MARK}'
    ids = walk(GUIDES.take(GUIDES.begin(sources.by_id(f'start: {MARK} "no"', SPECIALS))), 0)
    assert ids and ids[0] == MARK_ID and TOKENIZER.decode(ids[1:]) == "no"


def test_quoted_texts_of_a_gbnf_are_kept():
    text = f'root ::= ["] "{MARK}" [^{MARK}"] {MARK} # "{MARK}'
    assert sources.by_id(text, SPECIALS) == f'root ::= ["] "{MARK}" [^{MARK}"] <[{MARK_ID}]> # "{MARK}'


@given(st.text())
def test_names_are_replaced_in_any_text(text):
    assert sources.by_id(text, {}) == text
    sources.by_id(text, SPECIALS)


PIECES = [
    "Hello, wörld!",
    " 12",
    ' {"a": [1, 2.5, null]}',
    "a < b",
    "\n",
    "def f(x):\n",
    "    ",
    "x",
    "漢",
    "👍🏽",
    "e\u0301",
]


@pytest.mark.parametrize(
    "name",
    ["mistral-7b-instruct-v0.2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-3.2", "qwen3"))],
)
def test_plain_texts_keep_their_tokens_and_special_ones_use_text_tokens(name):
    tokenizer = local_folder(need("tokenizers", "hf", name))
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    found, plain = make_tokenizer(vocabulary), LLTokenizer(tokenizer.encoder.library.to_str(), n_vocab=vocabulary.size)

    def check(text: str) -> None:
        ids = found.tokenize_str(text)
        if found.decode_str(expected := plain.tokenize_str(text)) == text:
            assert ids == expected
        assert found.decode_str(ids) == text, "also where the tokenizer would make another text of it"

    given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))(check)()
    for mark in (*vocabulary.specials, *vocabulary.ends):
        ids = found.tokenize_str(mark)
        assert len(ids) > 1 and tokenizer.decode(ids, skip_special_tokens=True).strip() == mark


def test_texts_of_repeated_masks_are_spelt_once(monkeypatch):
    vocabulary, asked = Vocabulary(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_ids), []
    library, spell = make_tokenizer(vocabulary), Speller.__call__
    monkeypatch.setattr(Speller, "__call__", lambda self, text: asked.append(text) or spell(self, text))
    grammar = sources.json_schema({"properties": {"kind": {"type": "integer"}}, "required": ["kind"], "type": "object"})

    def begin() -> tuple[list[int], bytes]:
        asked.clear()
        matcher = LLMatcher(library, grammar, log_level=0)
        return matcher.compute_ff_tokens(), matcher.compute_bitmask()

    first = begin()
    assert first[0] and asked
    assert begin() == first and not asked


def test_a_long_text_is_not_remembered(monkeypatch):
    asked, spell = [], Speller.__call__
    monkeypatch.setattr(Speller, "__call__", lambda self, text: asked.append(text) or spell(self, text))
    text = "kind " * REMEMBERED_CHARS
    vocabulary = Vocabulary(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_ids)
    ids = vocabulary.spelt_as(text)
    ids.append(0)
    assert vocabulary.spelt_as(text) == ids[:-1]
    vocabulary.spelt_as("kind").append(0)
    assert vocabulary.spelt_as("kind") == TOKENIZER.encode("kind", add_special_tokens=False)
    assert [given for given in asked if given] == [text, text, "kind"]
