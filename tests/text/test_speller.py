"""Text is spelt as it stands in the midst of a longer one, and never by a hidden token."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvasir.errors import UnsupportedModel
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.speller import LibrarySpeller
from kvasir.text.tokenizer import Tokenizer

MARKS = ("<s>", "<call>", "<unused>")
LETTERS = sorted(set("abc <s>/unedl"))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def unigram() -> tokenizers.Tokenizer:
    """With the marks in its own vocabulary, where their scores are the best."""
    scores = [("<unk>", 0.0), *((mark, 0.0) for mark in MARKS), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    scores += [(letter.replace(" ", "▁"), -5.0) for letter in LETTERS]
    backend = tokenizers.Tokenizer(models.Unigram([*scores, ("▁ab", -2.0)], 0, True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(SPACES)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["<unk>", *BYTES, *(c.replace(" ", "▁") for c in LETTERS), "▁a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=False)
    backend.decoder = decoders.Metaspace("▁", "always", split=False)
    return backend


def byte_level() -> tokenizers.Tokenizer:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE({**vocab, "ab": len(vocab)}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize("make", [unigram, metaspace, byte_level])
def test_the_tokens_of_a_text_are_its_bytes_and_none_is_hidden(make):
    backend = make()
    backend.add_special_tokens(list(MARKS[:1]))
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("<call>", "@@", "<unused>")])
    tokenizer = Tokenizer.in_process(backend, SpecialTokens())
    hidden = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    spell = tokenizer.speller(hidden)  # type: ignore[arg-type]

    def check(text: str) -> None:
        ids = spell(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert not set(hidden.values()) & set(ids)
        assert ids.count(tokenizer.token_to_id("@@")) == text.count("@@")

    given(st.lists(st.sampled_from([*MARKS, *LETTERS, " ab", "@@", "é", "漢"])).map("".join))(check)()


def test_pieces_of_words_stand_for_no_bytes():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="no bytes"):
        Tokenizer.in_process(backend, SpecialTokens()).speller({})
    assert LibrarySpeller(backend, {})("ab") == [1, 2]
