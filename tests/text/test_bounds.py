"""No text has fewer tokens than the bounds say that are known without tokenizing it."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from kvasir.text import table
from kvasir.text.backend import Backend
from kvasir.text.encoder import Texts
from kvasir.text.special_tokens import SpecialTokens
from tests.examples import examples
from tests.text.vocabularies import any_tokenizer

TEXTS = st.text(alphabet=st.sampled_from("abé▁ <m>\n中xy") | st.characters(codec="utf-8"), max_size=60)


def bpe(**more) -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "a", "b", "▁", "é", "ab", "▁ab", "<m>", "<", "m", ">", "aa", "aaaa"])}
    merges = [("a", "b"), ("▁", "ab"), ("a", "a"), ("aa", "aa")]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, **{"unk_token": "<unk>", "fuse_unk": True, **more}))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens([AddedToken("<m>", normalized=False)])
    return library


def changed(*, normalizer=None, pre_tokenizer=None, added=None, **more) -> tokenizers.Tokenizer:
    library = bpe(**more)
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    if added is not None:
        library.add_tokens([added])
    return library


COUNTED = {
    "fused": bpe,
    "dropped": lambda: bpe(unk_token=None),
    "whole words": lambda: bpe(ignore_merges=True),
    "metaspace": lambda: changed(
        normalizer=normalizers.Replace("x", "ab"), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "vanishing": lambda: changed(
        normalizer=normalizers.Sequence([normalizers.Replace(" ", ""), normalizers.Prepend("▁")])
    ),
    "digits": lambda: changed(pre_tokenizer=pre_tokenizers.Digits(individual_digits=True)),
    "long added": lambda: changed(added=AddedToken("xy xy xy", normalized=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_the_known_characters_bound_the_tokens_of_a_text_from_below(name, monkeypatch):
    monkeypatch.setattr(table, "_COUNTED_AT_ONCE", 3)
    backend = Backend(COUNTED[name](), SpecialTokens())
    facts = backend.table()
    assert not facts.bytes_per_token and facts.chars_per_token and "a" in facts.known and "中" not in facts.known

    @examples(60, suppress_health_check=list(HealthCheck))
    @example("a" * 60, "", 3)
    @example("中" * 60, "a", 1)
    @given(TEXTS, TEXTS, st.integers(1, 20))
    def holds(before, reply, enough):
        text, span = before + reply, [[(len(before), len(before) + len(reply))]]
        fewest = facts.fewest_tokens(text, 1 << 30)
        stopped = facts.fewest_tokens(text, enough)
        assert stopped == fewest or fewest >= stopped > enough
        assert all(fewest <= len(backend.encode(Texts([text], False, parse))[0]) for parse in (True, False))
        assert fewest <= len(backend.encode(Texts([text], False, True, span))[0])

    holds()


def test_the_bound_is_close_if_tokens_are_short():
    facts = Backend(bpe(), SpecialTokens()).table()
    assert facts.chars_per_token == len("<unk>")
    assert facts.fewest_tokens("a" * 1000 + "中" * 1000, 1 << 30) == 200


@pytest.mark.parametrize(
    "library",
    [
        changed(normalizer=normalizers.NFC()),
        changed(normalizer=normalizers.Replace(Regex("a+"), "b")),
        changed(normalizer=normalizers.Replace("aa", "b")),
        changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel()),
        changed(added=AddedToken("z", rstrip=True)),
        tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    ],
    ids=["forms", "patterns", "pairs", "drops spaces", "bytes", "takes spaces", "words"],
)
def test_there_is_no_bound_if_known_characters_may_vanish(library):
    facts = Backend(library, SpecialTokens()).table()
    assert (facts.known, facts.chars_per_token) == ("", 0)
    assert facts.fewest_tokens("a" * 1000, 1) == 0


def test_a_real_vocabulary_without_bytes():
    tokenizer = any_tokenizer("TinyStories")
    facts, story = tokenizer.table, "Once upon a time there was a little girl. " * 50
    assert not facts.bytes_per_token and facts.chars_per_token == 72
    assert len(story) // 72 <= facts.fewest_tokens(story, 1 << 30) <= len(tokenizer.encode(story, False))
    assert facts.fewest_tokens("中" * 10_000, 1 << 30) == 0 and len(tokenizer.encode("中" * 10_000, False)) <= 2
