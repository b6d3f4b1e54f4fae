"""Tokenizing a long text in slices: where a text can be cut without a change of its ids.

A cut lies before a single space between two ASCII letters or digits; for BERT's kind, which takes each Chinese
character and each punctuation mark alone, also between two of these characters, and before such a mark or a line break.
The ids of a text are those of its slices, one after the other, where the tokenizer's parts say so: no normalizer looks
across such a place, the pre-tokenizer always splits there, a slice begins as a word in the midst of a text does, and no
added token touches the place. Where a part is not known here, a text is tokenized whole.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from kvasir.text.parts import Step, normalized, steps_of
from kvasir.text.pretokenizers import SPLITS_BEFORE_SPACES

SLICE_CHARS = 16 << 10

_LETTERS = " ".join(string.digits + string.ascii_letters)
_CUT = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])")
_BERT_CUT = re.compile(r"(?<=[A-Za-z0-9])(?=[,.;:!?]|[ \n\t\r][A-Za-z0-9])|(?<=[\u4e00-\u9fff])(?=[\u4e00-\u9fff])")
_BERT_TOUCHES = re.compile(r"[,.;:!?\u4e00-\u9fff]")
_TOUCHES = re.compile(r"\A[A-Za-z0-9\s]|[A-Za-z0-9\s]\Z|[^\s▁][\s▁]")
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "StripAccents", "Nmt", "Precompiled", "Strip"}
_DROPS_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_BEFORE = {"Digits", "Punctuation"}  # they may come first, since neither cuts or joins at such a place
_LATER = {*_BEFORE, *_DROPS_SPACES, "ByteLevel", "UnicodeScripts", "Split"}


def slices(text: str, cut: re.Pattern[str] = _CUT, size: int = SLICE_CHARS) -> Iterator[str]:
    """The text in parts of about `size` characters; what has no place for a cut stays whole."""
    start = 0
    while (found := cut.search(text, start + size)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def cut_of(library: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Where a text can be cut, its ids being known to be those of its slices; None where it cannot."""
    if not _sliceable(library):
        return None
    steps = steps_of(library.normalizer)
    plain = {step["type"] for step in steps} <= {"BertNormalizer", "Lowercase", "Strip"}
    alone = any(step.get("handle_chinese_chars") for step in steps)
    first = next((s["type"] for s in steps_of(library.pre_tokenizer) if s["type"] not in _BEFORE), "")
    touched = any(_BERT_TOUCHES.search(token.content) for token in library.get_added_tokens_decoder().values())
    return _BERT_CUT if plain and alone and first == "BertPreTokenizer" and not touched else _CUT


def _sliceable(library: tokenizers.Tokenizer) -> bool:
    normalizers, steps = steps_of(library.normalizer), steps_of(library.pre_tokenizer)
    while steps and steps[0]["type"] in _BEFORE:
        steps = steps[1:]
    if library.truncation or library.padding or getattr(library.model, "dropout", None) or not steps:
        return False
    strips = any(step["type"] == "Strip" for step in normalizers)
    local = all(_looks_no_further(step) for step in normalizers)
    if not local or not _splits(steps[0], strips) or not all(_is_local(step) for step in steps[1:]):
        return False
    if normalized(library, _LETTERS).lower() != _LETTERS.lower():  # a table of replacements may hold anything
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
    """The ids of a text between those of `around`, slice by slice, until there are more than `most`. cut: see
    `cut_of`."""
    ids = [*around[0]]
    for part in slices(text, cut):
        if len(ids) > most:
            return ids
        ids += whole(library, part, False)
    return [*ids, *around[1]]


def whole(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # For one text as for many: the library's `encode` keeps all other threads waiting meanwhile.
    return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def ends(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """What encoding puts before and after every text; None where that cannot be seen."""
    found = []
    for text in ("a", "b"):
        bare, whole = (library.encode(text, add_special_tokens=special).ids for special in (False, True))
        at = next((k for k in range(len(whole)) if bare and whole[k : k + len(bare)] == bare), -1)
        found.append((whole[:at], whole[at + len(bare) :]) if at >= 0 else None)
    return found[0] if found[0] == found[1] else None


def _looks_no_further(step: Step) -> bool:
    """Whether a normalizer does the same on both sides of a cut, whatever is on the other one."""
    if step["type"] != "Replace":
        return step["type"] in _LOCAL
    pattern = step["pattern"]
    if pattern == {"Regex": " {2,}"}:
        return True
    return bool(pattern.get("String")) and not re.search(r"[A-Za-z0-9\s▁]", pattern["String"])


def _splits(step: Step, strips: bool) -> bool:
    """Whether a pre-tokenizer splits before the space, and makes of a slice's first word what it makes of one later.
    strips: the space may have gone."""
    kind = step["type"]
    if kind == "Metaspace":
        return step.get("split", True) and (not strips or step.get("prepend_scheme") == "always")
    if kind in _DROPS_SPACES:
        return True
    return not strips and (_splits_by_gpt2(step) or _splits_by_pattern(step))


def _splits_by_gpt2(step: Step) -> bool:
    return step["type"] == "ByteLevel" and step.get("use_regex", True)


def _splits_by_pattern(step: Step) -> bool:
    known = step.get("pattern", {}).get("Regex") in SPLITS_BEFORE_SPACES
    how = step.get("behavior"), step.get("invert")
    return step["type"] == "Split" and known and how in (("Isolated", False), ("Removed", True))


def _is_local(step: Mapping[str, Any]) -> bool:
    """Whether a later pre-tokenizer treats a piece alike wherever it stands."""
    return step["type"] in _LATER or (step["type"] == "Metaspace" and step.get("prepend_scheme") == "always")
