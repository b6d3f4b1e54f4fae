"""What a tokenizer asks of the process that encodes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvasir.text.sandbox import Hold

Spans = Sequence[tuple[int, int]]  # [start, end) of characters


class Encoder(Protocol):
    """What turns texts into ids: the library in this process (backend.Backend) or in others (TokenizerPool)."""

    def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        parse_special: bool,
        foreign: Sequence[Spans] = (),
        hold: Hold | None = None,
        blocked: Sequence[int] = (),
        most: int = 0,
    ) -> list[list[int]]: ...

    def spell(self, hidden: Mapping[str, int], texts: Sequence[str]) -> list[list[int]]: ...

    def close(self) -> None: ...
