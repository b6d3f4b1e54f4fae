"""How fast an answer comes, by the engine's clock: its reader may get many tokens at once."""

from __future__ import annotations

import time

from kvasir.engine.answer import TextDelta, moment


class Pace:
    """From its making on. first, last: when the answer's tokens were there, None before; count: of them."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.first: float | None = None
        self.last: float | None = None
        self.count = 0
        self._at_first = 0  # tokens that came with the first one

    def saw(self, delta: TextDelta) -> None:
        if not delta.token_ids:
            return
        self.last = moment(delta.at, self.begun)
        self.count += len(delta.token_ids)
        if self.first is None:
            self.first, self._at_first = self.last, self.count

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first ones; None where there are too few to say."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.count - self._at_first) / (self.last - self.first)
