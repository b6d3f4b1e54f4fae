"""Text to ids and ids to text, the same for every source of a vocabulary.

Encoding uses the `tokenizers` library in separate processes (tokenizer_process.py), since the files that it reads are
untrusted. Decoding is implemented here: each token maps to bytes, the bytes of all tokens are joined, and UTF-8 is
decoded once, with U+FFFD for invalid sequences. So the text of a stream, the bytes in log-probabilities and the text of
a whole choice always agree. For ids that form valid text, the result equals that of the library's decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.errors import InvalidRequest, UnsupportedModel
from kvasir.text.byte_level import bytes_of
from kvasir.text.encoder import Encoder, Spans, Texts
from kvasir.text.special_tokens import SpecialTokens, is_plain_text
from kvasir.text.table import Table

if TYPE_CHECKING:
    import tokenizers

    from kvasir.text.sandbox import Hold

_SPACE = "▁"  # U+2581, SentencePiece's visible space


class Tokenizer:
    """Immutable and thread-safe."""

    def __init__(self, table: Table, encoder: Encoder):
        self.table = table
        self.encoder = encoder  # turns texts into ids
        self._special = table.special
        self.strips_leading_space = table.strips_leading_space
        self._added = {token.id: token.content for token in table.added}
        self.special_ids = frozenset(token.id for token in table.added if token.special)
        self.added_tokens = tuple((token.content, token.id, token.special) for token in table.added)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        around = table.around
        self.add_bos = bool(around) and around[0] == self.bos_id
        self.add_eos = bool(around) and around[-1] in self.eos_ids and len(around) > self.add_bos

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder, in separate processes. Raises `ModelFileError` if it has none, or a
        malformed one, or one that exceeds a limit."""
        from kvasir.text.tokenizer_process import folder_pool

        pool = folder_pool(Path(folder))
        return cls(pool.table, pool)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer in a GGUF's metadata, in separate processes. Raises `ModelFileError`, or `UnsupportedModel` for
        an unknown kind."""
        from kvasir.text.tokenizer_process import gguf_pool

        pool = gguf_pool(metadata)
        return cls(pool.table, pool)

    @classmethod
    def in_process(cls, backend: tokenizers.Tokenizer, special: SpecialTokens = SpecialTokens()) -> Tokenizer:
        """A tokenizer over a `backend` that this process made and trusts: for tests and tools. Takes ownership of
        `backend`."""
        from kvasir.text.backend import Backend

        local = Backend(backend, special)
        return cls(local.table(), local)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        foreign: Spans = (),
        blocked: Collection[int] = (),
    ) -> list[int]:
        """The ids of `text`.

        `add_special_tokens` adds the tokens before and after the text that the tokenizer asks for; a rendered chat
        template already contains them, so pass False there. `parse_special` finds special tokens in the text; with
        False, `<|im_end|>` is encoded as ordinary tokens. `foreign` are parts of the text ([start, end) of characters,
        ascending and disjoint) that may produce no special token, none of the `blocked` ids (see `control_ids`), and no
        added token that the rest of the text produces: these are encoded as ordinary tokens.

        Raises `InvalidRequest` for text that is not valid Unicode (lone surrogates) or with which the tokenizer exceeds
        its limits, and `QueueFull`.
        """
        spans = [foreign] if foreign and parse_special else ()
        return self.encode_many([text], add_special_tokens, parse_special, spans, blocked=blocked)[0]

    def encode_many(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        parse_special: bool = True,
        foreign: Sequence[Spans] = (),
        hold: Hold | None = None,
        blocked: Collection[int] = (),
        most: int = 0,
    ) -> list[list[int]]:
        """Like `encode`, for several texts at once. foreign: the spans of each text. hold: can end the job early.

        most: if above 0 and a text has more ids, only the first ids are guaranteed, and more than `most` of them.
        """
        for text in texts:
            _check_unicode(text)
        job = Texts(texts, add_special_tokens, parse_special, foreign, sorted(blocked), most)
        return self.encoder.encode(job, hold)

    def control_ids(self, source: str) -> frozenset[int]:
        """All special tokens, and the added tokens that a chat template writes, whatever their flag."""
        named = (i for text, i, _ in self.added_tokens if text in source and not is_plain_text(text))
        return self.special_ids | frozenset(named)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token add no text, invalid UTF-8 becomes U+FFFD."""
        skip = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skip])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens; a model's logits may have more columns."""
        return self.table.size

    @property
    def bos_id(self) -> int | None:
        return self._special.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a generation, the tokenizer's own end-of-text id first."""
        return self._special.eos_ids

    @property
    def pad_id(self) -> int | None:
        return self._special.pad_id

    @property
    def unk_id(self) -> int | None:
        return self._special.unk_id

    @property
    def fim_ids(self) -> Mapping[str, int]:
        """The fill-in-the-middle ids that the file states, by role; see text/fim.py."""
        return self._special.fim

    @property
    def pair(self) -> tuple[list[int], list[int], list[int]]:
        """The ids before, between and after the two texts of a pair."""
        return self.table.pair

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts by the names that chat templates use: `bos_token`, `eos_token`, `pad_token`, ..."""
        return self._special.names

    def id_to_token(self, token_id: int) -> str | None:
        """The token as spelled in the vocabulary (`Ġthe`, `▁the`, `<0x0A>`); None for an id without a token."""
        return self.table.tokens[token_id] if 0 <= token_id < len(self.table.tokens) else None

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.table.tokens) if token is not None} | self.table.other_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text: part of a character, or several characters; b"" for an id
        without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            data = b"" if token is None else self._token_to_bytes(token_id, token)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for incomplete characters. Returns the same object each time, since
        log-probabilities contain many tokens."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def speller(self, hidden: Mapping[str, int]) -> Speller:
        """A speller that encodes text as in the middle of a longer text, without the `hidden` tokens. Raises
        `UnsupportedModel` if tokens do not map to bytes of their own, as in WordPiece."""
        if self.table.form == "library":
            problem = "its tokens have no bytes of their own"
            raise UnsupportedModel(f"this model's tokenizer does not support grammars: {problem}")
        return Speller(self.encoder, hidden)

    def close(self) -> None:
        """End the processes; a later encoding starts new ones."""
        self.encoder.close()

    def _token_to_bytes(self, token_id: int, token: str) -> bytes:
        if self.table.form == "byte_level":
            return token.encode() if token_id in self._added else bytes_of(token)
        if self.table.form == "sentencepiece":
            byte = None if token_id in self._added else byte_token(token)
            return token.replace(_SPACE, " ").encode() if byte is None else byte
        return self.table.id_bytes[token_id]


class Speller:
    """Immutable and thread-safe. hidden: ids by their texts; text that looks like one of them is encoded with other
    tokens."""

    def __init__(self, encoder: Encoder, hidden: Mapping[str, int]):
        self._encoder, self._hidden = encoder, hidden
        self("")  # fail early if the tokenizer cannot spell

    def __call__(self, text: str) -> list[int]:
        return self._encoder.spell(self._hidden, [text])[0]


def byte_token(token: str) -> bytes | None:
    """The byte of a token like `<0x0A>`; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from error
