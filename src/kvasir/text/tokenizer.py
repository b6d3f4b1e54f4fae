"""Text to ids and ids to text, the same for every source of a vocabulary.

Encoding is the `tokenizers` library's, which runs in processes of its own (tokenizer_process.py): the files that it
reads come from strangers. Decoding is ours: each token stands for bytes, the bytes of all tokens are joined, and UTF-8
is decoded once, an invalid sequence giving U+FFFD. So the text of a stream, the bytes of a token's log-probability and
the text of a whole answer can never disagree. On ids that stand for valid text the library's decoder gives the same.
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
    """Immutable and safe to use from several threads."""

    def __init__(self, table: Table, encoder: Encoder):
        self.table = table
        self._encoder = encoder
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
        """The tokenizer of a Hugging Face folder, in processes of its own; `ModelFileError` where there is none, or
        it is malformed or passes a limit."""
        from kvasir.text.tokenizer_process import folder_pool

        pool = folder_pool(Path(folder))
        return cls(pool.table, pool)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer in a GGUF's metadata, in processes of its own; `ModelFileError`, or `UnsupportedModel` for an
        unknown kind."""
        from kvasir.text.tokenizer_process import gguf_pool

        pool = gguf_pool(metadata)
        return cls(pool.table, pool)

    @classmethod
    def in_process(cls, backend: tokenizers.Tokenizer, special: SpecialTokens = SpecialTokens()) -> Tokenizer:
        """Over a tokenizer that this process made and trusts: for tests and tools. Takes ownership of `backend`."""
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

        `add_special_tokens` puts the first and last tokens around it that the tokenizer asks for; a rendered
        chat template has them already, so pass False there. `parse_special` finds special tokens in the
        text; with False, `<|im_end|>` is spelt out in ordinary tokens. `foreign` are parts of the text ([start, end)
        of characters, ascending and apart) that may write no special token, none of the `blocked` ids (see
        `control_ids`), and no added token that the rest of the text writes: there these are spelt out.

        Raises `InvalidRequest` for text that is not valid Unicode (lone surrogates), `SandboxLimit` for one on which
        the tokenizer passes its limits, `QueueFull`.
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
        """As `encode`, of several texts in one go. foreign: the spans of each text. hold: what can end it early.

        most: where it is above 0 and a text has more ids, those beyond it may be missing, but for one at least."""
        for text in texts:
            _check_unicode(text)
        job = Texts(texts, add_special_tokens, parse_special, foreign, sorted(blocked), most)
        return self._encoder.encode(job, hold)

    def control_ids(self, source: str) -> frozenset[int]:
        """The added tokens that a chat template writes, whatever their flag, and all special ones."""
        named = (i for text, i, _ in self.added_tokens if text in source and not is_plain_text(text))
        return self.special_ids | frozenset(named)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token give nothing, invalid UTF-8 gives U+FFFD."""
        skip = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skip])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included; a model's logits may have more columns."""
        return self.table.size

    @property
    def bos_id(self) -> int | None:
        return self._special.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a generation, the tokenizer's own end of text first."""
        return self._special.eos_ids

    @property
    def pad_id(self) -> int | None:
        return self._special.pad_id

    @property
    def unk_id(self) -> int | None:
        return self._special.unk_id

    @property
    def fim_ids(self) -> Mapping[str, int]:
        """The ids for filling in the middle that the file states by role; see text/fim.py."""
        return self._special.fim

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts by the names that chat templates use: `bos_token`, `eos_token`, `pad_token`, ..."""
        return self._special.names

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`); None for an id without one."""
        return self.table.tokens[token_id] if 0 <= token_id < len(self.table.tokens) else None

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.table.tokens) if token is not None} | self.table.other_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text: part of a character, or several; b"" for no token."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            data = b"" if token is None else self._token_to_bytes(token_id, token)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is only part of a character. The same object each time, since
        log-probabilities name many tokens."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def speller(self, hidden: Mapping[str, int]) -> Speller:
        """Spells text as it stands in the midst of a longer one, and nothing by the `hidden` tokens. Raises
        `UnsupportedModel` where tokens stand for no bytes of their own, as words' pieces do (WordPiece)."""
        if self.table.form == "library":
            problem = "its tokens stand for no bytes of their own"
            raise UnsupportedModel(f"this model's tokenizer does not go with grammars: {problem}")
        return Speller(self._encoder, hidden)

    def close(self) -> None:
        """End the processes; a later encoding starts new ones."""
        self._encoder.close()

    def _token_to_bytes(self, token_id: int, token: str) -> bytes:
        if self.table.form == "byte_level":
            return token.encode() if token_id in self._added else bytes_of(token)
        if self.table.form == "sentencepiece":
            byte = None if token_id in self._added else byte_token(token)
            return token.replace(_SPACE, " ").encode() if byte is None else byte
        return self.table.spelt[token_id]


class Speller:
    """Immutable and safe to use from several threads. hidden: ids by their texts; what looks like one of them is spelt
    in other tokens."""

    def __init__(self, encoder: Encoder, hidden: Mapping[str, int]):
        self._encoder, self._hidden = encoder, hidden
        self("")  # what cannot spell says so now

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
