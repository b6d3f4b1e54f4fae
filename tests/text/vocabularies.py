"""Tokenizers for the tests: tiny ones made here, and the real ones of the shared data, each loaded once."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import pytest

from kvasir.text import gguf_tokenizer, hf_tokenizer
from kvasir.text.byte_level import LETTERS
from kvasir.text.tokenizer import Tokenizer
from kvasir.weights.gguf import GGUFFile
from tests._shared import SHARED, need

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Real tokenizers by name, and where they lie in the shared data.
SHARED_TOKENIZERS = {
    "qwen3": "tokenizers/hf/qwen3",
    "llama-3.2": "tokenizers/hf/llama-3.2",
    "mistral": "tokenizers/hf/mistral-7b-instruct-v0.2",
    "stories260K": "models/stories260K",
    "TinyStories": "models/TinyStories-656K",
    "gguf llama-spm": "tokenizers/gguf-vocab/ggml-vocab-llama-spm.gguf",
    "gguf gpt-2": "tokenizers/gguf-vocab/ggml-vocab-gpt-2.gguf",
    "gguf deepseek-llm": "tokenizers/gguf-vocab/ggml-vocab-deepseek-llm.gguf",
    "gguf falcon": "tokenizers/gguf-vocab/ggml-vocab-falcon.gguf",
    "gguf bert-bge": "tokenizers/gguf-vocab/ggml-vocab-bert-bge.gguf",
    "gguf stories260K": "models/gguf/stories260K-F32.gguf",
    "gguf TinyStories": "models/gguf/TinyStories-656K-F16.gguf",
    "gguf MiniLM": "models/gguf/all-MiniLM-L6-v2-Q4_K_M.gguf",
}


@lru_cache
def gguf_metadata(path: Path) -> dict[str, object]:
    file = GGUFFile(path)
    try:
        return file.metadata
    finally:
        file.close()


@lru_cache
def _load(path: Path) -> Tokenizer:
    return local_gguf(gguf_metadata(path)) if path.is_file() else local_folder(path)


def local_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """As `Tokenizer.from_gguf`, in this process."""
    return Tokenizer.in_process(*gguf_tokenizer.build(metadata))


def local_folder(folder: Path) -> Tokenizer:
    """As `Tokenizer.from_folder`, in this process."""
    return Tokenizer.in_process(*hf_tokenizer.load(folder))


def shared_tokenizer(name: str) -> Tokenizer:
    """The real tokenizer of that name; skips where the data is absent."""
    need(SHARED_TOKENIZERS[name])
    return _load(SHARED / SHARED_TOKENIZERS[name])


def metadata(model: str, tokens: list[tuple[str, int, float]], **more: object) -> dict[str, object]:
    """GGUF metadata of (text, type, score) tokens; `more` are further `tokenizer.ggml.` keys."""
    keys = {
        "model": model,
        "tokens": [text for text, _, _ in tokens],
        "token_type": [kind for _, kind, _ in tokens],
        "scores": [score for _, _, score in tokens],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_level_metadata(**more: object) -> dict[str, object]:
    """Byte-level BPE: all bytes, some merges, one of them across a character's bytes, special tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ã ©", "ä ¸", "1 2"]
    made = [merge.replace(" ", "") for merge in merges]
    tokens = [(letter, NORMAL, 0.0) for letter in LETTERS.values()] + [(text, NORMAL, 0.0) for text in made]
    tokens += [("<|begin|>", CONTROL, 0.0), ("<|im_end|>", CONTROL, 0.0), ("<tool>", USER, 0.0)]
    begin = len(tokens) - 3
    ids = {"bos_token_id": begin, "eos_token_id": begin + 1}
    return metadata("gpt2", tokens, **{"merges": merges, "pre": "gpt-2", "add_bos_token": True, **ids, **more})


def sentencepiece_metadata(**more: object) -> dict[str, object]:
    """SentencePiece BPE with byte tokens, and scores as training gives them: -1 for the first merge."""
    made = ["he", "ll", "hell", "hello", "▁hello", "▁▁", "▁▁▁▁", "▁w", "or", "wor", "▁wor", "é!"]
    letters = "▁abcdehilmnorstuvw!.,é中"
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, NORMAL, -float(n)) for n, text in enumerate([*made, *letters])]
    tokens += [("<tool>", USER, 0.0)]
    return metadata("llama", tokens, **{"add_bos_token": True, "unknown_token_id": 0, **more})


def wordpiece_metadata(**more: object) -> dict[str, object]:
    words = ["▁the", "▁cat", "s", "▁play", "ing", "▁!", "▁,", "▁é", "▁a", "b"]
    tokens = [(text, CONTROL, 0.0) for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")]
    tokens += [(word, NORMAL, 0.0) for word in words]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}
    return metadata("bert", tokens, **{**ids, **more})


TINY = {
    "tiny byte-level": byte_level_metadata,
    "tiny sentencepiece": sentencepiece_metadata,
    "tiny wordpiece": wordpiece_metadata,
}


@lru_cache
def any_tokenizer(name: str) -> Tokenizer:
    return local_gguf(TINY[name]()) if name in TINY else shared_tokenizer(name)


ALL_TOKENIZERS = [*TINY, *SHARED_TOKENIZERS]
# For expensive tests: in the fast ones, the small tokenizers and one large one.
_SMALL = {*TINY, "qwen3", "stories260K", "TinyStories", "gguf stories260K", "gguf bert-bge"}
FEW_TOKENIZERS = [name if name in _SMALL else pytest.param(name, marks=pytest.mark.slow) for name in ALL_TOKENIZERS]


def metadata_of_tokenizer_json(path: Path, **more: object) -> dict[str, object]:
    """What a converter writes into a GGUF for a byte-level BPE tokenizer.json."""
    data = json.loads(path.read_text(encoding="utf-8"))
    added = {token["id"]: token for token in data["added_tokens"]}
    texts = {i: text for text, i in data["model"]["vocab"].items()}
    texts |= {i: token["content"] for i, token in added.items()}
    tokens = []
    for i in range(max(texts) + 1):
        kind = (CONTROL if added[i]["special"] else USER) if i in added else NORMAL if i in texts else UNUSED
        tokens.append((texts.get(i, f"[PAD{i}]"), kind, 0.0))
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    return metadata("gpt2", tokens, merges=merges, **more)
