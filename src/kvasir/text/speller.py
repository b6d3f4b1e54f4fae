"""Text to ids as it stands in the midst of a longer one, with some tokens hidden: no text is spelt by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvasir.text.library import library_errors
from kvasir.text.special_tokens import HIDDEN


class LibrarySpeller:
    """Safe to use from several threads. Shares the model of the tokenizer it is made of."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: Mapping[str, int]):
        """hidden: ids by their texts; what looks like one of them is spelt in other tokens."""
        parts = {"normalizer": _in_the_midst(backend.normalizer), "pre_tokenizer": _in_the_midst(backend.pre_tokenizer)}
        model = {"type": "BPE", "vocab": {}, "merges": []}
        empty = {"version": "1.0", "added_tokens": [], "post_processor": None, "decoder": None, "model": model}
        with library_errors("the tokenizer cannot spell"):
            self._backend = tokenizers.Tokenizer.from_str(json.dumps(empty | parts))
            self._backend.model = backend.model
            self._backend.add_tokens(self._added(backend, hidden))
        # Most vocabularies keep such tokens apart from their model; where it has them itself, it may use them.
        self._texts = {i: text for text, i in hidden.items() if len(text) > 1}

    def __call__(self, text: str) -> list[int]:
        with library_errors("the tokenizer failed on a text"):
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._texts.keys().isdisjoint(ids):
            return ids
        pieces = ((self._texts[i][:1], self._texts[i][1:]) if i in self._texts else i for i in ids)
        return [i for p in pieces for i in ([p] if isinstance(p, int) else [*self(p[0]), *self(p[1])])]

    def _added(self, backend: tokenizers.Tokenizer, hidden: Mapping[str, int]) -> list[tokenizers.AddedToken]:
        """In the order of their ids, since one that the model lacks gets the next that is free."""
        added = [token for _, token in sorted(backend.get_added_tokens_decoder().items(), key=lambda item: item[0])]
        lacks = self._backend.token_to_id
        return [
            tokenizers.AddedToken(HIDDEN + token.content, normalized=False) if token.content in hidden else token
            for token in added
            if token.content not in hidden or lacks(token.content) is None
        ]


def _in_the_midst(part: Any) -> Any:
    """A normalizer or pre-tokenizer in JSON, without what puts a space before the first word of a text."""
    return _without_space(json.loads(part.__getstate__())) if part is not None else None


def _without_space(step: dict[str, Any]) -> dict[str, Any] | None:
    if step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if step["type"] == "ByteLevel" and "add_prefix_space" in step:
        return step | {"add_prefix_space": False}
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            return step | {name: [kept for inner in step[name] if (kept := _without_space(inner))]}
    return step
