"""Streams of text: whole characters, and the same text however the ids arrive."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.text.detokenize import Detokenizer
from tests.examples import examples
from tests.text.vocabularies import ALL_TOKENIZERS, FEW_TOKENIZERS, TINY, any_tokenizer


def streamed(tokenizer, prompt, ids, cuts, skip=True) -> list[str]:
    """What a stream gives when the ids come in pieces that end at `cuts`."""
    stream = Detokenizer(tokenizer, prompt, skip)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    starts = [0, *ends[:-1]]
    return [stream.push(ids[a:b]) for a, b in zip(starts, ends, strict=True)] + [stream.flush()]


def in_context(tokenizer, prompt, ids, skip=True) -> str:
    """The definition: the text of prompt and completion, without what the prompt alone had settled."""
    hidden = tokenizer.special_ids if skip else ()
    data = b"".join(tokenizer.token_bytes(i) for i in prompt if i not in hidden)
    if tokenizer.strips_leading_space:
        data = data.removeprefix(b" ")
    settled = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    whole = tokenizer.decode([*prompt, *ids], skip)
    assert whole.startswith(settled)
    return whole[len(settled) :]


def hostile_ids(tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with a higher share of byte tokens and special tokens than by chance."""
    size = tokenizer.vocab_size
    odd = [i for i in range(min(size, 70_000)) if len(tokenizer.id_to_token(i) or "") in (1, 6)][:600]
    odd += sorted(tokenizer.special_ids)[:20]
    return st.lists(st.one_of(st.sampled_from(odd), st.integers(-1, size + 3)), max_size=25)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FEW_TOKENIZERS)
def test_any_chunking_of_any_ids_gives_the_text_in_context(name):
    tokenizer = any_tokenizer(name)
    ids_of = hostile_ids(tokenizer)

    @examples(30)
    @given(prompt=ids_of, ids=ids_of, cuts=st.lists(st.integers(0, 25)), skip=st.booleans())
    def check(prompt, ids, cuts, skip):
        expected = in_context(tokenizer, prompt, ids, skip)
        assert "".join(streamed(tokenizer, prompt, ids, cuts, skip)) == expected
        assert "".join(streamed(tokenizer, prompt, ids, range(25), skip)) == expected
        assert "".join(streamed(tokenizer, [], ids, cuts, skip)) == tokenizer.decode(ids, skip)

    check()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ALL_TOKENIZERS)
def test_a_valid_stream_never_shows_half_a_character(name):
    tokenizer = any_tokenizer(name)
    ids = tokenizer.encode("é日本語😀🏳️‍🌈 naïve\u0301", add_special_tokens=False)
    pieces = streamed(tokenizer, [], ids, range(len(ids)))
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.fixture
def byte():
    tokenizer = any_tokenizer("tiny sentencepiece")
    return [tokenizer.token_to_id(f"<0x{b:02X}>") for b in range(256)]


def test_a_stray_byte_does_not_hold_the_stream(byte):
    stream = Detokenizer(any_tokenizer("tiny sentencepiece"))
    assert stream.push([byte[0xE4]]) == "", "this may become a character"
    assert stream.push([byte[0x41]]) == "\ufffdA"
    assert stream.push([byte[0xFF]]) == "\ufffd", "this can begin nothing"
    assert stream.push([byte[0xF0], byte[0x9F], byte[0x98]]) == ""
    assert stream.push([byte[0x80]]) == "😀"
    assert stream.flush() == ""


def test_an_unfinished_character_is_emitted_at_the_end(byte):
    stream = Detokenizer(any_tokenizer("tiny sentencepiece"))
    assert (stream.push([byte[0xF0], byte[0x9F]]), stream.flush()) == ("", "\ufffd")


def test_a_character_may_begin_in_the_prompt(byte):
    stream = Detokenizer(any_tokenizer("tiny sentencepiece"), prompt_ids=[byte[0xC3]])
    assert stream.push([byte[0xA9]]) == "é"


def test_the_first_space_is_dropped_only_at_the_start_of_all_text():
    tokenizer = any_tokenizer("tiny sentencepiece")
    hello, bos = tokenizer.token_to_id("▁hello"), tokenizer.bos_id
    assert Detokenizer(tokenizer).push([hello]) == "hello"
    assert Detokenizer(tokenizer, prompt_ids=[bos]).push([bos, hello, hello]) == "hello hello"
    assert Detokenizer(tokenizer, prompt_ids=[bos, hello]).push([hello]) == " hello"


@pytest.mark.parametrize("name", TINY)
def test_special_tokens_are_hidden_or_shown(name):
    tokenizer = any_tokenizer(name)
    special = next(iter(sorted(tokenizer.special_ids)))
    assert Detokenizer(tokenizer).push([special]) == ""
    shown = Detokenizer(tokenizer, skip_special_tokens=False).push([special])
    assert shown == tokenizer.id_to_token(special)


def test_num_chars_gives_the_offset_of_the_next_token():
    tokenizer = any_tokenizer("tiny byte-level")
    stream = Detokenizer(tokenizer)
    offsets, text = [], ""
    for i in tokenizer.encode("hello wé", add_special_tokens=False):
        offsets.append(stream.num_chars)
        text += stream.push([i])
    assert (text, offsets) == ("hello wé", [0, 5, 7]), "hello, a space with w, é"
