"""Slices: their ids, joined, are the ids of the text, and facts derived from the first slices of a long text hold."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from kvasir.text import provenance, slices
from kvasir.text.backend import Backend
from kvasir.text.byte_level import LETTERS
from kvasir.text.encoder import Texts
from kvasir.text.pretokenizers import SPLITS_BEFORE_SPACES
from kvasir.text.special_tokens import SpecialTokens
from tests.text.vocabularies import TINY, any_tokenizer

WORDS = [
    "a",
    "b",
    "ab",
    "B",
    "1",
    "12",
    ",",
    "文",
    "\r",
    "s",
    "t",
    "é",
    "ﬁ",
    "Å",
    "中",
    "\u0301",
    "'s",
    ".",
    "<m>",
    "[X]",
    " ",
    "  ",
    "\n",
    "▁",
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.characters(codec="utf-8"), max_size=60).map(" ".join) | st.lists(
    st.sampled_from(WORDS), max_size=60
).map("".join)


def wordpiece() -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate(["[UNK]", "[C]", "[S]", "a", "b", "##b", "1", "##2", ".", "é"])}
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Strip()])
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.TemplateProcessing(single="[C] $A [S]", special_tokens=[("[C]", 1), ("[S]", 2)])
    return library


def unigram(scheme: str = "always", strip: bool = True) -> tokenizers.Tokenizer:
    pieces = [
        ("<unk>", -9.0),
        ("▁", -2.0),
        ("▁a", -2.5),
        ("a", -3.0),
        ("b", -3.0),
        ("ab", -4.0),
        ("1", -3.5),
        ("▁b", -3.0),
    ]
    library = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), *([normalizers.Strip()] if strip else [])]
    library.normalizer = normalizers.Sequence(steps)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return library


def t5() -> tokenizers.Tokenizer:
    library = unigram()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    return library


def bytewise(*steps: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    vocab = {letter: i for i, letter in enumerate(LETTERS.values())} | {"ab": 256, "Ġa": 257, "aĠ": 258}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "a"), ("a", "Ġ")]))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return library


def known(pattern: str) -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return bytewise(split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


MADE = {
    "wordpiece": wordpiece,
    "t5": t5,
    "unigram": unigram,
    **{f"unigram {s}": (lambda s=s: unigram(s, False)) for s in ("first", "never")},
    "byte-level": lambda: bytewise(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": lambda: bytewise(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()),
    **{f"pattern {i}": (lambda p=p: known(p)) for i, p in enumerate(sorted(SPLITS_BEFORE_SPACES)[::3])},
}


@pytest.fixture(params=MADE, scope="module")
def library(request):
    made = MADE[request.param]()
    made.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True), AddedToken("[X]", single_word=True)])
    return made


def test_the_ids_of_a_text_are_those_of_its_slices(library, monkeypatch):
    whole = Backend(library, SpecialTokens())
    places = slices.cut_of(library)
    cut = []

    cut_at = slices.slices

    def small(text, places):
        parts = list(cut_at(text, places, 1))
        cut.append(len(parts))
        return iter(parts)

    monkeypatch.setattr(slices, "slices", small)

    @settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @example("a b 1 <m> ab é a  b a B", 3, True, True)
    @given(TEXTS, st.integers(1, 40), st.booleans(), st.booleans())
    def equal(text, most, special, parse):
        (ids,) = whole.encode(Texts([text], special, parse))
        (some,) = whole.encode(Texts([text], special, parse, most=most))
        assert "".join(cut_at(text, places, 1)) == text
        if len(ids) <= most:
            assert some == ids
        assert some == ids or (len(some) > most and some == ids[: len(some)])
        assert whole.encode(Texts([text], special, parse, most=1 << 30)) == [ids]

    equal()
    assert max(cut) > 3


def test_guarded_texts_have_the_same_ids_in_slices_and_no_fewer_tokens_than_seen(library, monkeypatch):
    """`foreign` parts write no added token, sliced or not; beyond `most` is only what is too long as a whole."""
    guarded = Backend(library, SpecialTokens())
    cut_at = slices.slices
    monkeypatch.setattr(slices, "slices", lambda text, cut: cut_at(text, cut, 1))

    @settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @example("<m>a b <m> [X] a b", "a <m> b a b", "<m> a b a", 4, True)
    @example("<m>a b", "a b a b", "a b <m>", 3, False)
    @example("", "\u0301", "[X]", 1, True)  # a combining mark belongs to a word, so [X] is not a separate word
    @example("", "\u24b6", "[X]", 1, True)
    @given(TEXTS, TEXTS, TEXTS, st.integers(1, 40), st.booleans())
    def equal(before, reply, after, most, special):
        text, spans = before + reply + after, [[(len(before), len(before) + len(reply))]]
        (ids,) = guarded.encode(Texts([text], special, True, spans))
        (some,) = guarded.encode(Texts([text], special, True, spans, most=most))
        assert some == ids or (len(ids) > most and len(some) > most)
        assert guarded.encode(Texts([text], special, True, spans, most=1 << 30)) == [ids]

    equal()


@pytest.mark.slow
def test_of_a_long_guarded_text_the_first_slices_are_enough(monkeypatch):
    library = bytewise(pre_tokenizers.ByteLevel())
    library.add_special_tokens([AddedToken("<m>")])
    guarded, text = Backend(library, SpecialTokens()), "<m>" + "the cat plays <m> " * 100_000
    asked, real = [], slices.whole

    def counted(library, text, special):
        asked.append(len(text))
        return real(library, text, special)

    for module in (slices, provenance):
        monkeypatch.setattr(module, "whole", counted)
    (ids,) = guarded.encode(Texts([text], False, True, [[(3, len(text))]], most=100))
    assert len(ids) > 100 and 0 < sum(asked) < len(text) / 20
    asked.clear()
    guarded.encode(Texts([text], False, True, [[(3, len(text))]]))
    assert sum(asked) >= 2 * len(text), "as spelt by itself, and with its control tokens at their places alone"


def test_texts_without_known_cuts_are_tokenized_whole():
    dropped = bytewise(pre_tokenizers.ByteLevel())
    dropped.model = models.BPE({"a": 0}, [], dropout=0.5)
    touching = wordpiece()
    touching.add_tokens([AddedToken("tok", rstrip=True)])
    spaced = wordpiece()
    spaced.add_tokens([AddedToken("<a b>")])
    prepends = t5()
    prepends.normalizer = normalizers.Sequence([normalizers.Prepend("▁")])
    renamed = wordpiece()
    renamed.normalizer = normalizers.Replace("a", "b")
    whole = [
        touching,
        spaced,
        prepends,
        renamed,
        dropped,
        unigram("never"),
        unigram("first"),
        bytewise(pre_tokenizers.UnicodeScripts()),
    ]
    whole += [known(r"\s?\p{L}+(?: \p{L}+)*")]
    assert not any(slices.cut_of(library) for library in whole)
    assert Backend(touching, SpecialTokens()).encode(Texts(["a b " * 9], False, True, most=3)) == [
        Backend(touching, SpecialTokens()).encode(Texts(["a b " * 9], False, True))[0]
    ]


def test_the_first_slices_of_a_long_text_are_enough(monkeypatch):
    tokenizer = any_tokenizer("tiny wordpiece")
    asked, real = [], slices.whole
    monkeypatch.setattr(
        slices, "whole", lambda library, text, special: asked.append(len(text)) or real(library, text, special)
    )
    text = "the cat plays " * 200_000
    (ids,) = tokenizer.encode_many([text], most=100)
    assert len(ids) > 100 and sum(asked) < len(text) / 50
    monkeypatch.undo()
    assert ids == tokenizer.encode(text[: len(text) // 20])[: len(ids)]


def test_the_usual_kinds_are_cut():
    assert TINY.keys() >= {"tiny wordpiece", "tiny byte-level"}
    assert all(any_tokenizer(name).table.sliced for name in ("tiny wordpiece", "tiny byte-level"))


@pytest.mark.parametrize("piece", ["中文字符", "ab\n", "ab,b.", "1;a?b:"])
def test_texts_without_spaces_are_cut_for_tokenizers_of_berts_kind(piece, monkeypatch):
    asked, real = [], slices.whole
    monkeypatch.setattr(
        slices, "whole", lambda library, text, special: asked.append(len(text)) or real(library, text, special)
    )
    bert, text = Backend(wordpiece(), SpecialTokens()), piece * 100_000
    (ids,) = bert.encode(Texts([text], True, True, most=100))
    assert len(ids) > 100 and sum(asked) < len(text) / 10
    other = wordpiece()
    other.add_tokens([AddedToken("<,>")])
    dropped = wordpiece()
    dropped.normalizer = normalizers.Sequence([normalizers.Replace(",", ""), normalizers.BertNormalizer()])
    assert slices.cut_of(dropped) == slices.cut_of(other) == slices.cut_of(t5()) != slices.cut_of(wordpiece())
