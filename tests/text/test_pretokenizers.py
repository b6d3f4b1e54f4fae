"""The table of ways to cut text: every row compiles, loses nothing, and cuts where its model does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from kvasir.errors import UnsupportedModel
from kvasir.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer


def cutter(name: str) -> Sequence:
    return Sequence([Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns])


CUTTERS = {name: cutter(name) for name in PRE_TOKENIZERS}


def cut(name: str, text: str) -> list[str]:
    return [piece for piece, _ in CUTTERS[name].pre_tokenize_str(text)]


@given(st.text("abZé 123'sLL\n\r\t.,!?<>中漢かな가😀\u0301", max_size=40) | st.text(max_size=30))
def test_every_row_keeps_every_character_in_order(text):
    for name in PRE_TOKENIZERS:
        assert "".join(cut(name, text)) == text, name


@pytest.mark.parametrize(
    ("names", "text", "pieces"),
    [
        # How digits are grouped is what most schemes differ in.
        ("llama-bpe deepseek-v3 gpt-4o dbrx glm4 kimi-k2", "a 12345", ["a", " ", "123", "45"]),
        ("qwen2 qwen35 tekken seed-coder bailingmoe smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("gpt-2 olmo", "a 12345", ["a", " 12345"]),
        ("falcon", "a 12345", ["a", " ", "123", "45"]),
        ("afmoe superbpe tiny_aya", "12345", ["12", "345"]),
        ("minicpm5", "12345", ["123", "45"]),
        # Contractions, in which case matters for the older ones.
        ("gpt-2 smollm", "I'll I'LL", ["I", "'ll", " I", "'", "LL"]),
        ("llama-bpe qwen2 stablelm2", "I'll I'LL", ["I", "'ll", " I", "'LL"]),
        ("gpt-4o kimi-k2", "I'll I'LL", ["I'll", " I'LL"]),
        ("ufakzeka", "I'll", ["I", "'ll"]),
        # Words of mixed case.
        ("gpt-4o tekken youtu kimi-k2", "helloWorld HTTPServer", ["hello", "World", " HTTPServer"]),
        ("llama-bpe gpt-2", "helloWorld", ["helloWorld"]),
        # Spaces before a word, and newlines.
        ("llama-bpe qwen2 gpt-4o", "a   b\n\n c", ["a", "  ", " b", "\n\n", " c"]),
        ("gpt-2 starcoder", "a   b\n\n c", ["a", "  ", " b", "\n\n", " c"]),
        ("deepseek-llm deepseek-coder", "a\n\n b", ["a", "\n", "\n", " b"]),
        ("gemma4 sarvam-moe", "a  b\n\nc", ["a  b", "\n\n", "c"]),
        # Scripts.
        ("kimi-k2", "abc漢字かな", ["abc", "漢字", "かな"]),
        ("deepseek-v3 afmoe", "abc漢字かな", ["abc", "漢字かな"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        # Punctuation.
        ("falcon default", "a $5", ["a", " ", "$", "5"]),
        ("deepseek-v3", "(abc) x", ["(abc", ")", " x"]),
        ("bloom viking poro-chat", "a b, c", ["a", " b", ",", " c"]),
    ],
)
def test_known_cuts(names, text, pieces):
    for name in names.split():
        assert cut(name, text) == pieces, name


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModel, match=r"'runes'.*qwen2"):
        pre_tokenizer("runes")
