"""The drafter of an engine: asks several sources for each sequence, and drafts as much of the guesses as pays.

    forced        ids that the sequence's grammar forces
    prediction    the answer that the request expects, after the place where the sequence follows it
    ngram         what followed the last ids earlier in the sequence (`lookup`)
    suffix        what followed them in earlier answers to the same key (`pool`)
    draft, eagle3, dflash, mtp: ids that the runner proposed after the last step, with a model that drafts

What a lookup has found is kept while the sequence follows it, so right guesses need no search between two steps.

What the guesses of a kind have brought, in the sequence and in the engine, gives the chance of its next guess; `pace`
chooses how much of it is checked. A kind is a source and how long its match is: longer ones are right more often.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvasir.errors import KvasirError
from kvasir.sched.drafts import Asked, StepTime
from kvasir.sched.sequence import Sequence
from kvasir.spec.lookup import LONGEST, continuation
from kvasir.spec.pace import KEPT_LONG, Chance, Rate, StepTimes, best_length, shares, worth_waiting
from kvasir.spec.pool import Pools
from kvasir.spec.trial import Trial
from kvasir.speculation import MAX_DRAFTED, WEIGHTS
from kvasir.types import ServiceClass, Target

Look = Callable[[Sequence, "array[int]", int], "tuple[array[int], int]"]  # ids, most -> a guess, length of its match
Search = Callable[["array[int]", int], "tuple[array[int], int]"]
Kind = tuple[str, int]  # a source, and the bits of the length of its match
SURE = 0.95  # the best chance that is worth asking for
INSERTED = 64  # ids that a prediction may have more than the answer up to some place, before all of it is searched
FAR = 64  # ids that a lookup returns: more than a step can check
LOOKS = 64  # measured steps after which it is decided again from how many rows on no draft pays


class Guess(NamedTuple):
    """Ids that may follow a sequence."""

    kind: Kind
    ids: array[int]


NO_GUESS = Guess(("", 0), array("i"))


class Found(NamedTuple):
    """What a lookup has found after `after` ids. length: of its match."""

    after: int
    ids: array[int]
    length: int


@dataclass(slots=True)
class Drafted:
    """What is known of a sequence's drafts. asked: the kind of its last guess, of which as much was drafted as paid.
    waiting: whether a pending step's result will come with ids that the runner proposes. proposed: such ids; after:
    how many tokens come before them."""

    chances: dict[Kind, Chance] = field(default_factory=dict)
    asked: Kind | None = None
    waiting: bool = False
    proposed: array[int] = field(default_factory=lambda: array("i"))
    after: int = 0
    predicted: array[int] | None = None  # the request's prediction
    same: int = 0  # ids of the answer that are known to be those of the prediction; -1 after a difference
    found: dict[str, Found] = field(default_factory=dict)  # by source


class Speculator:
    """A `sched.drafts.Drafter`. Owns the chances of the sequences and of the kinds, the pools, and the step times.

    saved: estimated seconds that drafts have saved, less those that they cost. ahead: times of steps that were planned
    ahead, by token rows, which have no drafts; times: of the others.
    rounds: the times of proposing one id with a model that drafts, by sequences, or those of a pass of one that drafts
    blocks, by token rows. lookups: searches of a sequence or a pool.
    """

    def __init__(
        self,
        methods: Seq[str],
        targets: Mapping[ServiceClass, Target] = {},
        most: int = MAX_DRAFTED,
        pools: Pools | None = None,
        blocks: bool = False,
    ):
        """methods: names of `speculation.METHODS`. targets: of each class, which no draft may make a step miss.
        most: drafted ids of a sequence in a step. blocks: whether the runner proposes all ids in one pass."""
        self._methods, self._targets, self._most = tuple(methods), targets, most
        self._weights = next((name for name in methods if name in WEIGHTS), "")
        looks = {"ngram": self._ngram, "suffix": self._suffix}
        always: dict[str, Look] = {"forced": self._forced, "prediction": self._prediction}
        self._sources = always | {name: looks.get(name, self._proposed) for name in methods}
        self.rounds, self._blocks = StepTimes(), blocks
        self._asking = 1  # sequences that asked the runner in the last step
        self._pools = pools or Pools()
        self.times, self.ahead = StepTimes(), StepTimes()
        self._trials: dict[tuple[int, bool], Trial] = {}  # by the bits of the number of sequences, and predictions
        self._predicted = False  # whether a sequence of the last plan has a prediction
        self._rates: dict[Kind, Rate] = {}
        self._of: dict[int, Drafted] = {}  # by the identity of a sequence
        self._pays: dict[int, bool] = {}  # by rows
        self._measured = 0
        self._decoding = 1  # sequences in the last step that was measured
        self._measures: Trial | None = None  # that of the last step, if it was measured
        self.saved = 0.0
        self.lookups = 0

    # -- the protocol

    def pays(self, rows: int, predicted: bool) -> bool:
        """Whether drafters work now, and a draft that is almost surely right would pay."""
        self._predicted = predicted
        if not self._trial(rows).drafts:
            return False
        if rows not in self._pays:
            self._pays[rows] = any(shares([SURE] * rows, [4] * rows, self.times))
        return self._pays[rows]

    def waits(self, sequences: Seq[Sequence]) -> bool:
        """Whether what is likely to follow the ids that a pending step samples makes up for planning later. Attempts to
        draft again are no reason to wait unless a quarter of the sequences are due for one."""
        if any(self._state(seq).waiting for seq in sequences):
            return True
        chances, most, probes = [], [], 0
        for seq in sequences:
            limit = self._limit(seq, self._most)
            guess = self._guess(seq, limit) if limit > 1 else NO_GUESS
            if len(guess.ids) > 1:
                chance = self._chance(seq, guess.kind)
                probes += chance.probes
                chances.append(chance.known)
                most.append(len(guess.ids) - 1)
        return 4 * probes > len(sequences) or worth_waiting(chances, most, len(sequences), self.times, self.ahead)

    def propose(self, asked: Seq[Asked], budget: int) -> list[array[int]]:
        """As much of each sequence's guess as pays for all of them together."""
        guesses = [self._guess(seq, self._limit(seq, min(most, budget))) for seq, most in asked]
        for (seq, _), guess in zip(asked, guesses, strict=True):
            self._state(seq).asked = guess.kind if guess.ids else None
        guessed = [at for at, guess in enumerate(guesses) if guess.ids]
        counts = shares(
            [self._chance(asked[at].seq, guesses[at].kind).value for at in guessed],
            [1 if self._chance(asked[at].seq, guesses[at].kind).probes else len(guesses[at].ids) for at in guessed],
            self.times,
            others=len(asked) - len(guessed),
            limit=self._step_limit(asked),
        )
        found = [array("i") for _ in asked]
        for at, count in zip(guessed, counts, strict=True):
            found[at] = guesses[at].ids[:count]
        return found

    def asks(self, seq: Sequence, most: int) -> int:
        """As many ids as pay if all sequences that ask are like this one; none where a lookup does better."""
        state, limit = self._state(seq), self._limit(seq, min(most, self._most))
        if not self._weights or limit <= 0 or not self._wants(seq, self._weights):
            return 0
        chance = self._chance(seq, (self._weights, 0))
        if state.asked and state.asked[0] != self._weights and self._chance(seq, state.asked).value > chance.value:
            return 0
        asked = best_length(min(chance.value, SURE), self._asking, limit, self.times, self.rounds, self._blocks)
        if chance.probes:
            asked = 1  # whatever it costs, which is measured again as well
        elif not asked:
            chance.settle(0, 0)
        state.waiting = asked > 0
        return asked

    def proposed(self, seq: Sequence, ids: Seq[int], after: int) -> None:
        state = self._state(seq)
        state.proposed, state.after = array("i", ids), after

    def settle(self, seq: Sequence, drafted: int, accepted: int) -> None:
        if accepted and self._measures:
            self._measures.accepted(accepted)
        state = self._of.get(id(seq))
        if state is None:
            return
        state.waiting = False
        if state.asked is None:
            return
        self._chance(seq, state.asked).settle(drafted, accepted)
        state.asked = None
        self.saved += accepted * self._plain(self._decoding) / self._decoding

    def leave(self, seq: Sequence) -> None:
        self._of.pop(id(seq), None)
        if "suffix" in self._methods and not seq.request.no_cache:
            self._pools.add(_key(seq), seq.tokens[seq.prompt_len :])

    def learn(self, most: int) -> int:
        return self._pools.index(most)

    @property
    def learns(self) -> bool:
        return self._pools.waiting > 0

    def measured(self, rows: int, drafted: int, time: StepTime) -> None:
        self._measures = None
        if not rows:
            return
        decoding = self._decoding = rows - drafted
        (self.ahead if time.ahead else self.times).note(rows, time.period - time.proposing)
        self._measures = self._trial(decoding)
        self._measures.note(decoding, time.period)
        self._measured += 1
        if self._measured % LOOKS == 0:
            self._pays.clear()
        if drafted:
            self.saved -= time.period - self._plain(decoding)

    def _plain(self, rows: int) -> float:
        """The time of a step without drafts."""
        return (self.ahead if self.ahead.rows else self.times).of(rows)

    def _trial(self, rows: int) -> Trial:
        return self._trials.setdefault((rows.bit_length(), self._predicted), Trial())

    def measured_proposals(self, rows: int, most: int, seconds: float) -> None:
        self.rounds.note(*((rows * (1 + most), seconds) if self._blocks else (rows, seconds / most)))
        self._asking = rows

    # -- guesses

    def _limit(self, seq: Sequence, most: int) -> int:
        """How many ids may be drafted for a sequence."""
        wanted = seq.request.speculation
        if wanted is None:
            return min(most, self._most)
        if wanted.methods == ():
            return 0
        return min(most, self._most if wanted.most is None else wanted.most)

    def _step_limit(self, asked: Seq[Asked]) -> float:
        """Seconds that drafts must not make a step of these sequences take."""
        classes = {seq.request.slo for seq, _ in asked}
        return min((self._targets[c].tpot for c in classes if c in self._targets), default=inf)

    def _guess(self, seq: Sequence, most: int) -> Guess:
        """The guess that promises the most ids."""
        if most <= 0:
            return NO_GUESS
        ids, best, most_promised = seq.tokens, NO_GUESS, 0.0
        for source, look in self._sources.items():
            if source in self._methods and not self._wants(seq, source):
                continue
            found, length = look(seq, ids, most)
            if found:
                kind = source, length.bit_length()
                chance = min(self._chance(seq, kind).value, SURE)
                promised = (1 - chance ** len(found)) / (1 - chance)
                if promised > most_promised:
                    best, most_promised = Guess(kind, found), promised
        return self._allowed(seq, best)

    def _wants(self, seq: Sequence, method: str) -> bool:
        """Whether the request admits a method."""
        wanted = seq.request.speculation
        return wanted is None or wanted.methods is None or method in wanted.methods

    def _proposed(self, seq: Sequence, ids: array[int], most: int) -> tuple[array[int], int]:
        """What is left of the runner's ids: the sequence may have got some of them, forced by its grammar."""
        state = self._state(seq)
        added = len(ids) - state.after
        if not state.after or ids[state.after :] != state.proposed[:added]:
            return array("i"), 0
        return state.proposed[added : added + most], 0

    def _forced(self, seq: Sequence, ids: array[int], most: int) -> tuple[array[int], int]:
        guide = seq.guidance.guide
        if guide is None or guide.done or seq.counts.in_flight:
            return array("i"), 0
        if seq.guidance.jumps and not seq.emission.holds_back:
            return array("i"), 0  # forced ids are known already
        try:
            return array("i", guide.forced()[:most]), 0
        except KvasirError:  # the step that samples meets it again, and it ends this sequence alone
            return array("i"), 0

    def _prediction(self, seq: Sequence, ids: array[int], most: int) -> tuple[array[int], int]:
        """The prediction is followed from its start as long as all ids match, and then from the place whose ids before
        it match best."""
        if not seq.request.prediction:
            return array("i"), 0
        state = self._state(seq)
        predicted = state.predicted = state.predicted or array("i", seq.request.prediction)
        done, same = len(ids) - seq.prompt_len, state.same
        if same >= 0 and predicted[same:done] == ids[seq.prompt_len + same :]:
            state.same = done
            return predicted[done : done + most], 2 * LONGEST

        def search(ids: array[int], most: int) -> tuple[array[int], int]:
            found, length = continuation(ids, most, predicted[: done + INSERTED])
            return (found, length) if found else continuation(ids, most, predicted)

        state.same = -1
        return self._followed("prediction", seq, ids, most, search)

    def _ngram(self, seq: Sequence, ids: array[int], most: int) -> tuple[array[int], int]:
        return self._followed("ngram", seq, ids, most, continuation)

    def _suffix(self, seq: Sequence, ids: array[int], most: int) -> tuple[array[int], int]:
        pool = self._pools.of(_key(seq))
        return self._followed("suffix", seq, ids, most, pool.continuation) if pool else (array("i"), 0)

    def _followed(
        self, source: str, seq: Sequence, ids: array[int], most: int, search: Search
    ) -> tuple[array[int], int]:
        """What is left of the source's last finding if the sequence went on like that, else a new one."""
        kept = self._state(seq).found
        if found := kept.get(source):
            done = len(ids) - found.after
            if not (done or found.ids):
                return found.ids, 0
            if done + most <= len(found.ids) and found.ids[:done] == ids[found.after :]:
                return found.ids[done : done + most], min(found.length + done, LONGEST)
        self.lookups += 1
        far, length = search(ids, max(FAR, most))
        kept[source] = Found(len(ids), far, length)
        return far[:most], length

    def _allowed(self, seq: Sequence, guess: Guess) -> Guess:
        """The part of a guess that the sequence's grammar allows."""
        guide = seq.guidance.guide
        if guide is None or seq.counts.in_flight:
            return guess
        count = 0
        try:
            followed = guide.copy()
            for token in guess.ids:
                if followed.done:
                    break
                followed.advance((token,))
                count += 1
        except KvasirError:
            pass  # the grammar does not allow this id, or cannot be followed
        return guess._replace(ids=guess.ids[:count])

    # -- chances

    def _state(self, seq: Sequence) -> Drafted:
        return self._of.setdefault(id(seq), Drafted())

    def _chance(self, seq: Sequence, kind: Kind) -> Chance:
        chances = self._state(seq).chances
        if kind not in chances:
            chances[kind] = Chance(self._rates.setdefault(kind, Rate(KEPT_LONG)))
        return chances[kind]


def _key(seq: Sequence) -> tuple[str, str]:
    return seq.request.tenant, seq.request.cache_salt or ""
