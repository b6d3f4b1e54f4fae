"""Verdicts of the scheduler as pure functions: facts in, verdict out. No clock, no state, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnFacts:
    """What a gate may look at that postpones one waiting sequence and no one else."""

    values_known: bool  # no step under way still samples for it
    compiling: bool = False  # its grammar is not compiled yet
    loading: bool = False  # blocks of it are on their way from a tier


@dataclass(frozen=True, slots=True)
class AdmitFacts:
    """What a gate of a shared resource may look at before a waiting sequence takes a row in this step."""

    free_rows: int
    budget: int  # tokens left in this step
    first_chunk: int  # tokens the sequence would compute in this step if the budget allows
    indivisible: bool
    blocks_fit: bool  # all that is known now, and one token more, fits the pools
    outputs_fit: bool = True  # what it reads of encoders fits beside what others do, and a step can make it


def has_row(f: AdmitFacts) -> bool:
    return f.free_rows > 0


def has_budget(f: AdmitFacts) -> bool:
    return f.budget >= f.first_chunk if f.indivisible else min(f.budget, f.first_chunk) > 0


def has_blocks(f: AdmitFacts) -> bool:
    return f.blocks_fit


def has_outputs(f: AdmitFacts) -> bool:
    return f.outputs_fit


def has_values(f: OwnFacts) -> bool:
    return f.values_known


def has_loads(f: OwnFacts) -> bool:
    return not f.loading


def has_guide(f: OwnFacts) -> bool:
    return not f.compiling


# Gates that only postpone this one sequence: those after it may pass.
OWN_GATES: tuple[Callable[[OwnFacts], bool], ...] = (has_values, has_guide, has_loads)
# Gates of a shared resource: when one is shut, none after it may overtake, or the first would starve.
SHARED_GATES: tuple[Callable[[AdmitFacts], bool], ...] = (has_row, has_budget, has_blocks, has_outputs)


def chunk_tokens(
    pending: int, budget: int, decodes_to_come: int, max_chunk: int, indivisible: bool, prefill: int = 2**31
) -> int:
    """Tokens a sequence computes in this step: all of `pending`, or what the budget and `max_chunk` leave.

    One token of the budget is kept for each of the `decodes_to_come` after it, so that a long prefill never stalls
    a decode; but the first always gets one token of what is left. `prefill` is what is left of the step's
    allowance for prefills (`step_budget`); one token alone is a decode and needs none of it.
    """
    room = max(budget - decodes_to_come, min(budget, 1))
    if pending > 1:
        room = min(room, prefill)
    if indivisible:
        return pending if pending <= room else 0
    return max(0, min(pending, room, max_chunk))
