"""How fast a choice is generated, by the engine's clock, since its reader may get many tokens at once."""

from __future__ import annotations

import time

from kvasir.engine.answer import TextDelta


def moment(at: float, begun: float) -> float:
    """The time of tokens, in seconds of time.monotonic: as the engine reports it, or the present time if its clock is
    another machine's. begun: start of the request."""
    now = time.monotonic()
    return at if begun <= at <= now else now


class Pace:
    """One choice. begun: start of its request; first, last: times of its tokens, None before; count: of its tokens."""

    def __init__(self, begun: float | None = None) -> None:
        """begun: in seconds of time.monotonic; None: the present time."""
        self.begun = time.monotonic() if begun is None else begun
        self.first: float | None = None
        self.last: float | None = None
        self.count = 0
        self._at_first = 0  # tokens of the first delta

    def saw(self, delta: TextDelta) -> None:
        """Records the time and the tokens of a delta."""
        if not delta.token_ids:
            return
        self.last = moment(delta.at, self.begun)
        self.count += len(delta.token_ids)
        if self.first is None:
            self.first, self._at_first = self.last, self.count

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first delta; None if there are too few tokens."""
        if self.first is None or self.last is None or self.count == self._at_first:
            return None
        return (self.last - self.first) / (self.count - self._at_first)

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first delta; None if there are too few tokens."""
        return 1 / self.per_token if self.per_token else None
