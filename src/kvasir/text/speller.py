"""Encodes text as in the middle of a longer text, with some tokens hidden: no text is encoded with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvasir.text.library import library_errors
from kvasir.text.parts import normalized, prepends
from kvasir.text.special_tokens import HIDDEN


class LibrarySpeller:
    """Thread-safe. Shares the model of its `backend` tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: Mapping[str, int]):
        """hidden: ids by their texts; text that looks like one of them is encoded with other tokens."""
        normalizer, pre_tokenizer = _in_the_midst(backend.normalizer), _in_the_midst(backend.pre_tokenizer)
        kept = _as_it_is(normalizer) if normalizer else None
        with library_errors("the tokenizer cannot encode"):
            self._usual = self._made(backend, hidden, normalizer, pre_tokenizer)
            # Text that a normalizer would change is encoded without it.
            self._exact = self._usual if kept == normalizer else self._made(backend, hidden, kept, pre_tokenizer)
        # Most vocabularies keep such tokens outside their model; a model that contains them may use them.
        self._texts = {i: text for text, i in hidden.items() if len(text) > 1}

    def __call__(self, text: str) -> list[int]:
        with library_errors("the tokenizer failed on a text"):
            changed = self._exact is not self._usual and normalized(self._usual, text) != normalized(self._exact, text)
            ids = (self._exact if changed else self._usual).encode(text, add_special_tokens=False).ids
        if self._texts.keys().isdisjoint(ids):
            return ids
        pieces = ((self._texts[i][:1], self._texts[i][1:]) if i in self._texts else i for i in ids)
        return [i for p in pieces for i in ([p] if isinstance(p, int) else [*self(p[0]), *self(p[1])])]

    def _made(self, backend: tokenizers.Tokenizer, hidden: Mapping[str, int], *parts: Any) -> tokenizers.Tokenizer:
        """parts: a normalizer and a pre-tokenizer, in JSON."""
        model = {"type": "BPE", "vocab": {}, "merges": []}
        empty = {"version": "1.0", "added_tokens": [], "post_processor": None, "decoder": None, "model": model}
        made = tokenizers.Tokenizer.from_str(json.dumps({**empty, "normalizer": parts[0], "pre_tokenizer": parts[1]}))
        made.model = backend.model
        made.add_tokens(_added(made, backend, hidden))
        return made


def _added(
    made: tokenizers.Tokenizer, backend: tokenizers.Tokenizer, hidden: Mapping[str, int]
) -> list[tokenizers.AddedToken]:
    """In order of id, since a token that is not in the model gets the next free id."""
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items(), key=lambda item: item[0])]
    lacks = made.token_to_id
    return [
        tokenizers.AddedToken(HIDDEN + token.content, normalized=False) if token.content in hidden else token
        for token in added
        if token.content not in hidden or lacks(token.content) is None
    ]


def _as_it_is(component: dict[str, Any]) -> dict[str, Any] | None:
    """Only the components of a normalizer that change the notation of characters: spaces, or bytes as letters."""
    if component["type"] == "Sequence":
        kept = [one for inner in component["normalizers"] if (one := _as_it_is(inner))]
        return component | {"normalizers": kept} if kept else None
    spaces = component["type"] == "Replace" and component["pattern"] == {"String": " "}
    return component if spaces or component["type"] == "ByteLevel" else None


def _in_the_midst(part: Any) -> Any:
    """A normalizer or pre-tokenizer in JSON, without the components that add a space before the first word."""
    return _without_space(json.loads(part.__getstate__())) if part is not None else None


def _without_space(component: dict[str, Any]) -> dict[str, Any] | None:
    if prepends(component):
        return None
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "ByteLevel" and "add_prefix_space" in component:
        return component | {"add_prefix_space": False}
    for name in ("normalizers", "pretokenizers"):
        if name in component:
            return component | {name: [kept for inner in component[name] if (kept := _without_space(inner))]}
    return component
