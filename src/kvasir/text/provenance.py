"""Encoding a prompt whose parts come partly from outside: these parts may not produce control tokens.

Only the template produces control tokens: all characters of a control token belong to the template. Text elsewhere that
looks like a control token, that would become one after the tokenizer's normalization, or that begins in a message and
ends in the template, is encoded as ordinary tokens. A prompt without such text has the same ids as with plain encoding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import tokenizers

from kvasir.errors import InvalidRequest
from kvasir.text.library import library_errors
from kvasir.text.slices import cut_of, encoded, whole
from kvasir.text.special_tokens import is_plain_text
from kvasir.text.speller import LibrarySpeller

Foreign = Sequence[tuple[int, int]]  # [start, end) of characters, ascending and disjoint

_VARIANTS_KEPT = 8
_SHIELDS = range(0x10FFFD, 0x10FF00, -1)  # private-use characters
_NO_CHARACTER = chr(0x10FFFF)
_LETTERS = range(0x4E00, 0x9FA5)
_SIGNS = range(0x3001, 0x3020)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A text in which each foreign part is reduced to neutral stand-ins for its first and last character.

    own: the template's parts, as (start in the skeleton, start in the text, length).
    """

    text: str
    own: tuple[tuple[int, int, int], ...]

    def place(self, start: int, end: int) -> int | None:
        """Where the skeleton's [start, end) begins in the text; None if part of it is not the template's."""
        at = bisect_right(self.own, start, key=lambda part: part[0]) - 1
        if at < 0:
            return None
        here, there, length = self.own[at]
        return there + start - here if end <= here + length else None


class Guard:
    """Immutable and thread-safe. Shares the model of its `backend` tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._words = frozenset(i for i, t in self._added.items() if not t.special and is_plain_text(t.content))
        contents = {token.content for token in self._added.values()}
        letters = set("".join(contents))
        self._letter, self._sign = (next(chr(c) for c in pool if chr(c) not in letters) for pool in (_LETTERS, _SIGNS))
        self._overlap = _overlap(contents)
        self._unknown = _unknown(backend)
        self._cut = cut_of(backend)
        self._variant = lru_cache(_VARIANTS_KEPT)(self._make_variant)

    def encode(
        self, text: str, foreign: Foreign, blocked: Collection[int], add_special_tokens: bool, most: int = 0
    ) -> list[int]:
        """The ids of `text`. Its `foreign` parts produce no special token, none of the `blocked` ids, and no added
        token that the other parts produce, except plain text. most: if above 0 and the tokenizer has a `cut_of`,
        encoding may stop at any point after `most` ids. Raises InvalidRequest for a text that cannot be encoded in this
        way."""
        around = self._ends(add_special_tokens)
        written = self._written(self._skeleton(text, foreign))
        control = self._special.union(blocked, (i for _, i in written)) - self._words
        places = [(place, i) for place, i in written if i in control]
        plain = encoded(self._backend, text, most, self._cut, around) if most and self._cut else []
        if len(plain) > most:
            ids = self._shielded(text, places, control, most)
            if len(ids) > most:  # too many in either case
                return ids
        if not most or len(plain) > most:
            plain = whole(self._backend, text, add_special_tokens)
        expected = Counter((*(i for _, i in places), *(i for i in (*around[0], *around[1]) if i in control)))
        if not self._overlap and expected == Counter(i for i in plain if i in control):
            return plain
        return [*around[0], *self._shielded(text, places, control), *around[1]]

    def _skeleton(self, text: str, foreign: Foreign) -> Skeleton:
        pieces, own, here, there = [], [], 0, 0
        for start, end in (*foreign, (len(text), len(text))):
            if there < start:
                own.append((here, there, start - there))
            piece = text[there:start] + self._stand_in(text[start:end])
            pieces.append(piece)
            here, there = here + len(piece), end
        return Skeleton("".join(pieces), tuple(own))

    def _stand_in(self, text: str) -> str:
        ends = text if len(text) < 2 else text[0] + text[-1]
        return "".join([c if c.isspace() else self._letter if _in_word(c) else self._sign for c in ends])

    def _written(self, skeleton: Skeleton) -> list[tuple[int, int]]:
        """The added tokens that lie entirely in the template's parts: (place in the text, id)."""
        encoding = self._backend.encode_batch([skeleton.text], add_special_tokens=False)[0]
        found = []
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if i not in self._added:
                continue
            start, end = _without_margins(skeleton.text, start, end, self._added[i].content)
            place = skeleton.place(start, end)
            if place is not None:
                found.append((place, i))
        return found

    def _ends(self, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """The ids that encoding adds before and after a text."""
        if not add_special_tokens:
            return [], []
        bare, whole = (self._backend.encode(self._letter, add_special_tokens=special).ids for special in (False, True))
        start = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
        return whole[:start], whole[start + len(bare) :]

    def _shielded(self, text: str, places: list[tuple[int, int]], control: frozenset[int], most: int = 0) -> list[int]:
        """The ids with control tokens only at these places: a shield character is inserted before each place, and a
        variant of the tokenizer knows the control tokens only with their shields. most: as in `encode`."""
        shield = next((chr(c) for c in _SHIELDS if chr(c) not in text), None)
        if shield is None:
            raise InvalidRequest("the messages use every private-use character", "leave them out", "messages")
        variant, names, spell = self._variant(shield, control)
        cuts = [0, *(place for place, _ in places), len(text)]
        shielded = shield.join([text[a:b] for a, b in pairwise(cuts)])
        cut = cut_of(variant) if most else None
        ids = encoded(variant, shielded, most, cut) if cut else whole(variant, shielded, False)
        found = [names[i] for i in ids if i in names]
        if found != [i for _, i in places[: len(found) if cut and len(ids) > most else None]]:
            raise InvalidRequest(
                "the messages hold control tokens that this model's tokenizer cannot encode as plain text",
                "leave them out", param="messages",
            )  # fmt: skip
        to_spell = control - self._unknown  # a character unknown to the model stays unknown
        parts: Iterable[Sequence[int]] = (
            (names[i],) if i in names else spell(self._added[i].content) if i in to_spell else (i,) for i in ids
        )
        return [i for part in parts for i in part]

    def _make_variant(
        self, shield: str, control: frozenset[int]
    ) -> tuple[tokenizers.Tokenizer, dict[int, int], LibrarySpeller]:
        """The tokenizer variant, a map from its ids of shielded tokens to the original ids, and the speller for control
        tokens that the model itself would use."""
        variant = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(variant, part, value)
        shielded = {i: _with_content(self._added[i], shield + self._added[i].content) for i in control}
        # In order of id, since a token that is not in the model gets the next free id.
        lacked = {i for i in control if variant.token_to_id(self._added[i].content) is None}
        variant.add_tokens(
            [shielded[i] if i in lacked else t for i, t in self._added.items() if i not in control - lacked]
        )
        variant.add_tokens([shielded[i] for i in sorted(control - lacked)])
        names = {variant.token_to_id(token.content) or 0: i for i, token in shielded.items()}
        with library_errors("the tokenizer cannot encode"):
            spell = LibrarySpeller(self._backend, {self._added[i].content: i for i in control - self._unknown})
        return variant, names, spell


@cache
def _single_word() -> tokenizers.Tokenizer:
    """A tokenizer of one added token, "[", which is found where it is a word of its own."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.add_special_tokens([tokenizers.AddedToken("[", single_word=True)])
    return library


def _in_word(character: str) -> bool:
    """Whether the library finds no single-word token next to this character. Its words also have marks and letters in
    circles."""
    if character.isascii():
        return character.isalnum() or character == "_"
    return not _single_word().encode(f"{character}[").ids


def _unknown(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids that the model gives for an unknown character; empty if it knows every character, or drops unknown
    ones."""
    try:
        return frozenset(token.id for token in backend.model.tokenize(_NO_CHARACTER))
    except Exception:  # a model may have no such token
        return frozenset()


def _overlap(contents: Collection[str]) -> bool:
    """Whether the end of one content is the beginning of another, so that one token can hide the other."""
    contents = [text for text in contents if text.strip()]
    starts = {text[:k] for text in contents for k in range(1, len(text))}
    return any(text[k:] in starts for text in contents for k in range(1, len(text)))


def _without_margins(text: str, start: int, end: int, content: str) -> tuple[int, int]:
    """The position of a token's own text within the span that it took: some tokens take surrounding white space too."""
    taken = text[start:end]
    at = taken.find(content)
    if at >= 0:
        return start + at, start + at + len(content)
    return start + len(taken) - len(taken.lstrip()), end - len(taken) + len(taken.rstrip())


def _with_content(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
