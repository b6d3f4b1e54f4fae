"""Texts as id sequences for samplers: forbidden words, and breakers of repetitions."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvasir.errors import InvalidRequest
from kvasir.text.tokenizer import Tokenizer

MAX_TAIL = 20  # ids after a breaker's first token; longer sequences are truncated, as in llama.cpp
MAX_BREAKER_SEQUENCES = 4096
_BETWEEN = b"\xff"  # does not occur in UTF-8


def bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of each word at the start of a text and, if different, after a space. vLLM omits the latter if the number
    of ids differs, and so allows ` time` when `time` is forbidden. Raises InvalidRequest for a word without tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (tuple(tokenizer.encode(s + word.lstrip(), add_special_tokens=False)) for s in ("", " "))
        if not bare:
            raise InvalidRequest(f"{word!r} has no tokens", "leave it out", param="bad_words")
        found[bare] = None
        if spaced[-len(bare) :] != bare:
            found[spaced] = None
    return tuple(found)


class Breakers:
    """Finds the tokens that contain a text or end with its beginning: llama.cpp's `get_overlapping_token_sequences`.

    The bytes of all tokens are joined into one string, so that one string search covers all tokens. Built once, which
    takes as long as processing some 100,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._text = _BETWEEN.join(pieces) + _BETWEEN
        self._ends = array("i", accumulate(len(s) + 1 for s in pieces))  # positions after each separator

    def of(self, breakers: Sequence[str]) -> tuple[bytes, tuple[tuple[int, ...], ...]]:
        """(bit mask of the tokens that contain a breaker: int32 words, bit i & 31 of word i >> 5 for token i; longer
        sequences: a token that ends with the beginning of a breaker, then the ids of the rest). Raises InvalidRequest
        if there are more than MAX_BREAKER_SEQUENCES."""
        words = array("i", bytes(-(-len(self._ends) // 32) * 4))
        bits = memoryview(words).cast("B")
        alone: set[int] = set()
        sequences: dict[tuple[int, ...], None] = {}
        for breaker in breakers:
            whole = breaker.encode()
            holding = set(self._holding(whole))
            alone |= holding
            for length, tail in self._tails(breaker):
                for token in self._ending(whole[:length]):
                    if token not in holding:
                        sequences[token, *tail] = None
            if len(sequences) > MAX_BREAKER_SEQUENCES:
                raise InvalidRequest(
                    f"{breaker!r} begins with more than {MAX_BREAKER_SEQUENCES} tokens", "give a shorter breaker",
                    param="dry_sequence_breakers",
                )  # fmt: skip
        for token in alone:
            bits[token >> 3] |= 1 << (token & 7)
        return words.tobytes(), tuple(sequences)

    def _tails(self, breaker: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(number of bytes of a beginning, ids of the rest), split between characters."""
        for i in range(1, len(breaker)):
            tail = self._tokenizer.encode(breaker[i:], add_special_tokens=False, parse_special=False)
            yield len(breaker[:i].encode()), tuple(tail[:MAX_TAIL])

    def _holding(self, part: bytes) -> Iterator[int]:
        at = self._text.find(part)
        while at >= 0:
            token = bisect_right(self._ends, at)
            yield token
            at = self._text.find(part, self._ends[token])

    def _ending(self, part: bytes) -> Iterator[int]:
        at = self._text.find(part + _BETWEEN)
        while at >= 0:
            token = bisect_right(self._ends, at)
            if at + len(part) + 1 == self._ends[token]:
                yield token
            at = self._text.find(part + _BETWEEN, at + 1)
