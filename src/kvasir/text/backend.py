"""The half of a tokenizer that uses the `tokenizers` library: it reads model files and encodes text.

It runs in a separate process (tokenizer_worker.py). Only tests and tools use it in the calling process, on files that
they made themselves: on a hostile file the library may hang, crash or allocate any amount of memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import tokenizers

from kvasir.errors import ModelFileError
from kvasir.text import bounds
from kvasir.text.encoder import Texts
from kvasir.text.library import library_errors
from kvasir.text.provenance import Guard
from kvasir.text.slices import cut_of, encoded, ends, whole
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.speller import LibrarySpeller
from kvasir.text.table import MAX_IDS, AddedToken, Table

if TYPE_CHECKING:
    from kvasir.text.sandbox import Hold

_SPACE = "▁"  # U+2581, SentencePiece's visible space


class Backend:
    """An `Encoder` (see encoder.py). Immutable and thread-safe."""

    def __init__(self, library: tokenizers.Tokenizer, special: SpecialTokens):
        """Takes ownership of `library`."""
        self.library = library
        self.special = special
        with library_errors("the tokenizer cannot be used"):
            self.plain = _without_special_tokens(library)
        self._spellers: dict[tuple[tuple[str, int], ...], LibrarySpeller] = {}

    def encode(self, job: Texts, hold: Hold | None = None) -> list[list[int]]:
        """The ids of each text."""
        special, most = job.add_special_tokens, job.most if self._sliced else 0
        with library_errors("the tokenizer failed on a text"):
            if any(job.foreign) and job.parse_special:
                each = zip(job.texts, job.foreign, strict=True)
                return [self._guard.encode(text, spans, job.blocked, special, most) for text, spans in each]
            backend = self.library if job.parse_special else self.plain
            if most and self._sliced:
                cut, both = self._sliced
                around = both if special else ([], [])
                return [encoded(backend, text, most, cut, around) for text in job.texts]
            return [whole(backend, text, special) for text in job.texts]

    @cached_property
    def _sliced(self) -> tuple[re.Pattern[str], tuple[list[int], list[int]]] | None:
        """The pattern at which a text is cut into slices, and the ids that encoding adds before and after a text; None
        where texts are not sliced."""
        cut = cut_of(self.library)
        around = ends(self.library) if cut else None
        return (cut, around) if cut and around else None

    @cached_property
    def _guard(self) -> Guard:
        return Guard(self.library)

    def spell(self, hidden: Mapping[str, int], texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text as encoded in the middle of a longer text, without any of the ids in `hidden`."""
        key = tuple(hidden.items())
        speller = self._spellers.get(key)
        if speller is None:
            self._spellers.clear()  # an engine has one vocabulary for grammars
            speller = self._spellers[key] = LibrarySpeller(self.library, hidden)
        return [speller(text) for text in texts]

    def close(self) -> None:
        """Does nothing: there is no process to end."""

    def table(self) -> Table:
        """Everything that decoding needs. Raises ModelFileError if the library cannot provide it."""
        with library_errors("the tokenizer cannot be used"):
            form, strips = _decoder_form(self.library)
            tokens, other = _tokens(self.library)
            bytes_per_token = bounds.bytes_per_token(self.library, tokens)
            known = ("", 0) if bytes_per_token else bounds.known_characters(self.library, tokens)
            return Table(
                tokens=tokens,
                size=self.library.get_vocab_size(with_added_tokens=True),
                added=[_added(i, token) for i, token in self.library.get_added_tokens_decoder().items()],
                special=self.special,
                form=form,
                strips_leading_space=strips,
                around=self.library.encode("").ids,
                bytes_per_token=bytes_per_token,
                known=known[0],
                chars_per_token=known[1],
                sliced=self._sliced is not None,
                other_ids=other,
                id_bytes=_id_bytes(self.library, tokens) if form == "library" else [],
                pair=_pair(self.library),
            ).check()


def _pair(library: tokenizers.Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """The ids that encoding adds before, between and after two texts."""
    found = library.encode("a", "a")
    sides = found.sequence_ids
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, (token, side) in enumerate(zip(found.ids, sides, strict=True)):
        if side is None:
            parts[0 if not any(s is not None for s in sides[:i]) else 1 if 1 not in sides[:i] else 2].append(token)
    return parts


def _added(id: int, token: tokenizers.AddedToken) -> AddedToken:
    return AddedToken(id, token.content, token.special, token.lstrip, token.rstrip, token.single_word, token.normalized)


def _tokens(library: tokenizers.Tokenizer) -> tuple[list[str | None], dict[str, int]]:
    """The spelling of each id, and the ids of spellings that are not the spelling of their id."""
    vocabulary = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder()
    count = max((*vocabulary.values(), *added, -1)) + 1
    if count > MAX_IDS:
        raise ModelFileError(f"the tokenizer has the id {count - 1}", f"expected at most {MAX_IDS - 1}")
    tokens: list[str | None] = [None] * count
    for token, i in vocabulary.items():
        tokens[i] = token
    for i, token in added.items():  # for some tokens the library returns the normalized form
        tokens[i] = token.content
    other = {token: i for token, i in vocabulary.items() if tokens[i] != token or library.token_to_id(token) != i}
    return tokens, {token: i for token in other if (i := library.token_to_id(token)) is not None}


def _id_bytes(library: tokenizers.Tokenizer, tokens: Sequence[str | None]) -> list[bytes]:
    """The bytes that the library's decoder adds for each token when it follows another token."""
    added = library.get_added_tokens_decoder()
    ordinary = (i for i, token in enumerate(tokens) if i not in added and token is not None)
    texts = ((i, library.decode([i], skip_special_tokens=False)) for i in ordinary)
    anchor, before = next(((i, text) for i, text in texts if text.isalnum()), (0, ""))

    def appended(i: int) -> bytes:
        return library.decode([anchor, i], skip_special_tokens=False).removeprefix(before).encode()

    return [b"" if token is None else appended(i) for i, token in enumerate(tokens)]


def _without_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second tokenizer with the same model that encodes special tokens in a text as ordinary characters.

    The setting belongs to the tokenizer object, not to a call, so one object could not serve two threads.
    """
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(plain, part, value)
    # In order of id, since a token that is not in the model gets the next free id; in runs, since the time of each
    # call is proportional to the number of tokens added so far.
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items(), key=lambda item: item[0])]
    for special, run in groupby(added, key=lambda token: token.special):
        (plain.add_special_tokens if special else plain.add_tokens)(list(run))
    plain.encode_special_tokens = True
    return plain


def _decoder_form(backend: tokenizers.Tokenizer) -> tuple[str, bool]:
    """How tokens map to bytes, and whether decoding removes the space that encoding put before the text.

    "byte_level": GPT-2's byte letters; "sentencepiece": `▁` for spaces and `<0xAB>` for bytes; "library": anything
    else, decoded token by token by the library.
    """
    decoders = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    decoders = decoders.get("decoders", [decoders])
    kinds = [decoder.get("type") for decoder in decoders]
    if "ByteLevel" in kinds:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        return "sentencepiece", decoders[0].get("prepend_scheme") != "never"
    spaces = [s for s in decoders if s.get("type") == "Replace" and s.get("content") == " "]
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if len(spaces) == 1 and spaces[0].get("pattern") == {"String": _SPACE} and set(kinds) <= known:
        return "sentencepiece", any(s.get("type") == "Strip" and s.get("start") for s in decoders)
    return "library", "WordPiece" in kinds
