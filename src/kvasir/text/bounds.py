"""Lower bounds for the number of tokens of a text, derived from the parts of its tokenizer without encoding anything.

A text of N bytes has at least N / bytes_per_token tokens if every byte of it reaches the model (no part drops spaces or
control characters) and every token stands for a bounded number of bytes (no run of unknown characters becomes one
token). Where unknown characters are dropped or joined, only the characters known to the model count: each of them is in
a token of the vocabulary, which has at most chars_per_token of them. If the tokenizer has a part that is not known
here, there is no bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from kvasir.text.byte_level import LETTERS
from kvasir.text.parts import Component, components_of, normalized, prepends

# Upper bounds for (bytes of a text) / (bytes of its normalized form). Composition shortens by a factor of at most 3
# ("K" for the Kelvin sign, a Hangul syllable for its letters), compatibility by at most 4; larger values are valid too.
SHORTEN = {"NFC": 4, "NFD": 4, "NFKC": 8, "NFKD": 8, "Lowercase": 4, "ByteLevel": 1}
_KEEP_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_MAX_CHARACTER = 4  # bytes


def bytes_per_token(library: tokenizers.Tokenizer, tokens: Sequence[str | None]) -> int:
    """The maximum number of bytes of a text that one token can stand for; 0 if no bound is known."""
    shorten = _normalizer(components_of(library.normalizer))
    added = library.get_added_tokens_decoder().values()
    if not shorten or not _keeps_all(components_of(library.pre_tokenizer)) or any(t.lstrip or t.rstrip for t in added):
        return 0
    components = components_of(library.pre_tokenizer) + components_of(library.normalizer)
    bytewise = any(component["type"] == "ByteLevel" for component in components)
    if not _always_spells(library, bytewise):
        return 0
    # A byte-level token is spelled with one character per byte.
    longest = max((len(t) if bytewise else len(t.encode()) for t in tokens if t is not None), default=0)
    contents = [text for t in added for text in (t.content, normalized(library, t.content))]
    return shorten * max(longest, _MAX_CHARACTER, *(len(text.encode()) for text in contents), 1)


def known_characters(library: tokenizers.Tokenizer, tokens: Sequence[str | None]) -> tuple[str, int]:
    """The characters of a text that always end up in a token of the vocabulary, and how many of them one token can
    stand for; ("", 0) if that is not known."""
    replaced, added = _replacements(library), library.get_added_tokens_decoder().values()
    if replaced is None or not _is_plain_bpe(library) or any(t.lstrip or t.rstrip for t in added):
        return "", 0
    vocabulary = library.get_vocab(with_added_tokens=False)
    single = {token for token in vocabulary if len(token) == 1}
    known = (c for c in single.union(old for old, _ in replaced) if not single.isdisjoint(_replace_all(c, replaced)))
    texts = (*vocabulary, *(t for t in tokens if t is not None), *(normalized(library, t.content) for t in added))
    return "".join(sorted(known)), max(map(len, texts), default=0)


def _replacements(library: tokenizers.Tokenizer) -> list[tuple[str, str]] | None:
    """The replacements of single characters before the model; None if other changes can happen too."""
    found, components = [], components_of(library.pre_tokenizer)
    if not _keeps_all(components) or any(component["type"] == "ByteLevel" for component in components):
        return None
    for component in components_of(library.normalizer):
        if prepends(component):
            continue
        pattern = component["pattern"].get("String", "") if component["type"] == "Replace" else ""
        if len(pattern) != 1:
            return None
        found.append((pattern, component["content"]))
    return [*found, *((" ", component["replacement"]) for component in components if component["type"] == "Metaspace")]


def _replace_all(text: str, replaced: Sequence[tuple[str, str]]) -> str:
    for old, new in replaced:
        text = text.replace(old, new)
    return text


def _is_plain_bpe(library: tokenizers.Tokenizer) -> bool:
    model = library.model
    return type(model).__name__ == "BPE" and not model.continuing_subword_prefix and not model.end_of_word_suffix


def _always_spells(library: tokenizers.Tokenizer, bytewise: bool) -> bool:
    """Whether no character is dropped and no run of unknown characters becomes a single token."""
    model = library.model
    if not _is_plain_bpe(library):
        return False
    has = model.token_to_id
    if bytewise:
        return all(has(letter) is not None for letter in LETTERS.values())
    if model.byte_fallback and all(has(token) is not None for token in _BYTE_TOKENS):
        return True
    return model.unk_token is not None and has(model.unk_token) is not None and not model.fuse_unk


def _normalizer(components: Sequence[Component]) -> int:
    """Upper bound for (bytes of a text) / (bytes of its normalized form); 0 if no bound is known."""
    product = 1
    for component in components:
        if not prepends(component):
            product *= _replace(component) if component["type"] == "Replace" else SHORTEN.get(component["type"], 0)
    return product


def _replace(component: Component) -> int:
    pattern = component["pattern"].get("String")
    before, after = len((pattern or "").encode()), len(component["content"].encode())
    return -(-before // after) or 0 if pattern and after else 0


def _keeps_all(components: Sequence[Component]) -> bool:
    """Whether no pre-tokenizer drops the characters at which it splits."""
    return all(
        component["type"] in _KEEP_ALL
        or (component["type"] in ("Split", "Punctuation") and component.get("behavior") not in (None, "Removed"))
        for component in components
    )
