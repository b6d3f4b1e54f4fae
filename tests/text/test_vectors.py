"""The ids that llama.cpp gives for its own test texts."""

import pytest

from tests._shared import need
from tests.text.vocabularies import shared_tokenizer

FILES = {
    "gguf llama-spm": "tokenizers/gguf-vocab/ggml-vocab-llama-spm.gguf",
    "gguf gpt-2": "tokenizers/gguf-vocab/ggml-vocab-gpt-2.gguf",
    "gguf deepseek-llm": "tokenizers/gguf-vocab/ggml-vocab-deepseek-llm.gguf",
    "gguf falcon": "tokenizers/gguf-vocab/ggml-vocab-falcon.gguf",
    "gguf bert-bge": "tokenizers/gguf-vocab/ggml-vocab-bert-bge.gguf",
    "qwen3": "tokenizers/hf/qwen3/qwen2",
    "llama-3.2": "tokenizers/hf/llama-3.2/llama-bpe",
}


@pytest.mark.parametrize("name", FILES)
def test_ids_equal_llama_cpp_on_every_vector(name):
    tokenizer = shared_tokenizer(name)
    texts = need(FILES[name] + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = need(FILES[name] + ".out").read_text().splitlines()
    expected = [[int(i) for i in line.split()] for line in lines]
    assert len(expected) == 46
    for text, ids in zip(texts, expected, strict=False):  # nothing follows the last mark
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == ids, repr(text)
