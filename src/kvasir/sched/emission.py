"""Which ids of a sequence its deltas have emitted, and which log-probabilities are still missing.

tokens   ... t  f1  f2  f3         values known to the scheduler
                unemitted ..       in no delta yet: forced ids wait for their log-probabilities
owed            e1  e2             log-probabilities that have arrived for the first unemitted ids
unread                      ^      the first id that no step was planned to read
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvasir.types import TokenLogprob


@dataclass(slots=True, eq=False)
class Emission:
    """holds_back: whether an id is emitted only with its log-probability. unread: a position. prompt_logprobs: one
    entry per prompt id, None for the first and for ids not read yet; None if the request does not want them."""

    holds_back: bool
    unread: int
    prompt_logprobs: list[TokenLogprob | None] | None = None
    unemitted: int = 0
    owed: list[TokenLogprob] = field(default_factory=list)

    def to_read(self, known: int, prompt_len: int) -> range:
        """Positions of known ids whose log-probabilities later steps must read, each at the position before the id."""
        return range(self.unread, known if self.holds_back else prompt_len)

    def plan(self, end: int) -> None:
        """Records that a planned step reads or samples the ids before position `end`."""
        self.unread = end

    def hold(self, count: int) -> None:
        """Records that the last `count` known ids are in no delta yet."""
        self.unemitted = count

    def reread(self, num_tokens: int) -> None:
        """Marks as unread the ids that a failed or retracted step should have read."""
        emitted_before = num_tokens - self.unemitted
        missing = (i for i, entry in enumerate(self.prompt_logprobs or ()) if i and entry is None)
        self.unread = next(missing, emitted_before + len(self.owed))

    def read(self, after: int, entries: list[TokenLogprob], prompt_len: int) -> None:
        """Takes the entries of the ids after position `after`: prompt ids, then forced ids."""
        of_prompt = min(max(0, prompt_len - 1 - after), len(entries))
        if self.prompt_logprobs is not None and of_prompt:
            self.prompt_logprobs[after + 1 : after + 1 + of_prompt] = entries[:of_prompt]
        self.owed += entries[of_prompt:]

    def emit(self, count: int, left: int, entries: Iterable[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Records that a delta emits `count` ids and `left` stay unemitted; returns the emitted ids' log-probabilities.
        entries: log-probabilities of sampled ids, which come after those owed."""
        found, self.owed = [*self.owed, *entries], []
        self.unemitted = left
        return tuple(found[:count])
