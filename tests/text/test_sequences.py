"""Texts as id sequences: bad words, llama.cpp's breakers, against loops over the vocabulary."""

from pathlib import Path

import numpy as np
import pytest

import kvasir
from kvasir.errors import InvalidRequest
from kvasir.text.sequences import Breakers, bad_words
from tests.serve.fakes import byte_tokenizer
from tests.text.vocabularies import local_folder, shared_tokenizer

REAL = [pytest.param("qwen3", marks=pytest.mark.slow), "mistral", "stories260K", "gguf bert-bge"]


def ids_in(words: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", ["qwen3", "mistral", "stories260K"])
def test_bad_words_are_found_at_the_start_and_after_a_space(name):
    tokenizer = shared_tokenizer(name)
    words = ["cat", " dog", "time", "antidisestablishmentarianism", "a b", "."]
    found = bad_words(tokenizer, words)
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            assert any(ids[-len(bad) :] == bad for bad in found), text
    assert len(found) == len(set(found)) <= 2 * len(words)


def test_a_word_of_several_tokens_may_be_one_token_after_a_space():
    tokenizer = local_folder(Path(kvasir.__file__).parent / "assets" / "kvasir-mini")
    bare, spaced = (tuple(tokenizer.encode(t, add_special_tokens=False)) for t in ("time", " time"))
    assert len(bare) == 2 and len(spaced) == 1
    assert bad_words(tokenizer, ["time"]) == (bare, spaced)


def test_a_word_without_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="no tokens") as error:
        bad_words(byte_tokenizer(), ["x", " "])
    assert error.value.param == "bad_words"


def overlapping(tokenizer, breaker: str) -> tuple[set[int], set[tuple[int, ...]]]:
    alone, sequences = set(), set()
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if breaker.encode() in text:
            alone.add(token)
            continue
        for i in range(1, len(breaker)):
            if text.endswith(breaker[:i].encode()):
                tail = tokenizer.encode(breaker[i:], add_special_tokens=False, parse_special=False)
                sequences.add((token, *tail[:20]))
    return alone, sequences


@pytest.mark.parametrize("name", REAL)
def test_breakers_are_the_tokens_that_overlap_them(name):
    tokenizer = shared_tokenizer(name)
    breakers = Breakers(tokenizer)
    for given in (["\n", ":", '"', "*"], ["###"], ["\n\n", "é?"], [], ["zqz" * 13]):
        alone, sequences = set(), set()
        for breaker in given:
            found = overlapping(tokenizer, breaker)
            alone |= found[0]
            sequences |= found[1]
        words, longer = breakers.of(given)
        assert (set(ids_in(words)), set(longer)) == (alone, sequences)
        assert len(words) == -(-tokenizer.vocab_size // 32) * 4 and len(longer) == len(set(longer))


def test_tokens_of_no_valid_text_are_kept_apart():
    """Byte 0xff is a separate token here, and the separator between tokens."""
    tokenizer = byte_tokenizer()
    words, sequences = Breakers(tokenizer).of(["é", "\n"])
    assert ids_in(words) == tokenizer.encode("\n", add_special_tokens=False)
    assert sequences == ()


def test_a_breaker_that_begins_in_too_many_tokens_is_refused():
    tokenizer = shared_tokenizer("qwen3")
    with pytest.raises(InvalidRequest, match="more than 4096") as error:
        Breakers(tokenizer).of(["e\x00\x01"])
    assert error.value.param == "dry_sequence_breakers"
