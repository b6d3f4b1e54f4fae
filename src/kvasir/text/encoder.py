"""The jobs that a tokenizer gives to the process that encodes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kvasir.text.sandbox import Hold

Spans = Sequence[tuple[int, int]]  # [start, end) of characters


class Texts(msgspec.Struct, frozen=True):
    """Texts to encode, and the options: see `Tokenizer.encode_many`. foreign: the spans of each text, or empty."""

    texts: Sequence[str]
    add_special_tokens: bool = True
    parse_special: bool = True
    foreign: Sequence[Spans] = ()
    blocked: Sequence[int] = ()
    most: int = 0


class Encoder(Protocol):
    """Converts texts to ids: the library in this process (backend.Backend) or in other processes (TokenizerPool)."""

    def encode(self, job: Texts, hold: Hold | None = None) -> list[list[int]]: ...

    def spell(self, hidden: Mapping[str, int], texts: Sequence[str]) -> list[list[int]]: ...

    def close(self) -> None: ...
