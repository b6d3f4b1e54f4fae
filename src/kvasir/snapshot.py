"""What an engine looks like at one moment, for people who watch it: bounded values that cross processes."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.types import EngineStats, ServiceClass


@dataclass(frozen=True, slots=True)
class AnswerState:
    """One answer in hand. row: of the runner, -1 while it waits. known, computed: counts of tokens, prompt included.
    age: seconds since its request arrived."""

    id: str
    index: int
    tenant: str
    slo: ServiceClass
    row: int
    prompt: int
    known: int
    computed: int
    cached: int
    preemptions: int
    age: float


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of a cache group (without scratch) in the order of their ids, `per_cell` of them in a cell: the state
    that most of them are in. total: blocks. runs: run lengths, (cell, count, cell, count, ...).

    A cell is 2 * owner + cached; owner is 0 for none, 1 for a pin alone, 2 for several answers, and 3 + r for row r;
    cached is 1 where the prefix tree holds the block, too. So 0 is free, and 1 is cached and idle.
    """

    kind: str
    window: int
    total: int
    per_cell: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that ran. decode_rows: sequences that got one token; prefill_tokens: those of the others."""

    step: int
    seconds: float
    decode_rows: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """now: the engine's monotonic clock, in seconds. answers: running ones first, the first ones alone when there are
    very many. steps: the last ones, in their order. rows: how many answers can run at once."""

    now: float
    stats: EngineStats
    answers: tuple[AnswerState, ...]
    groups: tuple[BlockMap, ...]
    steps: tuple[StepRecord, ...]
    rows: int = 0
