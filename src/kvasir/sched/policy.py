"""Decisions of the scheduler as pure functions of facts: no clock, no state, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnFacts:
    """Inputs of a gate that postpones a single waiting sequence."""

    values_known: bool  # no pending step samples for it
    compiling: bool = False  # its grammar is not compiled yet
    loading: bool = False  # its blocks are being fetched from a tier


@dataclass(frozen=True, slots=True)
class AdmitFacts:
    """Inputs of a gate of a shared resource, for a waiting sequence that may take a row in this step."""

    free_rows: int
    budget: int  # tokens left in this step
    first_chunk: int  # tokens that the sequence would compute in this step
    indivisible: bool
    blocks_fit: bool  # all known tokens and one more fit the pools
    outputs_fit: bool = True  # the encoder outputs it reads fit along with those of others, and a step can make them


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


# Gates that postpone only this sequence: later ones may overtake it.
OWN_GATES: tuple[Callable[[OwnFacts], bool], ...] = (has_values, has_guide, has_loads)
# Gates of a shared resource: if one is closed, no later sequence may overtake, or this one would starve.
SHARED_GATES: tuple[Callable[[AdmitFacts], bool], ...] = (has_row, has_budget, has_blocks, has_outputs)


def chunk_tokens(
    pending: int, budget: int, decodes_to_come: int, max_chunk: int, indivisible: bool, prefill: int = 2**31
) -> int:
    """Tokens that a sequence computes in this step: all of `pending`, or as many as the budget and `max_chunk` allow.

    One token of the budget is kept for each of the `decodes_to_come` after it, so that a long prefill never stalls
    a decode; but the sequence always gets one token of a nonempty budget. prefill: what is left of the step's
    allowance for prefills (`step_budget`); a single token is a decode and is not bound by it.
    """
    room = max(budget - decodes_to_come, min(budget, 1))
    if pending > 1:
        room = min(room, prefill)
    if indivisible:
        return pending if pending <= room else 0
    return max(0, min(pending, room, max_chunk))
