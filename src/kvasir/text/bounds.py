"""How few tokens a text can have: what a tokenizer's parts say about it, without encoding anything.

A text of N bytes has at least N / bytes_per_token tokens where every byte of it reaches the model (nothing drops
spaces or control characters) and every token stands for a bounded number of bytes (no run of unknown characters becomes
one token). Where a part is not known here, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from kvasir.text.byte_level import LETTERS
from kvasir.text.parts import Step, normalized, prepends, steps_of

# How many times more bytes a text can have than its normalized form. Composition shortens three-fold at most ("K" for
# the Kelvin sign, a Hangul syllable for its letters), compatibility four-fold; larger values are as true.
_SHORTEN = {"NFC": 4, "NFD": 4, "NFKC": 8, "NFKD": 8, "Lowercase": 4, "ByteLevel": 1}
_KEEP_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_MAX_CHARACTER = 4  # bytes


def bytes_per_token(library: tokenizers.Tokenizer, tokens: Sequence[str | None]) -> int:
    """The most bytes of a text that one token can stand for; 0 where no bound is known."""
    shorten = _normalizer(steps_of(library.normalizer))
    added = library.get_added_tokens_decoder().values()
    if not shorten or not _keeps_all(steps_of(library.pre_tokenizer)) or any(t.lstrip or t.rstrip for t in added):
        return 0
    steps = steps_of(library.pre_tokenizer) + steps_of(library.normalizer)
    bytewise = any(step["type"] == "ByteLevel" for step in steps)
    if not _always_spells(library, bytewise):
        return 0
    # A byte-level token is written with one character for each of its bytes.
    longest = max((len(t) if bytewise else len(t.encode()) for t in tokens if t is not None), default=0)
    contents = [text for t in added for text in (t.content, normalized(library, t.content))]
    return shorten * max(longest, _MAX_CHARACTER, *(len(text.encode()) for text in contents), 1)


def _always_spells(library: tokenizers.Tokenizer, bytewise: bool) -> bool:
    """Whether no character is dropped and no run of unknown ones becomes a single token."""
    model = library.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    has = model.token_to_id
    if bytewise:
        return all(has(letter) is not None for letter in LETTERS.values())
    if model.byte_fallback and all(has(token) is not None for token in _BYTE_TOKENS):
        return True
    return model.unk_token is not None and has(model.unk_token) is not None and not model.fuse_unk


def _normalizer(steps: Sequence[Step]) -> int:
    """How many times more bytes a text can have than its normalized form; 0 where no bound is known."""
    product = 1
    for step in steps:
        if not prepends(step):
            product *= _replace(step) if step["type"] == "Replace" else _SHORTEN.get(step["type"], 0)
    return product


def _replace(step: Step) -> int:
    pattern = step["pattern"].get("String")
    before, after = len((pattern or "").encode()), len(step["content"].encode())
    return -(-before // after) or 0 if pattern and after else 0


def _keeps_all(steps: Sequence[Step]) -> bool:
    """Whether no pre-tokenizer drops the characters at which it cuts."""
    return all(
        step["type"] in _KEEP_ALL
        or (step["type"] in ("Split", "Punctuation") and step.get("behavior") not in (None, "Removed"))
        for step in steps
    )
