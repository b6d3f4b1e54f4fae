"""Which texts are too long to be tokenized, or to be tokenized completely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir.errors import TextTooLong
from kvasir.text.table import Table

COUNT_BYTES, COUNT_BYTES_PER_TOKEN = 1 << 20, 16  # the larger limit holds; the second is per token of context

Bound = Literal["context", "count"] | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """The limits on texts for a model with this context (in tokens) and tokenizer."""

    context: int
    table: Table

    @property
    def counted(self) -> int:
        """Bytes of the longest text that is tokenized completely even if it need not fit."""
        return max(COUNT_BYTES, COUNT_BYTES_PER_TOKEN * self.context)

    def must_fit(self, size: int, bound: Bound, first: int) -> bool:
        """Whether a text of `size` bytes is refused if it does not fit. See `Front.encode`."""
        return bound == "context" or (
            size > self.counted and (bound == "count" or (first > 0 and not self.table.sliced))
        )

    def check_size(self, size: int, param: str, least: str = "") -> None:
        """Raises TextTooLong if `size` bytes of tokens cannot fit into the context. least: prefix of the size in the
        message if it is only a lower bound."""
        most = self.table.bytes_per_token
        if most and size > most * self.context:
            raise self.too_long(f"{least}{size}", -(-size // most), f"at most {most * self.context} bytes", param)

    def check_characters(self, text: str, size: int, param: str) -> None:
        """Raises TextTooLong if the text, of `size` bytes, has more characters in tokens than the context can hold.
        Reads the whole text if it has fewer: do not call it on the event loop."""
        fewest = self.table.fewest_tokens(text, self.context)
        if fewest > self.context:
            most = self.context * self.table.chars_per_token
            raise self.too_long(size, fewest, f"at most {most} characters of its vocabulary", param)

    def too_long(self, size: int | str, tokens: int, most: str, param: str) -> TextTooLong:
        """The error for such a text. tokens: a lower bound of its tokens."""
        message = f"the text has {size} bytes; the context of {self.context} tokens can hold {most}"
        hint = f"shorten it (up to {self.counted} bytes are counted or truncated without fitting)"
        return TextTooLong(message, hint, param, tokens=tokens, context=self.context)
