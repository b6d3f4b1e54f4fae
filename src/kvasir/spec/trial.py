"""Whether to draft at all: tokens per second with drafters and without, measured in turns.

Drafters cost more than the rows that they add to a step: their guesses have to be found, and the next step waits for
them instead of being planned while this one is computed. With a small model or many sequences that may be more than
right guesses save. No single step shows it, so both ways are tried. The worse one is tried again once the time that it
lost the last time is COST of the time that has passed since.

    the better way  ████████████████████████        ████████████████████████        ...
    the other way                           ████████                        ████████
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIED = {True: 32, False: 24}  # steps after which two ways are compared, with drafters and without
HOPELESS = 8, 0.7  # steps after which a way that is so much slower is not tried on
COST = 0.01
BETTER = 64, 4096  # steps of the better way before the other one is tried again
WINDOW = 128  # steps after which its rate is noted
LOSES = 0.985  # relative speed below which drafters lose; a comparison is no more precise
SETTLING = 2  # steps after a change that are not measured: they were planned before it
STALL = 4.0  # times the usual step; what takes longer was interrupted


@dataclass(slots=True)
class Trial:
    """Whether drafters work now, among steps of the same kind. drafts: whether they do."""

    drafts: bool = True
    _rates: dict[bool, float] = field(default_factory=dict)  # tokens per second with drafters and without
    _left: int = 0  # steps of the better way until the other one is tried; 0 while that is tried
    _settling: int = 0
    _steps: int = 0  # in this window
    _tokens: float = 0.0
    _seconds: float = 0.0
    _usual: float = 0.0  # seconds of a step

    def note(self, tokens: int, seconds: float) -> None:
        """A step has taken `seconds` and made so many tokens, not counting accepted ids."""
        if self._settling:
            self._settling -= 1
            return
        if self._over():
            self._decide()
            if self._settling:
                return
        self._usual += (seconds - self._usual) / (8 if self._usual else 1)
        self._steps += 1
        self._tokens += tokens
        self._seconds += min(seconds, STALL * self._usual)

    def accepted(self, tokens: int) -> None:
        """So many drafted ids of the step noted last were right."""
        if not self._settling:
            self._tokens += tokens

    def _over(self) -> bool:
        if self._left:
            return self._steps >= min(WINDOW, self._left)
        steps, least = HOPELESS
        hopeless = self._steps >= steps and self._tokens < least * self._rates.get(not self.drafts, 0.0) * self._seconds
        return hopeless or self._steps >= TRIED[self.drafts]

    def _decide(self) -> None:
        rate = self._tokens / max(self._seconds, 1e-9)
        self._rates[self.drafts] = (rate + self._rates.get(self.drafts, rate)) / 2
        other = self._rates.get(not self.drafts, 0.0)
        better = self._rates[True] >= LOSES * self._rates[False] if other else not self.drafts
        if better == self.drafts:
            left = self._left - self._steps if self._left else BETTER[0]
            self._go(better if left else not better, left)
        else:
            self._go(better, self._pause(other) if other and not self._left else 0)

    def _pause(self, other: float) -> int:
        """Steps of the better way until the worse one, just tried, is tried again. other: the better way's rate."""
        if not self._tokens:
            return BETTER[1]
        lost = (self._seconds - self._tokens / other) * (1 + SETTLING / self._steps)
        steps = lost / COST * other * self._steps / self._tokens
        return round(min(max(BETTER[0], steps), BETTER[1]))

    def _go(self, drafts: bool, left: int) -> None:
        if drafts != self.drafts:
            self._settling = SETTLING
            self._usual = 0.0
        self.drafts, self._left, self._steps = drafts, left, 0
        self._tokens = self._seconds = 0.0
