"""How many ids to draft: as many as make a step bring the most tokens per second, for all its rows together.

A drafted id is worth the chance that it and all drafted ids before it are right, and costs what one more token row adds
to the step's time. Chances are learnt from what was accepted, times from steps that were measured. Neither changes a
token of an answer, so they may be wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

PRIOR, WEIGHT = 0.5, 2.0  # what is assumed of an unknown drafter, and the number of ids that outweigh it
KEPT, KEPT_LONG = 0.95, 0.995  # share of a sequence's and of the engine's evidence that each further checked id leaves
PAUSES = 16, 1024  # tokens after which a sequence without drafts gets one again: at first, and at most
GAIN = 1.01  # what drafts must promise, relative to none: measured times are no more precise
WAITS = 0.3  # the chance from which a sequence waits for a draft, until step times are known
UNKNOWN = 0.03  # a token row's time relative to a step of one, until it is measured
ROUND = 0.15  # the time of drafting an id relative to that of a step, until it is measured
NEW, OLD = 4, 10  # measurements of a step's time are averaged, the latest ones with these weights at first and later


@dataclass(slots=True)
class Rate:
    """How many of the ids that were checked were right, the latest ones above all. kept: what each leaves of the
    earlier evidence."""

    kept: float = KEPT
    right: float = 0.0
    seen: float = 0.0

    def settle(self, checked: int, accepted: int) -> None:
        left = self.kept**checked
        self.right = self.right * left + accepted
        self.seen = self.seen * left + checked

    def value(self, prior: float = PRIOR) -> float:
        return (self.right + prior * WEIGHT) / (self.seen + WEIGHT)


@dataclass(slots=True)
class Chance:
    """The chance that the next drafted id of a sequence is right: from its own ids that were checked and, as long as
    they are few, from those of the same kind in all sequences. A sequence whose chance is too low for drafts gets one
    all the same after a pause, which doubles each time that nothing of it is right."""

    others: Rate = field(default_factory=lambda: Rate(KEPT_LONG))
    own: Rate = field(default_factory=Rate)
    idle: int = 0  # tokens since the last draft
    pause: int = PAUSES[0]

    @property
    def probes(self) -> bool:
        """Whether one id is to be drafted, whatever its chance."""
        return self.idle >= self.pause

    @property
    def known(self) -> float:
        return self.own.value(self.others.value())

    @property
    def value(self) -> float:
        return max(self.known, PRIOR) if self.probes else self.known

    def settle(self, drafted: int, accepted: int) -> None:
        """After a step that checked `drafted` ids and accepted the first `accepted`."""
        if not drafted:
            self.idle += 1
            return
        checked = min(drafted, accepted + 1)
        self.own.settle(checked, accepted)
        self.others.settle(checked, accepted)
        if accepted:
            self.pause = PAUSES[0]
        elif self.idle >= self.pause:
            self.pause = min(2 * self.pause, PAUSES[1])
        self.idle = 0


@dataclass(slots=True)
class StepTimes:
    """The time of a step by its number of token rows, in seconds: measured ones, and lines between them.

    It never falls with more rows, and where steps become slower or faster, so do those that were not measured lately:
    else a number of rows that was measured in a bad moment would be avoided for ever."""

    rows: list[int] = field(default_factory=list)  # ascending
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # measurements

    def note(self, rows: int, seconds: float) -> None:
        at = bisect_left(self.rows, rows)
        if at < len(self.rows) and self.rows[at] == rows:
            self.counts[at] += 1
            weight, before = 1 / 2, self.times[at]
            if self.counts[at] > NEW:
                weight, seconds = 1 / min(self.counts[at], OLD), min(max(seconds, before / 2), 2 * before)
            drift = 1.0 + (min(max(seconds / before, 0.5), 2.0) - 1.0) / OLD
            self.times = [time * drift for time in self.times]
            self.times[at] = before + weight * (seconds - before)
        else:
            self.rows.insert(at, rows)
            self.times.insert(at, seconds)
            self.counts.insert(at, 1)
        found = self.times[at]
        self.times[:at] = [min(time, found) for time in self.times[:at]]
        self.times[at:] = [max(time, found) for time in self.times[at:]]

    def of(self, rows: int) -> float:
        """Relative to an unknown unit if nothing was measured."""
        if not self.rows:
            return 1.0 + UNKNOWN * rows
        at = bisect_left(self.rows, rows)
        if at < len(self.rows) and self.rows[at] == rows:
            return self.times[at]
        if 0 < at < len(self.rows):
            low, high = self.rows[at - 1], self.rows[at]
            share = (rows - low) / (high - low)
            return self.times[at - 1] + share * (self.times[at] - self.times[at - 1])
        nearest = min(at, len(self.rows) - 1)
        return self.times[nearest] * (1.0 + UNKNOWN * rows) / (1.0 + UNKNOWN * self.rows[nearest])


def best_length(chance: float, rows: int, most: int, times: StepTimes, rounds: StepTimes, blocks: bool = False) -> int:
    """How many ids to draft for each of `rows` alike sequences if drafting takes time too. rounds: the time of drafting
    one id for so many sequences. blocks: whether one pass drafts all ids; rounds is then its time, by token rows."""
    tokens, best, found = float(rows), GAIN * rows / times.of(rows), 0

    def drafting(count: int) -> float:
        computed = rows * (1 + count) if blocks else rows
        return (1 if blocks else count) * (rounds.of(computed) if rounds.rows else ROUND * times.of(computed))

    for count in range(1, most + 1):
        tokens += rows * chance**count
        rate = tokens / (times.of(rows * (1 + count)) + drafting(count))
        if rate > best:
            best, found = rate, count
    return found


def shares(
    chances: Sequence[float], most: Sequence[int], times: StepTimes, others: int = 0, limit: float = inf
) -> list[int]:
    """How many ids to draft for each row. chances: of each row's next id. most: how many there are at most. others:
    token rows of the step without a draft, prefills for example. limit: seconds that drafts must not make a step take.

    Ids are taken by their worth, of all rows together, and of all numbers of ids the one with the best rate is chosen:
    the time of a step does not rise evenly, since kernels compute rows in tiles.
    """
    worth = sorted(
        (-(chance**place), row, place)
        for row, (chance, count) in enumerate(zip(chances, most, strict=True))
        for place in range(1, count + 1)
    )
    base = len(chances) + others
    tokens, best, taken = float(len(chances)), GAIN * len(chances) / times.of(base), 0
    limit = limit if times.of(base) <= limit else inf
    for count, (negative, _, _) in enumerate(worth, 1):
        tokens -= negative
        seconds = times.of(base + count)
        if tokens / seconds > best and seconds <= limit:
            best, taken = tokens / seconds, count
    found = [0] * len(chances)
    for _, row, place in worth[:taken]:
        found[row] = max(found[row], place)
    return found


def worth_waiting(chances: Sequence[float], most: Sequence[int], rows: int, times: StepTimes, ahead: StepTimes) -> bool:
    """Whether drafts for some of `rows` sequences make up for planning their step later. chances, most: as in `shares`.
    times: of steps that are planned once the last ids are known; ahead: of those planned before."""
    if not (times.rows and ahead.rows):
        return any(chance >= WAITS for chance in chances)
    counts = shares(chances, most, times, others=rows - len(chances))
    tokens = rows + sum(c**place for c, count in zip(chances, counts, strict=True) for place in range(1, count + 1))
    return tokens / times.of(rows + sum(counts)) > GAIN * rows / ahead.of(rows)
