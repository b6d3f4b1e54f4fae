"""The facts that a tokenizer's worker reports: everything that decoding and the routes need, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.errors import ModelFileError
from kvasir.text.special_tokens import SpecialTokens

MAX_IDS = 1 << 22  # the largest vocabularies in use have about 260,000
_COUNTED_AT_ONCE = 1 << 16  # characters
FORMS = ("byte_level", "sentencepiece", "library")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before the model splits it. special: a marker, not text.

    The flags are the library's: lstrip and rstrip take adjacent white space too, single_word matches whole words only,
    normalized matches after normalization.
    """

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Plain facts of one tokenizer.

    tokens: the spelling of each id, None for an id without a token. size: the number of ids with a token. other_ids:
    ids of further spellings (those that share an id). form: how a token maps to bytes (see `backend._decoder_form`).
    id_bytes: the bytes of each id, for the form "library". around: the ids that encoding adds around an empty text.
    bytes_per_token: a text of N bytes has at least N / bytes_per_token tokens; 0 if unknown. Then a text with N of the
    `known` characters has at least N / chars_per_token tokens; 0 if that is unknown too. sliced: long texts are
    tokenized in slices, see slices.py. pair: the ids that encoding a pair of texts adds before the first, between the
    two, and after the second.
    """

    tokens: list[str | None]
    size: int
    added: list[AddedToken]
    special: SpecialTokens
    form: str
    strips_leading_space: bool
    around: list[int]
    bytes_per_token: int = 0
    known: str = ""
    chars_per_token: int = 0
    sliced: bool = False
    other_ids: dict[str, int] = field(default_factory=dict)
    id_bytes: list[bytes] = field(default_factory=list)
    pair: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))

    def fewest_tokens(self, text: str, enough: int) -> int:
        """A lower bound for the number of tokens of the text, from its known characters; counting may stop once the
        bound is above `enough`."""
        known, count = frozenset(self.known), 0
        for start in range(0, len(text) if self.chars_per_token else 0, _COUNTED_AT_ONCE):
            part = text[start : start + _COUNTED_AT_ONCE]
            count += sum(map(part.count, known.intersection(part)))
            if count > enough * self.chars_per_token:
                break
        return -(-count // self.chars_per_token) if count else 0

    def check(self) -> Table:
        """Returns itself. Raises ModelFileError for inconsistent values."""
        count = len(self.tokens)
        named = [
            *(token.id for token in self.added),
            *self.other_ids.values(),
            *(i for part in self.pair for i in part),
        ]
        if count > MAX_IDS or self.form not in FORMS or min(self.bytes_per_token, self.chars_per_token) < 0:
            raise ModelFileError(f"the tokenizer has {count} ids of the form {self.form!r:.40}")
        if (
            not all(0 <= i < count for i in named)
            or len(self.id_bytes) not in (0, count)
            or not 0 <= self.size <= count
        ):
            raise ModelFileError("the tokenizer names ids that it does not have")
        return self
