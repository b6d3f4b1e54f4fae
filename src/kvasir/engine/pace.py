"""How fast an answer comes, by the engine's clock: its reader may get many tokens at once."""

from __future__ import annotations

import time

from kvasir.engine.answer import TextDelta


def moment(at: float, begun: float) -> float:
    """When tokens were there, in seconds of time.monotonic: as their engine says, or now, where its clock is another
    machine's. begun: the request."""
    now = time.monotonic()
    return at if begun <= at <= now else now


class Pace:
    """One answer. begun: its request; first, last: when its tokens were there, None before; count: of them."""

    def __init__(self, begun: float | None = None) -> None:
        """begun: in seconds of time.monotonic; now where it is not given."""
        self.begun = time.monotonic() if begun is None else begun
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
    def per_token(self) -> float | None:
        """Seconds for each token after the first ones; None where there are too few to say."""
        if self.first is None or self.last is None or self.count == self._at_first:
            return None
        return (self.last - self.first) / (self.count - self._at_first)

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first ones; None where there are too few to say."""
        return 1 / self.per_token if self.per_token else None
