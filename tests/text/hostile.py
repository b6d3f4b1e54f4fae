"""Tokenizer files that harm who loads them, made by the tests."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from kvasir.text.byte_level import LETTERS

HANGS = "h\\u202e"  # on which the library never ends with the file of `endless`


def endless(folder: Path) -> Path:
    """The library loops forever on some texts: a token that its normalizer makes empty is found everywhere."""
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "h": 1, "##b": 2}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.decoder = decoders.WordPiece()
    stretched = AddedToken("é" * 30, lstrip=True, rstrip=True, normalized=True)
    library.add_tokens([AddedToken("\u202e", single_word=True, normalized=True), stretched])
    return _saved(library, folder)


def panics(folder: Path) -> Path:
    """The library panics on decoding the token that is stripped away."""
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    library.decoder = decoders.Strip("a", 0, 1 << 40)
    return _saved(library, folder)


def greedy(folder: Path) -> Path:
    """A normalizer whose table of replacements says that it has 4 GB, for which the library asks for 8."""
    plain(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    table = base64.b64encode(struct.pack("<I", 0xFFFFFFF0) + bytes(64)).decode()
    spec["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def large(folder: Path) -> Path:
    """Many words, which take a while to load."""
    vocab = {f"word {i}": i for i in range(100_000)}
    return _saved(tokenizers.Tokenizer(models.WordLevel(vocab, "word 0")), folder)


def plain(folder: Path) -> Path:
    """An honest one: bytes, and a pair of them."""
    vocab = {letter: i for i, letter in enumerate(LETTERS.values())} | {"he": 256}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("h", "e")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return _saved(library, folder)


def _saved(library: tokenizers.Tokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    return folder
