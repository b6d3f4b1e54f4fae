"""Tokenizing a long text in slices: where a text can be cut without changing its ids.

A cut lies before a single space between two ASCII letters or digits; for BERT tokenizers, which treat each Chinese
character and each punctuation mark separately, also between two Chinese characters, and before a punctuation mark or a
line break. The ids of a text are the concatenated ids of its slices if the parts of the tokenizer guarantee it: no
normalizer looks across a cut, the pre-tokenizer always splits there, a slice begins like a word in the middle of a
text, and no added token touches the cut. With any part that is not known here, a text is tokenized whole.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from kvasir.text.parts import Component, components_of, normalized
from kvasir.text.pretokenizers import SPLITS_BEFORE_SPACES

SLICE_CHARS = 16 << 10

_LETTERS = " ".join(string.digits + string.ascii_letters)
_CUT = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])")
_BERT_CUT = re.compile(r"(?<=[A-Za-z0-9])(?=[,.;:!?]|[ \n\t\r][A-Za-z0-9])|(?<=[\u4e00-\u9fff])(?=[\u4e00-\u9fff])")
_BERT_TOUCHES = re.compile(r"[,.;:!?\u4e00-\u9fff]")
_TOUCHES = re.compile(r"\A[A-Za-z0-9\s]|[A-Za-z0-9\s]\Z|[^\s▁][\s▁]")
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "StripAccents", "Nmt", "Precompiled", "Strip"}
_DROPS_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_BEFORE = {"Digits", "Punctuation"}  # may come first, since neither splits nor joins at a cut
_LATER = {*_BEFORE, *_DROPS_SPACES, "ByteLevel", "UnicodeScripts", "Split"}


def slices(text: str, cut: re.Pattern[str] = _CUT, size: int = SLICE_CHARS) -> Iterator[str]:
    """The text in parts of about `size` characters; text without a possible cut stays whole."""
    start = 0
    while (found := cut.search(text, start + size)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def cut_of(library: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """The pattern of cuts at which the ids of a text are those of its slices; None if there is none."""
    if not _sliceable(library):
        return None
    components = components_of(library.normalizer)
    plain = {component["type"] for component in components} <= {"BertNormalizer", "Lowercase", "Strip"}
    alone = any(component.get("handle_chinese_chars") for component in components)
    first = next((s["type"] for s in components_of(library.pre_tokenizer) if s["type"] not in _BEFORE), "")
    touched = any(_BERT_TOUCHES.search(token.content) for token in library.get_added_tokens_decoder().values())
    return _BERT_CUT if plain and alone and first == "BertPreTokenizer" and not touched else _CUT


def _sliceable(library: tokenizers.Tokenizer) -> bool:
    normalizers, components = components_of(library.normalizer), components_of(library.pre_tokenizer)
    while components and components[0]["type"] in _BEFORE:
        components = components[1:]
    if library.truncation or library.padding or getattr(library.model, "dropout", None) or not components:
        return False
    strips = any(component["type"] == "Strip" for component in normalizers)
    local = all(_looks_no_further(component) for component in normalizers)
    if not local or not _splits(components[0], strips) or not all(_is_local(component) for component in components[1:]):
        return False
    if normalized(library, _LETTERS).lower() != _LETTERS.lower():  # a table of replacements may contain anything
        return False
    contents = [token.content for token in library.get_added_tokens_decoder().values()]
    return not any(_TOUCHES.search(text) for c in contents for text in (c, normalized(library, c)) if text)


def encoded(
    library: tokenizers.Tokenizer,
    text: str,
    most: int,
    cut: re.Pattern[str],
    around: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> list[int]:
    """The ids of a text between those in `around`, slice by slice, stopping once there are more than `most`. cut: see
    `cut_of`."""
    ids = [*around[0]]
    for part in slices(text, cut):
        if len(ids) > most:
            return ids
        ids += whole(library, part, False)
    return [*ids, *around[1]]


def whole(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # The batch call also for a single text: the library's `encode` blocks all other threads meanwhile.
    return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def ends(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that encoding adds before and after every text; None if that cannot be determined."""
    found = []
    for text in ("a", "b"):
        bare, whole = (library.encode(text, add_special_tokens=special).ids for special in (False, True))
        at = next((k for k in range(len(whole)) if bare and whole[k : k + len(bare)] == bare), -1)
        found.append((whole[:at], whole[at + len(bare) :]) if at >= 0 else None)
    return found[0] if found[0] == found[1] else None


def _looks_no_further(component: Component) -> bool:
    """Whether a normalizer's result on one side of a cut is independent of the other side."""
    if component["type"] != "Replace":
        return component["type"] in _LOCAL
    pattern = component["pattern"]
    if pattern == {"Regex": " {2,}"}:
        return True
    return bool(pattern.get("String")) and not re.search(r"[A-Za-z0-9\s▁]", pattern["String"])


def _splits(component: Component, strips: bool) -> bool:
    """Whether a pre-tokenizer splits before the space, and treats the first word of a slice like a later word. strips:
    the space may be gone."""
    kind = component["type"]
    if kind == "Metaspace":
        return component.get("split", True) and (not strips or component.get("prepend_scheme") == "always")
    if kind in _DROPS_SPACES:
        return True
    return not strips and (_splits_by_gpt2(component) or _splits_by_pattern(component))


def _splits_by_gpt2(component: Component) -> bool:
    return component["type"] == "ByteLevel" and component.get("use_regex", True)


def _splits_by_pattern(component: Component) -> bool:
    known = component.get("pattern", {}).get("Regex") in SPLITS_BEFORE_SPACES
    how = component.get("behavior"), component.get("invert")
    return component["type"] == "Split" and known and how in (("Isolated", False), ("Removed", True))


def _is_local(component: Mapping[str, Any]) -> bool:
    """Whether a later pre-tokenizer treats a piece the same wherever it stands."""
    return component["type"] in _LATER or (
        component["type"] == "Metaspace" and component.get("prepend_scheme") == "always"
    )
