"""Targets: vocabularies, and the files beside a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import KvasirError
from kvasir.text import gguf_tokenizer, hf_tokenizer
from kvasir.text.gguf_vocab import PREFIX
from kvasir.text.sentencepiece_model import read_sentencepiece
from kvasir.text.tokenizer import Tokenizer
from tests.fuzz.mutate import mutate_json
from tests.fuzz.target import Target, placed, scratch

TEXT = "Hi there,\n 漢字 <s> 42"
MAX_KIND = 1 << 16  # elements of an array that JSON asks for in few characters
WORDS = tuple(
    """model pre tokens scores token_type merges bos_token_id eos_token_id unknown_token_id padding_token_id
    add_bos_token add_eos_token add_space_prefix remove_extra_whitespaces precompiled_charsmap normalizer.lowercase
    gpt2 llama t5 bert gemma4 default llama-bpe qwen2 <unk> <s> </s> <0x0A> ▁ ##a [CLS] [SEP] [UNK]""".split()
)
FILE_WORDS = tuple(
    """bos_token eos_token unk_token add_bos_token add_eos_token content eos_token_id bos_token_id
    tokenizer_config.json special_tokens_map.json generation_config.json config.json tokenizer.json model vocab merges
    added_tokens type BPE decoder Strip start stop ByteLevel Sequence normalizer post_processor""".split()
)


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """As a tokenizer's worker makes it; a process for each input would be too slow."""
    return Tokenizer.in_process(*gguf_tokenizer.build(metadata))


def from_folder(folder: Path) -> Tokenizer:
    return Tokenizer.in_process(*hf_tokenizer.load(folder))


def use(tokenizer: Tokenizer) -> None:
    """Both ways, and what a model's start asks of it."""
    with suppress(KvasirError):
        ids = tokenizer.encode(TEXT)
        assert all(type(i) is int and i >= 0 for i in ids)
        text = tokenizer.decode(ids)
        assert text.encode() is not None
    tokenizer.decode(range(64))
    for text in tokenizer.special_tokens.values():
        text.encode()


def read_model(data: bytes) -> None:
    """SentencePiece's file, by itself and as the tokenizer of a folder."""
    metadata = read_sentencepiece(placed("tokenizer.model", data))
    for name in ("tokens", "scores", "token_type"):
        assert len(metadata[PREFIX + name]) == len(metadata[PREFIX + "tokens"])  # type: ignore[arg-type]
    use(from_gguf(metadata))


def read_vocabulary(data: bytes) -> None:
    """The keys of a GGUF after `tokenizer.ggml.`, arrays of numbers as the reader gives them."""
    use(from_gguf({PREFIX + key: _as_read(value) for key, value in _object(data).items()}))


def _as_read(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        with suppress(OverflowError):
            return np.array(value, dtype=np.float32 if any(isinstance(one, float) for one in value) else np.int64)
    return value


def read_files(data: bytes) -> None:
    """{file name: its JSON} of a tokenizer's folder."""
    folder = scratch() / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, value in _object(data).items():
        if name in FILE_WORDS and name.endswith(".json"):
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), "utf-8", "replace")
    use(from_folder(folder))


def _object(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        return value if isinstance(value, dict) else {}
    return {}


TARGETS = {
    "sentencepiece": Target(read_model, words=("<unk>", "<s>", "▁", b"\x0a\x0d\x0a", b"\x12\x04\x18\x01")),
    "vocabulary": Target(read_vocabulary, mutate=partial(mutate_json, words=WORDS)),
    "tokenizer_files": Target(read_files, mutate=partial(mutate_json, words=FILE_WORDS)),
}
