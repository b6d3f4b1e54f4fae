"""What deltas have emitted of a sequence, and which log-probabilities they still need.

tokens   ... t  f1  f2  f3         values known to the scheduler
                unemitted ..       in no delta yet: forced ids wait for their log-probabilities
owed            e1  e2             the log-probabilities that have arrived for the first of them
unread                      ^      the first id that no step was planned to read
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvasir.types import TokenLogprob


@dataclass(slots=True, eq=False)
class Emission:
    """holds_back: whether no delta says an id without its log-probability. unread: a position. prompt_logprobs: one for
    each of the prompt's ids, None for the first and for what was not read yet; None where no one wants them."""

    holds_back: bool
    unread: int
    prompt_logprobs: list[TokenLogprob | None] | None = None
    unemitted: int = 0
    owed: list[TokenLogprob] = field(default_factory=list)

    def to_read(self, known: int, prompt_len: int) -> range:
        """Known ids of which log-probabilities are to be read, from the rows before them, by steps not planned yet."""
        return range(self.unread, known if self.holds_back else prompt_len)

    def plan(self, end: int) -> None:
        """A step is planned that reads those before `end`, or samples them."""
        self.unread = end

    def hold(self, count: int) -> None:
        """So many of the last ids are known, and no delta comes with them."""
        self.unemitted = count

    def reread(self, num_tokens: int) -> None:
        """What steps were to read that did not run is to be read again."""
        told = num_tokens - self.unemitted
        missing = (i for i, entry in enumerate(self.prompt_logprobs or ()) if i and entry is None)
        self.unread = next(missing, told + len(self.owed))

    def read(self, after: int, entries: list[TokenLogprob], prompt_len: int) -> None:
        """Entries of the ids that come after the position `after`: the prompt's, then forced ones."""
        of_prompt = min(max(0, prompt_len - 1 - after), len(entries))
        if self.prompt_logprobs is not None and of_prompt:
            self.prompt_logprobs[after + 1 : after + 1 + of_prompt] = entries[:of_prompt]
        self.owed += entries[of_prompt:]

    def tell(self, count: int, left: int, entries: Iterable[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """A delta emits `count` ids, and `left` stay unemitted. Returns the log-probabilities of those it emits."""
        found, self.owed = [*self.owed, *entries], []
        self.unemitted = left
        return tuple(found[:count])
