"""Prompts for filling in the middle: families by their spelling, GGUFs by what they state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvasir.text.byte_level import LETTERS
from kvasir.text.fim import FAMILIES, Infill
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    CONTROL,
    NORMAL,
    byte_level_metadata,
    local_gguf,
    sentencepiece_metadata,
    shared_tokenizer,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def tokenizer(*marks: str, fim: dict[str, int] | None = None) -> Tokenizer:
    """Token i is byte i; the marks follow."""
    vocab = {LETTERS[i]: i for i in range(256)} | {mark: 256 + i for i, mark in enumerate(marks)}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer.in_process(backend, SpecialTokens(fim=fim or {}))


QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.prefix)
def test_each_family_is_recognised_by_its_token_spelling(family):
    marks = [text for text in (family.prefix, family.suffix, family.middle, *family.ends) if text]
    known = tokenizer(*marks)
    infill = Infill.of(known)
    text = known.decode(infill.prompt(known, "before", "after"), skip_special_tokens=False)
    parts = [family.prefix + "before", family.suffix + "after"]
    assert text == "".join(reversed(parts) if family.suffix_first else parts) + family.middle
    assert {known.token_to_id(end) for end in family.ends} <= set(infill.stops())
    assert {infill.prefix, infill.suffix} <= set(infill.stops())


def test_a_model_without_all_of_its_tokens_has_none():
    assert Infill.of(tokenizer()) is None
    for missing in range(3):
        assert Infill.of(tokenizer(*(QWEN[:missing] + QWEN[missing + 1 : 3]))) is None
    assert Infill.of(shared_tokenizer("mistral")) is None


def test_explicit_token_ids_take_precedence_over_spelling():
    stated = {"pre": 256, "suf": 257, "mid": 258, "pad": 259}
    known = tokenizer("<a>", "<b>", "<c>", "<d>", *QWEN, fim=stated)
    infill = Infill.of(known)
    assert (infill.prefix, infill.suffix, infill.middle) == (256, 257, 258)
    assert set(infill.stops()) == {256, 257, 258, 259}
    assert Infill.of(tokenizer(*QWEN, fim={"pre": 5})).prefix == 256


def test_a_gguf_states_its_tokens():
    plain = byte_level_metadata()
    tokens = [*plain["tokenizer.ggml.tokens"], "<x>", "<y>", "<z>"]
    first = len(tokens) - 3
    stated = {f"tokenizer.ggml.fim_{role}_token_id": first + i for i, role in enumerate(("pre", "suf", "mid"))}
    kinds = [*plain["tokenizer.ggml.token_type"], CONTROL, CONTROL, CONTROL]
    data = plain | stated | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    del data["tokenizer.ggml.scores"]
    infill = Infill.of(local_gguf(data))
    assert (infill.prefix, infill.suffix, infill.middle) == (first, first + 1, first + 2)


@given(TEXT, TEXT)
def test_a_prompt_holds_the_texts_and_nothing_else(before, after):
    known = tokenizer(*QWEN)
    infill = Infill.of(known)
    ids = infill.prompt(known, before, after)
    marks = [i for i in ids if i >= 256]
    assert marks == [infill.prefix, infill.suffix, infill.middle]
    assert known.decode(ids, skip_special_tokens=False) == f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"


def test_marks_in_a_text_are_text():
    known = tokenizer(*QWEN)
    files = [("<|file_sep|>", "")]
    ids = Infill.of(known).prompt(known, "<|fim_middle|>", "<|fim_prefix|>", files=files)
    marks = ["<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert [i for i in ids if i >= 256] == [known.token_to_id(mark) for mark in marks]


def test_files_of_the_context_precede_the_prompt():
    known = tokenizer(*QWEN)
    ids = Infill.of(known).prompt(known, "b", "a", files=[("x.py", "one"), ("y.py", "two")])
    assert known.decode(ids, skip_special_tokens=False) == (
        "<|repo_name|>repository\n<|file_sep|>x.py\none\n<|file_sep|>y.py\ntwo\n<|file_sep|>file\n"
        "<|fim_prefix|>b<|fim_suffix|>a<|fim_middle|>"
    )
    plain = tokenizer(*QWEN[:3])
    ids = Infill.of(plain).prompt(plain, "b", "a", files=[("x.py", "one")])
    assert plain.decode(ids, skip_special_tokens=False) == "x.py\none\n<|fim_prefix|>b<|fim_suffix|>a<|fim_middle|>"


def test_a_text_after_a_mark_gets_no_space():
    """SentencePiece puts a space before a text; the suffix stands in the middle of one."""
    data = sentencepiece_metadata(add_space_prefix=True)
    tokens = [*data["tokenizer.ggml.tokens"], "▁<PRE>", "▁<SUF>", "▁<MID>"]
    more = {"tokenizer.ggml.tokens": tokens}
    for key, value in (("token_type", NORMAL), ("scores", -1000.0)):
        more[f"tokenizer.ggml.{key}"] = [*data[f"tokenizer.ggml.{key}"], *[value] * 3]
    known = local_gguf(data | more)
    infill = Infill.of(known)
    word = next(t for t in tokens if t.isascii() and t.isalpha())
    ids = infill.prompt(known, word, word, add_bos=False)
    after = ids[ids.index(infill.suffix) + 1 : ids.index(infill.middle)]
    assert b"".join(map(known.token_bytes, after)).decode() == word


def test_qwen_has_them():
    qwen = shared_tokenizer("qwen3")
    infill = Infill.of(qwen)
    ids = infill.prompt(qwen, "def f(x):\n    ", "\n    return y\n")
    assert qwen.decode(ids, skip_special_tokens=False) == (
        "<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n    return y\n<|fim_middle|>"
    )
