"""Incremental decoding of a growing sequence of ids into text, never returning part of a character."""

import codecs
from collections.abc import Iterable, Sequence

from kvasir.text.tokenizer import Tokenizer

_MAX_PENDING = 3  # the maximum number of bytes of an incomplete character


class Detokenizer:
    """The incremental form of `Tokenizer.decode`, one per stream.

    The strings that `push` and `flush` return, concatenated, are the text that the completion adds to its prompt: the
    decoded text of prompt and completion without the text that the prompt alone determines. The result does not depend
    on how the ids are divided among calls. A byte that no later byte can make valid becomes U+FFFD immediately; only
    the first bytes of an incomplete character wait.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
    ):
        """keep: special ids that are decoded to text even if `skip_special_tokens`."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space
        self.num_chars = 0
        """Characters returned so far: before a `push`, the `text_offset` of its first id."""
        self._take(self._tail(prompt_ids))

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids."""
        return self._emit(self._take(b"".join([self._bytes(i) for i in ids])))

    def flush(self) -> str:
        """The end of the stream: U+FFFD if a character is incomplete, else an empty string."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's last bytes to include the first byte of the prompt's last character."""
        data = b""
        for token_id in reversed(prompt_ids):
            if len(data) >= _MAX_PENDING:
                break
            data = self._bytes(token_id) + data
        return data

    def _take(self, data: bytes) -> str:
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def _emit(self, text: str) -> str:
        self.num_chars += len(text)
        return text
