"""Unigram tokenizers of Hugging Face folders, as XLM-RoBERTa's: ids, pairs of texts, and decoding."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvasir.text.gguf_tokenizer import build
from kvasir.text.tokenizer import Tokenizer

PIECES = [
    *(("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)),
    *(("▁", -2.0), ("▁the", -3.0), ("▁cat", -4.5), ("▁c", -5.0), ("at", -4.8), ("s", -3.5), (".", -3.0)),
    *((letter, -8.0) for letter in "abcdehtw"),
    *(("é", -9.0), ("日", -9.5)),
]


@pytest.fixture(scope="module")
def library():
    made = tokenizers.Tokenizer(models.Unigram(PIECES, 3))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return made


@pytest.fixture(scope="module")
def tokenizer(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("xlm-roberta")
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizerFast", **names}))
    made = Tokenizer.from_folder(folder)
    yield made
    made.close()


@pytest.mark.parametrize("text", ["the cats.", "", " ", "the  cat", "é日 xyz", "ﬁt ℃", "the </s> cat", "cat" * 50])
def test_ids_are_the_librarys(library, tokenizer, text):
    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids


def test_the_best_segmentation_is_found(tokenizer):
    ids = tokenizer.encode("the cats.")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁the", "▁cat", "s", ".", "</s>"]


def test_text_that_looks_like_a_control_token_is_spelled_out(tokenizer):
    """The control tokens are pieces of the model too, so only the guard of foreign text avoids them."""
    assert 2 not in tokenizer.encode("the </s> cat", foreign=((4, 8),), blocked=tokenizer.special_ids)[1:-1]


def test_decoding_gives_the_text(tokenizer):
    assert tokenizer.decode(tokenizer.encode("the cats."), skip_special_tokens=True) == "the cats."


def test_ends(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (2,), 1)
    assert tokenizer.add_bos and tokenizer.add_eos


# --- from GGUF --------------------------------------------------------------------------------------


def test_a_gguf_file_gives_the_ids_of_its_folder(library):
    """Its keys as llama.cpp's converter writes them for XLM-RoBERTa, whose pairs have two separators."""
    kinds = [3, 3, 3, 2, *[1] * (len(PIECES) - 4)]
    metadata = {
        "model": "t5", "pre": "default", "tokens": [piece for piece, _ in PIECES],
        "scores": [score for _, score in PIECES], "token_type": kinds, "bos_token_id": 0, "eos_token_id": 2,
        "unknown_token_id": 3, "seperator_token_id": 2, "padding_token_id": 1, "cls_token_id": 0,
        "add_bos_token": True, "add_eos_token": True, "add_sep_token": True, "add_space_prefix": True,
        "remove_extra_whitespaces": True,
    }  # fmt: skip
    made, _ = build({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    for text in ("the cats.", "", "the  cat", " the cat ", "é日 xyz", "cat" * 50):
        assert made.encode(text).ids == library.encode(text).ids, text
    assert made.encode("the cat", "cats").ids == library.encode("the cat", "cats").ids


def test_the_pairs_of_a_wordpiece_vocabulary_have_a_separator():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁cat", "s"]
    metadata = {
        "model": "bert", "tokens": words, "token_type": [3, 3, 3, 3, 1, 1, 1], "cls_token_id": 2, "unknown_token_id": 1,
        "seperator_token_id": 3,
    }  # fmt: skip
    made, _ = build({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    found = made.encode("the cats", "cat")
    assert (found.ids, found.type_ids) == ([2, 4, 5, 6, 3, 5, 3], [0, 0, 0, 0, 0, 1, 1])
