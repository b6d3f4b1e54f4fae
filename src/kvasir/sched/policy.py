"""Verdicts of the scheduler as pure functions: facts in, verdict out. No clock, no state, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmitFacts:
    """What a gate may look at before a waiting sequence takes a row in this step."""

    free_rows: int
    budget: int  # tokens left in this step
    first_chunk: int  # tokens the sequence would compute in this step if the budget allows
    indivisible: bool
    blocks_fit: bool  # all that is known now, and one token more, fits the pools
    values_known: bool  # no step under way still samples for it
    prefix_under_way: bool = False  # one before it in the order of service computes a beginning that both share
    loading: bool = False  # blocks of it are on their way from a tier
    compiling: bool = False  # its grammar is not compiled yet


Gate = Callable[[AdmitFacts], bool]


def has_row(f: AdmitFacts) -> bool:
    return f.free_rows > 0


def has_budget(f: AdmitFacts) -> bool:
    return f.budget >= f.first_chunk if f.indivisible else f.budget > 0


def has_blocks(f: AdmitFacts) -> bool:
    return f.blocks_fit


def has_values(f: AdmitFacts) -> bool:
    return f.values_known


def has_prefix(f: AdmitFacts) -> bool:
    return not f.prefix_under_way


def has_loads(f: AdmitFacts) -> bool:
    return not f.loading


def has_guide(f: AdmitFacts) -> bool:
    return not f.compiling


# Gates that only postpone this one sequence: those behind it may pass.
OWN_GATES: tuple[Gate, ...] = (has_values, has_guide, has_loads, has_prefix)
# Gates of a shared resource: when one is shut, nobody behind may overtake, or the first would starve.
SHARED_GATES: tuple[Gate, ...] = (has_row, has_budget, has_blocks)


def chunk_tokens(
    pending: int, budget: int, decodes_to_come: int, max_chunk: int, indivisible: bool, prefill: int = 2**31
) -> int:
    """Tokens a sequence computes in this step: all of `pending`, or what the budget and `max_chunk` leave.

    One token of the budget is kept for each of the `decodes_to_come` behind it, so that a long prefill never stalls
    a decode; but whoever comes first always gets one token of what is left. `prefill` is what is left of the step's
    allowance for prefills (`step_budget`); one token alone is a decode and needs none of it.
    """
    room = max(budget - decodes_to_come, min(budget, 1))
    if pending > 1:
        room = min(room, prefill)
    if indivisible:
        return pending if pending <= room else 0
    return max(0, min(pending, room, max_chunk))


def victim(keys: Seq[tuple]) -> int:
    """Index of the running sequence that leaves when blocks run out: the one with the last key."""
    return max(range(len(keys)), key=keys.__getitem__)
