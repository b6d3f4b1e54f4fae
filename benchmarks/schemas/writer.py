"""Checks whether a grammar accepts a value in the notation of `json.dumps`, with its keys in some order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

_TRIES = 3000  # orders of keys and spellings of one instance


class _Bytes:
    """A vocabulary of all bytes and an end token."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]  # noqa: RUF012
    eos_token_id = 256
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class Writer:
    """Checks whether a grammar accepts values."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, order: Sequence[str] = ()):
        """order: the order of keys to try first. Raises ValueError for a grammar that does not compile."""
        self._order = {key: i for i, key in enumerate(order)}
        self._start = LLMatcher(tokenizer, grammar, log_level=0)
        if self._start.is_error():
            raise ValueError(self._start.get_error())
        self._tries, self._by = 0, self._order
        self.limited = False  # whether a value reached a limit of the parser and was therefore not accepted

    def writes(self, value: Any) -> bool:
        return self._finds(value, {}) or self._finds(value, self._order)

    def _finds(self, value: Any, order: dict[str, int]) -> bool:
        self._tries, self._by = 0, order
        return any(end.is_accepting() for end in self._after(self._start, value))

    def _after(self, at: LLMatcher, value: Any) -> Iterator[LLMatcher]:
        if isinstance(value, dict):
            yield from self._keys(at, "{", value)
        elif isinstance(value, list):
            yield from self._items(at, "[", value)
        else:
            for text in _spellings(value):
                yield from self._text(at, text)

    def _text(self, at: LLMatcher, text: str) -> Iterator[LLMatcher]:
        self._tries += 1
        if self._tries > _TRIES:
            return
        after, ids = at.deep_copy(), list(text.encode())
        if after.try_consume_tokens(ids) == len(ids):
            yield after
        elif after.is_error():
            self.limited = True

    def _items(self, at: LLMatcher, lead: str, items: list[Any]) -> Iterator[LLMatcher]:
        if not items:
            yield from self._text(at, "[]" if lead == "[" else "]")
            return
        for begun in self._text(at, lead):
            for after in self._after(begun, items[0]):
                yield from self._items(after, ", ", items[1:])

    def _keys(self, at: LLMatcher, lead: str, rest: dict[str, Any]) -> Iterator[LLMatcher]:
        if not rest:
            yield from self._text(at, "{}" if lead == "{" else "}")
            return
        for key in sorted(rest, key=lambda key: self._by.get(key, len(self._by))):
            others = {k: v for k, v in rest.items() if k != key}
            for begun in self._text(at, f"{lead}{json.dumps(key, ensure_ascii=False)}: "):
                for after in self._after(begun, rest[key]):
                    yield from self._keys(after, ", ", others)


def names(schema: Any) -> Iterator[str]:
    """The names of properties, in the order of the schema."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties" and isinstance(value, dict):
                yield from value
            yield from names(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from names(one)


def _spellings(value: Any) -> list[str]:
    texts = [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, float) and value.is_integer():
        texts.append(str(int(value)))
    elif isinstance(value, int) and not isinstance(value, bool):
        texts.append(f"{value}.0")
    return texts


def bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(_Bytes(), eos_token=256)  # type: ignore[arg-type]
