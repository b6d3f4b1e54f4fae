"""Drafters of all kinds: one that knows the plain answers, one that proposes anything at all, and those of an engine,
which decide by chance how much to draft."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from kvasir.sched.drafts import Asked
from kvasir.sched.sequence import Sequence
from kvasir.spec.drafter import Speculator
from kvasir.speculation import parse
from tests.sched.one_by_one import OneByOne

if TYPE_CHECKING:
    from tests.composition.run import Run


class KnowingDrafter(OneByOne):
    """Drafts of the plain answers, in which some ids are wrong; for requests that have none, of ids that are wrong."""

    def __init__(self, run: Run):
        self._run = run

    def waits(self, sequences: Seq[Sequence]) -> bool:
        return self._run.random.random() < 0.5

    def guess(self, seq: Sequence, most: int) -> list[int]:
        run, begin = self._run, len(seq.tokens) - seq.prompt_len
        known = [r for r in run.requests if r.id == seq.request.id]
        coming = run.expected(known[0])[seq.request.id, seq.index].tokens[begin:] if known else list(seq.tokens[:4])
        right = run.random.choice((0.0, 0.7, 1.0, 1.0))
        return [t if run.random.random() < right else t ^ 1 for t in coming[:most]]


class HostileDrafter(KnowingDrafter):
    """Proposes what it likes: ids that end a sequence or do not exist, too many, right ones first or last."""

    def pays(self, rows: int, predicted: bool) -> bool:
        return self._run.random.random() < 0.9

    def asks(self, seq: Sequence, most: int) -> int:
        return self._run.random.randint(0, most)

    def guess(self, seq: Sequence, most: int) -> list[int]:
        chance = self._run.random
        ends = list(seq.stop_ids) or [0]
        parts = {
            "anything": [chance.randrange(1 << 20) for _ in range(chance.randint(0, 40))],
            "negative": [-chance.randrange(1, 1 << 31)],
            "the end": ends * 3,
            "the same": [seq.tokens[-1]] * 50,
            "right": super().guess(seq, most),
        }
        names = chance.sample(sorted(parts), chance.randint(1, len(parts)))
        return [token for name in names for token in parts[name]]


class ErraticSpeculator(Speculator):
    """The drafters that the engine's options name; how many ids pay is decided by chance."""

    def __init__(self, run: Run):
        super().__init__(parse(run.options.speculate).methods)
        self._run = run

    def pays(self, rows: int, predicted: bool) -> bool:
        return self._run.random.random() < 0.95

    def waits(self, sequences: Seq[Sequence]) -> bool:
        return super().waits(sequences) or self._run.random.random() < 0.2

    def asks(self, seq: Sequence, most: int) -> int:
        asked = self._run.random.randint(1, 4) if self._weights and self._run.random.random() < 0.9 else 0
        self._state(seq).waiting = asked > 0
        return min(asked, most)

    def propose(self, asked: Seq[Asked], budget: int) -> list[array[int]]:
        found = []
        for seq, most in asked:
            guess = self._guess(seq, min(most, budget))
            self._state(seq).asked = guess.kind if guess.ids else None
            found.append(guess.ids[: self._run.random.choice((1, 2, 16))])
        return found
