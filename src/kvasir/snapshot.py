"""A snapshot of an engine for monitoring: values of bounded size that can be sent between processes."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.statistics import EngineStats
from kvasir.types import ServiceClass


@dataclass(frozen=True, slots=True)
class AnswerState:
    """One unfinished sequence. id, index: of its request, and of the choice in it. row: of the runner, -1 while it
    waits. prompt: tokens of the prompt. known, computed: counts of tokens, prompt included. age: seconds since its
    request arrived."""

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
    """The blocks of a cache group (without scratch) in the order of their ids. A cell is the most common state of
    `per_cell` blocks. bound: the greatest number of a sequence's positions whose blocks are needed, 0 for the whole
    sequence. total: blocks. runs: run lengths, (cell, count, cell, count, ...).

    A cell is 2 * owner + cached. owner: 0 for none, 1 for only a pin, 2 for several sequences, 3 + r for row r. cached:
    1 if the prefix tree holds the block too. So 0 is free, and 1 is cached and idle.
    """

    kind: str
    bound: int
    total: int
    per_cell: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A completed step. decode_rows: sequences that computed one token. prefill_tokens: tokens of all others."""

    step: int
    seconds: float
    decode_rows: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an engine. now: its monotonic clock, in seconds. answers: unfinished sequences, running ones first;
    cut off if there are very many. groups: one map per cache group. steps: the last steps, in order. rows: how many
    sequences can run at once."""

    now: float
    stats: EngineStats
    answers: tuple[AnswerState, ...]
    groups: tuple[BlockMap, ...]
    steps: tuple[StepRecord, ...]
    rows: int = 0
