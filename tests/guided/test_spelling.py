"""What is forced comes as it was asked for, also where the tokenizer's own way would make another text of it."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import kvasir
from kvasir.errors import InvalidRequest
from kvasir.guided import sources
from kvasir.guided.check import GrammarCheck
from kvasir.guided.guide import GrammarGuides
from kvasir.guided.spelling import Pieces
from kvasir.guided.vocabulary import Vocabulary
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.tokenizer import Tokenizer
from tests.text.vocabularies import shared_tokenizer

MINI = Path(kvasir.__file__).parent / "assets" / "kvasir-mini" / "tokenizer.json"
TEXTS = ["\u09b9\u09df", "R (\u2126)", "cafe\u0301", "\u212b\u2126\u2f800"]


@cache
def changed() -> list[str]:
    """The characters that the normalizer changes."""
    return [c for c in map(chr, range(0x110000)) if unicodedata.normalize("NFC", c) != c]


@cache
def normalizing(*without: str) -> Vocabulary:
    """kvasir-mini's with a normalizer that composes characters, and without the tokens that have some of these."""
    made = json.loads(MINI.read_text()) | {"normalizer": {"type": "NFC"}}
    model = made["model"]
    if without:
        kept = [token for token in model["vocab"] if not any(text in token for text in without)]
        model["vocab"] = {token: i for i, token in enumerate(kept)}
        merges = [tuple(merge.split()) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        model["merges"] = [f"{a} {b}" for a, b in merges if {a, b, a + b} <= {*kept}]
        made["added_tokens"] = [{**made["added_tokens"][0], "id": len(kept), "content": "<end>"}]
    eos = len(model["vocab"]) if without else made["added_tokens"][0]["id"]
    backend = tokenizers.Tokenizer.from_str(json.dumps(made))
    tokenizer = Tokenizer.in_process(backend, replace(SpecialTokens(), eos_ids=(eos,)))
    return Vocabulary(tokenizer, tokenizer.vocab_size, (eos,))


@cache
def published(name: str) -> Vocabulary:
    tokenizer = shared_tokenizer(name)
    return Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def forced_text(vocabulary: Vocabulary, rule: str) -> str:
    guides = GrammarGuides(lambda: vocabulary)
    guide, ids = guides.take(guides.begin(rule)), []
    while forced := guide.forced():
        guide.advance(forced)
        ids += forced
    guides.close()
    return b"".join(map(vocabulary.tokenizer.token_bytes, ids)).decode()


def test_the_tokenizer_would_make_another_text_of_each():
    vocabulary = normalizing()
    for text in (*TEXTS, "".join(changed()[:50])):
        assert b"".join(map(vocabulary.tokenizer.token_bytes, vocabulary.tokenizer.encode(text))) != text.encode()


@pytest.mark.parametrize(
    ("name", "text"),
    [("kvasir-mini", text) for text in TEXTS]
    + [("qwen3", TEXTS[0])]
    + [pytest.param("qwen3", text, marks=pytest.mark.slow) for text in TEXTS[1:]],
)
def test_constants_and_keys_are_written_as_given(name, text):
    vocabulary = normalizing() if name == "kvasir-mini" else published(name)
    assert forced_text(vocabulary, sources.json_schema({"const": text})) == json.dumps(text, ensure_ascii=False)
    keyed = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    assert json.loads(forced_text(vocabulary, sources.json_schema(keyed))) == {text: 1}


def test_every_character_that_the_normalizer_changes_is_spelt():
    vocabulary, characters = normalizing(), changed()
    assert len(characters) > 1000
    spelt = [b"".join(map(vocabulary.tokenizer.token_bytes, vocabulary.spelt_as(c))).decode() for c in characters]
    assert spelt == characters
    whole = "a " + " b ".join(characters)
    assert b"".join(map(vocabulary.tokenizer.token_bytes, vocabulary.spelt_as(whole))).decode() == whole


def test_texts_without_tokens_are_refused_before_anything_is_computed():
    vocabulary = normalizing("{")
    with pytest.raises(InvalidRequest, match=r"no tokens for '\{'"):
        vocabulary.spelt_as("{")
    checker = GrammarCheck(lambda: vocabulary)
    try:
        with pytest.raises(InvalidRequest, match=r"no tokens for '\{"):
            checker.check(sources.json_object(), param="response_format")
        with pytest.raises(InvalidRequest, match="no tokens"):
            checker.check(sources.json_schema({"type": "array", "prefixItems": [{}, {"const": "a{b"}], "minItems": 2}))
        list_ = sources.json_schema({"type": "array", "items": {"const": "ab"}})
        assert checker.check(list_) == list_
    finally:
        checker.close()


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=12), st.binary(max_size=12))
def test_pieces_spell_a_text_in_the_fewest_tokens_or_not_at_all(tokens, data):
    fewest = {b"": 0}
    for end in range(1, len(data) + 1):
        ways = [fewest[data[:at]] + 1 for at in range(end) if data[:at] in fewest and data[at:end] in tokens]
        if ways:
            fewest[data[:end]] = min(ways)
    ids = Pieces(tokens).spell(data)
    assert (ids is None) == (data not in fewest)
    if ids is not None:
        assert b"".join(tokens[i] for i in ids) == data and len(ids) == fewest[data]
