"""Tokenizers rebuilt from GGUF metadata: against other readers of the same vocabulary; hostile metadata."""

import io
import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.text.gguf_tokenizer import build
from kvasir.text.gguf_vocab import Vocab
from kvasir.text.sentencepiece_model import read_sentencepiece
from tests._shared import need
from tests.examples import examples
from tests.text.vocabularies import (
    CONTROL,
    NORMAL,
    USER,
    byte_level_metadata,
    gguf_metadata,
    local_gguf,
    metadata,
    metadata_of_tokenizer_json,
    sentencepiece_metadata,
    shared_tokenizer,
    wordpiece_metadata,
)

WORDS = [
    *"Once upon a time, there was a hello world! 123 12 é 中文 😀 ▁ <s> </s> <0x41> don't WE'LL".split(),
    *("\n", "\t", "\r\n", ""),
]
LETTERS = "abcdehilorstw ABz   .,!'\n\r\t0123456789éÀ中文😀ÅA\u0301ﬁ▁"
TEXTS = st.one_of(st.lists(st.sampled_from(WORDS)).map(" ".join), st.text(LETTERS, max_size=60), st.text(max_size=30))


def some_texts(count: int) -> list[str]:
    """A fixed sample, for comparisons over many texts with tokenizers that are slow to load."""
    rng = random.Random(7)
    prose = [(" " * rng.randint(1, 3)).join(rng.choices(WORDS, k=rng.randint(0, 30))) for _ in range(count)]
    noise = ["".join(rng.choices(LETTERS, k=rng.randint(0, 60))) for _ in range(count)]
    return prose + noise + [" " * n for n in range(70)]


# --- against other readers of the same vocabulary ------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama-3.2", "llama-bpe")])
def test_byte_level_bpe_gives_the_ids_of_the_tokenizer_json_it_comes_from(name, pre):
    original = shared_tokenizer(name)
    path = need(f"tokenizers/hf/{name}/tokenizer.json")
    rebuilt = local_gguf(metadata_of_tokenizer_json(path, pre=pre, add_bos_token=False))
    for text in some_texts(500):
        for parse in (True, False):
            ids = original.encode(text + "<|im_start|>x<|eot_id|>", False, parse)
            assert rebuilt.encode(text + "<|im_start|>x<|eot_id|>", False, parse) == ids, repr(text)


def test_stories260k_gguf_gives_the_ids_of_its_tokenizer_json():
    gguf, folder = shared_tokenizer("gguf stories260K"), shared_tokenizer("stories260K")
    for text in some_texts(1000):
        assert gguf.encode(text) == folder.encode(text), repr(text)
        assert gguf.encode(text, parse_special=False) == folder.encode(text, parse_special=False), repr(text)


def test_equal_scores_rank_by_id_so_that_tinystories_gets_the_ids_of_its_tokenizer_json():
    # Its GGUF says -1000 for each token. Special tokens stay out: the two files treat the spaces beside them
    # differently.
    gguf, folder = shared_tokenizer("gguf TinyStories"), shared_tokenizer("TinyStories")
    for text in some_texts(1000):
        assert gguf.encode(text, parse_special=False) == folder.encode(text, parse_special=False), repr(text)
    assert gguf.encode("日", add_special_tokens=False)[-1] == gguf.unk_id


def test_minilm_gguf_gives_the_ids_of_transformers():
    tokenizer = shared_tokenizer("gguf MiniLM")
    cases = json.loads(need("models/all-MiniLM-L6-v2/expected_embeddings.json").read_text())["cases"]
    for case in cases:
        ids = tokenizer.encode(case["text"])
        assert (ids if len(ids) <= 256 else ids[:255] + ids[-1:]) == case["ids"]


@pytest.mark.parametrize("path", ["tokenizers/hf/mistral-7b-instruct-v0.2", "models/stories260K"])
def test_tokenizer_model_gives_the_ids_of_sentencepiece(path):
    sentencepiece = pytest.importorskip("sentencepiece")
    file = need(path, "tokenizer.model")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(file))
    tokenizer = local_gguf(read_sentencepiece(file))
    for text in some_texts(700):
        assert tokenizer.encode(text, parse_special=False) == oracle.encode(text), repr(text)


@pytest.mark.few(8)
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}, {"add_dummy_prefix": False}])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("fold", [True, False])
def test_trained_sentencepiece_models_give_the_ids_of_sentencepiece(tmp_path, model_type, options, rule, fold):
    sentencepiece = pytest.importorskip("sentencepiece")
    rng = random.Random(3)
    sentences = [" ".join(rng.choices(WORDS[:9], k=8)) for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=330 if "byte_fallback" in options else 60,
        hard_vocab_limit=False,
        model_type=model_type,
        normalization_rule_name=rule,
        remove_extra_whitespaces=fold,
        minloglevel=3,
        **options,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = local_gguf(read_sentencepiece(tmp_path / "tokenizer.model"))
    for text in some_texts(150):
        # The library looks replacements up by grapheme, SentencePiece by code point.
        if "<" not in text and (rule == "identity" or not {"\u0301", "\r"} & set(text)):
            assert tokenizer.encode(text) == oracle.encode(text), repr(text)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("dummy", [True, False])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_runs_of_spaces_that_are_pieces_are_matched(tmp_path, model_type, dummy, rule):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c the cat sat on the mat hello world abba"] * 50),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        model_type=model_type,
        user_defined_symbols=["▁▁", "▁▁▁▁", "▁▁▁▁▁▁▁"],
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy,
        normalization_rule_name=rule,
        minloglevel=3,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = local_gguf(read_sentencepiece(tmp_path / "tokenizer.model"))
    texts = ["a    b", "a  b", "  a", " ", "a   b       c", "the      cat  ", "", "a\n    b", "      a"]
    texts += ["    "] * (rule == "identity")  # else it cannot be distinguished from the piece itself
    texts += [f"a{' ' * size}b{' ' * (17 - size)}" for size in range(18)]
    for text in texts:
        for parse_special in (True, False):
            ids = tokenizer.encode(text, parse_special=parse_special)
            expected = oracle.encode(text)
            if model_type == "unigram":  # of several ways that score the same, SentencePiece takes one by rounding
                ids, expected = sorted(ids), sorted(expected)
            assert ids == expected, (text, [tokenizer.id_to_token(i) for i in ids])
    assert tokenizer.speller({})("x    y")[1:-1] == [tokenizer.token_to_id("▁▁▁▁")]


def test_a_control_token_that_the_file_calls_user_defined_is_spelt_out():
    """As in Phi-3's files, whose `</s>` is a user-defined token."""
    data = sentencepiece_metadata(add_bos_token=False)
    data["tokenizer.ggml.token_type"][2] = 4
    tokenizer = local_gguf(data)
    assert tokenizer.id_to_token(2) == "</s>"
    assert 2 in tokenizer.encode("he</s>") and 2 not in tokenizer.encode("he</s>", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("he</s>", parse_special=False)) == "he</s>"
    user = tokenizer.token_to_id("<tool>")
    assert user in tokenizer.encode("he<tool>", parse_special=False), "a token of the text's own stays one"


# --- SentencePiece by scores ---------------------------------------------------------------------------


def merge_by_score(vocab: Vocab, text: str) -> list[int]:
    """The rule itself: join the pair whose token scores highest, the leftmost of equals, to the end."""
    ids = {token: i for i, (token, kind) in enumerate(vocab.typed_tokens()) if kind == NORMAL}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = enumerate(pairwise(parts))
        joined = [(-vocab.scores[ids[a + b]], i) for i, (a, b) in pairs if a + b in ids]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelt = [[ids[p]] if p in ids else [vocab.ids[f"<0x{b:02X}>"] for b in p.encode()] for p in parts]
    return [i for piece in spelt for i in piece]


@given(st.text("helowrd !é中😀▁  \n", max_size=40))
def test_merges_from_scores_follow_the_rule_on_a_tiny_vocabulary(text):
    data = sentencepiece_metadata(add_bos_token=False)
    assert local_gguf(data).encode(text, parse_special=False) == merge_by_score(Vocab.read(data), text)


@pytest.mark.slow
def test_merges_from_scores_follow_the_rule_on_llama_2():
    path = need("tokenizers/gguf-vocab/ggml-vocab-llama-spm.gguf")
    vocab, tokenizer = Vocab.read(gguf_metadata(path)), shared_tokenizer("gguf llama-spm")
    for text in some_texts(100):
        assert tokenizer.encode(text, False, False) == merge_by_score(vocab, text), repr(text)


@pytest.mark.parametrize("add_space", [True, False])
def test_the_space_comes_before_the_text_and_after_each_special_token(add_space):
    tokenizer = local_gguf(sentencepiece_metadata(add_space_prefix=add_space))
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("hello<s>hello<tool>w")]
    space = "▁" if add_space else ""
    assert tokens == ["<s>", f"{space}hello", "<s>", f"{space}hello", "<tool>", f"{space}w"]
    assert tokenizer.decode(tokenizer.encode("hello  w")) == "hello  w"


# --- what the keys mean --------------------------------------------------------------------------------


def test_special_and_user_defined_tokens():
    tokenizer = local_gguf(byte_level_metadata())
    begin, end, tool = (tokenizer.token_to_id(t) for t in ("<|begin|>", "<|im_end|>", "<tool>"))
    assert tokenizer.encode("he<|im_end|><tool>") == [begin, tokenizer.token_to_id("he"), end, tool]
    plain = tokenizer.encode("<|im_end|><tool>", parse_special=False)
    assert end not in plain and plain[-1] == tool, "user-defined tokens are found in any text"
    assert tokenizer.special_ids == {begin, end}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos, tokenizer.add_eos) == (
        begin,
        (end,),
        True,
        False,
    )
    assert tokenizer.special_tokens["bos_token"] == "<|begin|>"


def test_wordpiece_puts_its_ends_around_the_text_and_names_what_is_unknown():
    tokenizer = local_gguf(wordpiece_metadata())
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("The CATS playing, qux!")]
    assert tokens == ["[CLS]", "the", "cat", "##s", "play", "##ing", ",", "[UNK]", "!", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("the cats, playing!")) == "the cats, playing!"


def test_tokens_that_end_a_turn_end_generation_beside_the_stated_one():
    tokens = [
        ("a", NORMAL, 0.0),
        ("<eos>", CONTROL, 0.0),
        ("<|eot_id|>", CONTROL, 0.0),
        ("<|eom_id|>", NORMAL, 0.0),
    ]
    data = metadata("gpt2", tokens, pre="gpt-2", merges=[], eos_token_id=1)
    assert build(data)[1].eos_ids == (1, 2), "a token that is ordinary text ends nothing"


def test_a_message_end_ends_no_turn_where_turns_end_otherwise():
    names = ["<|end|>", "<|return|>", "<|call|>"]
    data = metadata("gpt2", [(n, CONTROL, 0.0) for n in names], pre="gpt-4o", merges=[], eos_token_id=1)
    assert build(data)[1].eos_ids == (1, 2)


def test_gemma4_merges_text_with_visible_spaces_and_falls_back_to_bytes():
    letters = [(letter, NORMAL, 0.0) for letter in "▁ab\n"]
    tokens = [("<bos>", CONTROL, 0.0), *letters, ("▁a", NORMAL, 0.0), ("\n\n\n", NORMAL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)]
    tokenizer = local_gguf(metadata("gemma4", tokens, merges=["▁ a"], bos_token_id=0))
    spelt = [tokenizer.id_to_token(i) for i in tokenizer.encode("a a\n\n\nbé")]
    assert spelt == ["<bos>", "a", "▁a", "\n\n\n", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a a\n\n\nbé")) == "a a\n\n\nbé"


def test_phi_3_drops_the_spaces_after_its_markers():
    data = byte_level_metadata()
    data["general.name"] = "Phi-3 mini"
    tokenizer = local_gguf(data)
    assert tokenizer.encode("<|im_end|> \n he") == tokenizer.encode("<|im_end|>he")


# --- refusals ------------------------------------------------------------------------------------------


def test_an_unknown_pre_tokenizer_is_named_with_the_known_ones():
    with pytest.raises(UnsupportedModel, match=r"'runes'.*gpt-2"):
        build(byte_level_metadata(pre="runes"))


def test_a_missing_pre_tokenizer_is_no_silent_default():
    data = byte_level_metadata()
    del data["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre"):
        build(data)


@pytest.mark.parametrize("model", ["plamo2", "none", ""])
def test_unknown_kinds_are_named(model):
    with pytest.raises(UnsupportedModel, match=repr(model)):
        build(metadata(model, [("a", NORMAL, 0.0)]))


HOSTILE = {
    "no model": {"model": None},
    "model is a number": {"model": 3},
    "no tokens": {"tokens": []},
    "tokens are no array": {"tokens": "abc"},
    "tokens are numbers": {"tokens": [1, 2, 3]},
    "too few types": {"token_type": [1]},
    "types beyond the last": {"token_type": [77] * 267},
    "types are text": {"token_type": ["a"] * 267},
    "too few scores": {"scores": [0.0]},
    "scores are not finite": {"scores": [math.nan] * 267},
    "merges are no array": {"merges": 5},
    "merges are numbers": {"merges": [1]},
    "merge without a space": {"merges": ["he"]},
    "merge of tokens that are none": {"merges": ["zzz yyy"]},
    "merge to a token that is none": {"merges": ["q q"]},
    "merge of nothing": {"merges": [" h"]},
    "bos beyond the end": {"bos_token_id": 267},
    "eos negative": {"eos_token_id": -7},
    "eos is text": {"eos_token_id": "<|im_end|>"},
    "bos is a bool": {"bos_token_id": True},
    "add_bos is a number": {"add_bos_token": 1},
    "add_bos without bos": {"bos_token_id": 0xFFFFFFFF},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_metadata_is_refused(change):
    assert byte_level_metadata()["tokenizer.ggml.bos_token_id"] == 264, "of 267 tokens"
    data = byte_level_metadata() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(ModelFileError):
        build(data)


def test_a_token_that_comes_twice_is_refused():
    with pytest.raises(ModelFileError, match="twice"):
        build(metadata("llama", [("a", NORMAL, 0.0), ("a", NORMAL, -1.0)]))


def test_a_token_without_end_is_refused():
    with pytest.raises(ModelFileError, match="100000 characters"):
        build(metadata("llama", [("a" * 100_000, NORMAL, 0.0)]))


def test_a_malformed_table_of_replacements_is_an_error_and_no_crash():
    table = list(b"\x08\x00\x00\x00abcdefgh\x00")
    tokens = [("<unk>", 2, 0.0), ("a", NORMAL, -1.0)]
    with pytest.raises(ModelFileError):
        data = metadata("t5", tokens, unknown_token_id=0, precompiled_charsmap=table)
        local_gguf(data).encode("hello")


@examples(80)
@given(st.data())
def test_any_single_corruption_gives_a_tokenizer_or_a_clear_refusal(data):
    make = data.draw(st.sampled_from([byte_level_metadata, sentencepiece_metadata, wordpiece_metadata]))
    meta = make()
    key = data.draw(st.sampled_from(sorted(meta)))
    junk = st.one_of(
        st.none(), st.integers(), st.text(), st.booleans(), st.lists(st.integers() | st.text(), max_size=5)
    )
    value = meta[key]
    if isinstance(value, list) and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        meta[key] = [*value[:at], data.draw(junk), *value[at + 1 :]]
    else:
        meta[key] = data.draw(junk)
    try:
        tokenizer = local_gguf(meta)
    except (ModelFileError, UnsupportedModel):
        return
    ids = tokenizer.encode("hello <|im_end|> w é中 <tool>")
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_user_defined_tokens_are_not_control():
    data = metadata("gpt2", [("a", NORMAL, 0.0), ("<x>", USER, 0.0)], pre="gpt-2", merges=[])
    assert local_gguf(data).special_ids == frozenset()
