"""The facts that grammars need about a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvasir.errors import InvalidRequest, UnsupportedModel
from kvasir.guided.numbers import NumberLimits
from kvasir.guided.spelling import Pieces
from kvasir.text.special_tokens import HIDDEN
from kvasir.text.tokenizer import Speller, Tokenizer

REMEMBERED_TEXTS, REMEMBERED_CHARS = 4096, 256  # cached texts, and the longest of them; some MB at most


@dataclass(frozen=True)
class Vocabulary:
    """size: columns of the logits. eos_ids: ids that end a choice."""

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...] = ()

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each id; b"" for an id without a token. Special tokens get names that no grammar contains by
        chance. Raises UnsupportedModel if no grammar can be followed."""
        if self.tokenizer.vocab_size > self.size:
            problem = f"it has {self.tokenizer.vocab_size} tokens, and the model {self.size} ids"
            raise UnsupportedModel(f"this model's tokenizer does not support grammars: {problem}")
        tokens = [self.tokenizer.token_bytes(i) for i in range(self.size)]
        for text, i in self.hidden.items():
            tokens[i] = f"{HIDDEN}{text}".encode()
        return tokens

    @cached_property
    def hidden(self) -> dict[str, int]:
        """Ids by text of all tokens that are not text to a grammar."""
        return self.specials | {text: i for text, i, _ in self.tokenizer.added_tokens if text in self.ends}

    @cached_property
    def spell(self) -> Speller:
        """Spells a text in text tokens, even if it looks like a special token. Raises UnsupportedModel if tokens have
        no bytes of their own."""
        return self.tokenizer.speller(self.hidden)

    def ids(self, text: str) -> list[int]:
        """The ids of a text, including special tokens. Raises InvalidRequest if no ids spell it."""
        pieces = self._pieces.split(text) if self.specials else [text]
        return [i for p in pieces if p for i in ([self.specials[p]] if p in self.specials else self.spelt_as(p))]

    def spelt_as(self, text: str) -> list[int]:
        """Ids that give exactly this text: the tokenizer's, unless it normalizes the text first. Raises InvalidRequest
        if no ids spell it."""
        return list(self._remembered(text) if len(text) <= REMEMBERED_CHARS else self._encoded(text))

    @cached_property
    def _remembered(self) -> Callable[[str], tuple[int, ...]]:
        # The tokenizer is a separate process, and masks need the same few pieces of JSON again and again.
        return lru_cache(REMEMBERED_TEXTS)(self._encoded)

    def _encoded(self, text: str) -> tuple[int, ...]:
        ids, data = self.spell(text), text.encode()
        if b"".join(map(self.tokenizer.token_bytes, ids)) == data:
            return tuple(ids)
        found = self._bytewise.spell(data)
        if found is None:
            raise InvalidRequest(f"this model has no tokens for {text[:80]!r}", "use other text")
        return tuple(found)

    @cached_property
    def _bytewise(self) -> Pieces:
        return Pieces([self.tokenizer.token_bytes(i) for i in range(self.size)], [*self.hidden.values(), *self.eos_ids])

    @cached_property
    def _pieces(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, self.specials))})")

    @cached_property
    def spellings(self) -> tuple[tuple[int, bytes], ...]:
        """All ids that stand for bytes, with their bytes."""
        return tuple((i, data) for i in range(self.size) if (data := self.tokenizer.token_bytes(i)))

    @cached_property
    def numbers(self) -> NumberLimits:
        return NumberLimits(self.spellings, self.tokenizer.token_bytes)

    @cached_property
    def _containing(self) -> dict[frozenset[int], tuple[tuple[int, bytes], ...]]:
        return {}

    def containing(self, some: frozenset[int]) -> tuple[tuple[int, bytes], ...]:
        """The entries of `spellings` that have one of these bytes; cached, since the first call takes a moment."""
        if some not in self._containing:
            self._containing[some] = tuple((i, data) for i, data in self.spellings if not some.isdisjoint(data))
        return self._containing[some]

    @cached_property
    def ends(self) -> frozenset[str]:
        """Texts of the tokens that end a choice."""
        return frozenset(text for text, i, _ in self.tokenizer.added_tokens if i in self.eos_ids)

    @cached_property
    def specials(self) -> dict[str, int]:
        """Ids by text of the tokens that are not text to a grammar, except tokens that end a choice.

        llguidance treats special tokens as such, and added tokens that look like <tags>."""
        return {
            text: i
            for text, i, special in self.tokenizer.added_tokens
            if i not in self.eos_ids and (special or (text.startswith("<") and text.endswith(">")))
        }
