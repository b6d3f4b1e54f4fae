"""Runs a runner by handmade plans: sequences with every kind of sampling parameters, with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvasir.plan import Decodes, Join, RowResult, SamplingSpec, StepPlan, Work, pack_ids
from kvasir.runner.runner import Runner
from kvasir.types import TokenLogprob
from tests.oracle import Bits, bits

_DRAWN = {"temperature": 1.1, "seed": 5}


@dataclass(frozen=True)
class Kind:
    """What a sequence is sampled with. masked: with the masks of `mask_after`."""

    spec: SamplingSpec
    masked: bool = False


def kind(masked: bool = False, **fields) -> Kind:
    return Kind(SamplingSpec(**{**_DRAWN, **fields}, guided=masked), masked)


KINDS = {
    "greedy": kind(temperature=0.0),
    "drawn": kind(top_p=0.9, min_p=0.01, top_k=200),
    "described": kind(logprobs=3),
    "greedy described": kind(temperature=0.0, logprobs=1),
    "dry": kind(dry_multiplier=5.0, dry_allowed_length=0, dry_penalty_last_n=-1, top_k=4),
    "windows": kind(repetition_penalty=1.5, repetition_last_n=5, frequency_penalty=0.7, occurrence_last_n=9),
    "output": kind(presence_penalty=0.7, min_tokens=9, stop_ids=tuple(range(50)), logit_bias=((3, 2.0),)),
    "words": kind(bad_words=((7,), *((a, b) for a in range(0, 300, 2) for b in range(0, 300, 25)))),
    "xtc": kind(xtc_probability=0.6, xtc_threshold=0.001, typical_p=0.7),
    "mirostat": kind(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.7, logprobs=0),
    "adaptive": kind(adaptive_target=0.1),
    "mask": kind(True),
    "described mask": kind(True, logprobs=2, dry_multiplier=3.0, dry_allowed_length=0, dry_penalty_last_n=-1),
    "mirostat mask": kind(True, mirostat=2, mirostat_tau=2.0),
}


@dataclass
class Answer:
    ids: list[int]  # the prompt's first
    entries: list[Bits] = field(default_factory=list)


def mask_after(ids: Sequence[int], vocab: int) -> bytes:
    """Allows about two of three ids, others at each position."""
    allowed = (np.arange(vocab) * 7 + len(ids) + ids[-1]) % 3 > 0
    return np.packbits(np.pad(allowed, (0, -vocab % 32)), bitorder="little").tobytes()


class Sequences:
    """Sequences that run together, each from a prompt of another length to `count` sampled ids. expected: their
    answers, of which drafts are made; without them there are none. steps: that were computed."""

    def __init__(
        self,
        runner: Runner,
        names: Sequence[str],
        expected: Mapping[str, Answer] | None = None,
        *,
        seed: int = 0,
        count: int = 14,
    ):
        self.runner, self.names, self.expected = runner, names, expected
        self.vocab, lengths = runner.capacity.vocab_size, {name: len(name) for name in names}
        self.answers = {name: Answer([3 + 5 * i + n for i in range(9 + n % 7)]) for name, n in lengths.items()}
        self.prompts = {name: len(answer.ids) for name, answer in self.answers.items()}
        self.ends = {name: prompt + count for name, prompt in self.prompts.items()}
        self.computed = dict.fromkeys(names, 0)
        self.steps = self.drafted = self.accepted = 0
        self._random = random.Random(seed)

    def run(self) -> dict[str, Answer]:
        joined = self._joins()
        while works := self._works():
            decodes = self._decodes(works)
            plan = StepPlan(self.steps, joined=joined, work=tuple(works), decodes=decodes)
            result = self.runner.sample(self.runner.execute(plan), self._masks(works))
            for work, row in zip(plan.works, result.of(plan), strict=True):
                self._take(work, row)
            joined, self.steps = (), self.steps + 1
        self.runner.sample(self.runner.execute(StepPlan(self.steps, left=tuple(range(len(self.names))))))
        return self.answers

    def _joins(self) -> tuple[Join, ...]:
        rows = enumerate(self.names)
        return tuple(
            Join(row, pack_ids(self.answers[name].ids), self.prompts[name], KINDS[name].spec) for row, name in rows
        )

    def _works(self) -> list[Work]:
        found, room = [], self.runner.capacity.max_tokens_per_step
        for row, name in enumerate(self.names):
            answer, start = self.answers[name], self.computed[name]
            open_ = len(answer.ids) - start
            if len(answer.ids) == self.ends[name] or not room or self._random.random() < 0.2:
                continue
            count = min(room, open_, self._random.randint(1, 12))
            draft = self.draft(name, room - count) if count == open_ else []
            room -= count + len(draft)
            found.append(self._work(row, start, count, draft, count == open_))
        unfinished = any(len(self.answers[name].ids) < self.ends[name] for name in self.names)
        return found or (self._works() if unfinished else [])

    def _work(self, row: int, start: int, count: int, draft: list[int], sample: bool) -> Work:
        size, per_row = self.runner.capacity.block_size, 4
        first, last = -(-start // size), -(-(start + count + len(draft)) // size)
        blocks = tuple(range(1 + row * per_row + first, 1 + row * per_row + last))
        masked = KINDS[self.names[row]].masked and self._random.random() < 0.5
        drafted = {"appended": pack_ids(draft), "drafted": len(draft)}
        return Work(row, start, count + len(draft), ((first, blocks),), **drafted, sample=sample, masked=masked)

    def draft(self, name: str, room: int) -> list[int]:
        if self.expected is None:
            return []
        answer, right = self.expected[name], self._random.choice((0.0, 0.8, 1.0, 1.0))
        most = min(room, self.ends[name] - 1 - len(self.answers[name].ids))
        coming = answer.ids[len(self.answers[name].ids) :][: self._random.randint(0, max(most, 0))]
        return [token if self._random.random() < right else (token + 1) % self.vocab for token in coming]

    def _decodes(self, works: list[Work]) -> Decodes:
        """Takes some of the works out as columns, if they can be."""
        names = self.names
        plain = [
            work
            for work in works
            if work.sample and work.count == 1 and not work.blocks[0][1] and self._random.random() < 0.7
            and not (KINDS[names[work.row]].masked or KINDS[names[work.row]].spec.carries)
            and KINDS[names[work.row]].spec.logprobs < 0
        ]  # fmt: skip
        for work in plain:
            works.remove(work)
        return Decodes(pack_ids([w.row for w in plain]), pack_ids([w.start for w in plain]))

    def _masks(self, works: Sequence[Work]) -> dict[int, bytes]:
        masks = {}
        for work in works:
            name = self.names[work.row]
            if work.sample and KINDS[name].masked:
                ids = [*self.answers[name].ids, *np.frombuffer(work.appended, np.int32).tolist()]
                ends = range(len(ids) - work.drafted, len(ids) + 1)
                masks[work.row] = b"".join(mask_after(ids[:end], self.vocab) for end in ends)
        return masks

    def _take(self, work: Work, row: RowResult) -> None:
        assert not row.error, row.error
        name = self.names[row.row]
        answer, spec = self.answers[name], KINDS[name].spec
        assert bool(row.tokens) == work.sample and len(row.tokens) <= 1 + work.drafted
        assert len(row.logprobs) == len(row.tokens) * (spec.logprobs >= 0)
        assert row.accepted == max(0, len(row.tokens) - 1)
        answer.ids += row.tokens
        answer.entries += (bits(TokenLogprob(*entry)) for entry in row.logprobs)
        self.computed[name] += work.count - work.drafted + row.accepted
        self.drafted, self.accepted = self.drafted + work.drafted, self.accepted + row.accepted
