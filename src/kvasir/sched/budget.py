"""How many prompt tokens a step may take: as many as leave the running answers their pace. Pure functions.

The time of a step is taken to be linear in what it does,

    seconds = prefill tokens * p + decode rows * r + keys read * k + s

and the four costs are fitted to the steps as they are measured. Each counts by its relative error, so that a few long
steps do not drown the many short ones, and the newer ones count more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

DECAY = 0.99  # weight of a step in the fit, relative to the step after it
SWEEPS = 8  # of the solver, per step; it begins where it had stopped
SETTLED = 16  # steps after which the fit believes itself more than one odd step
ODD = 8.0  # a step that took so many times longer (or shorter) than foreseen counts as one that took just so much

PACE = 0.9  # of the target for a further token, what a step may take: steps are never quite as foreseen
STRETCH = 2.0  # a step may always take this many times what its decodes take alone, whatever their target
READING = 1.4  # with positions whose log-probabilities are read, what it may take of that time
LEAST_READ, BESIDE, MOST_READ = 4, 16, 128  # positions that a step may read beside decodes at least, at most; and alone
PATIENCE = 4  # of so many steps in a row with next to nothing for prefills, the last gives them a block


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step does. A decode row computes one token; the other rows compute `prefill_tokens` together. A position
    of these whose log-probabilities are read counts as a decode row, too: what both take is their logits. context: keys
    read, summed over all tokens that are computed."""

    decode_rows: int = 0
    prefill_tokens: int = 0
    context: int = 0


def chunk_context(start: int, count: int) -> int:
    """Keys that `count` tokens after `start` others read: each those before it and its own."""
    return count * start + count * (count + 1) // 2


# In the order of the solver: where steps cannot tell two costs apart, the one that comes first takes it all. So a
# prefill is not thought to be free as long as it has been seen in one length only.
_Vector = tuple[float, float, float, float]


def _features(load: StepLoad) -> _Vector:
    return float(load.prefill_tokens), float(load.decode_rows), float(load.context), 1.0


_ZERO: _Vector = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The fit. costs: seconds per prefill token, decode row, key and step, none negative; of a fresh one all 0."""

    costs: _Vector = _ZERO
    moments: tuple[_Vector, _Vector, _Vector, _Vector] = (_ZERO, _ZERO, _ZERO, _ZERO)  # sums of x x' / seconds**2
    sums: _Vector = _ZERO  # sums of x / seconds
    steps: int = 0


def predict(model: StepTime, load: StepLoad) -> float:
    """Seconds that a step will take; 0 as long as nothing was observed."""
    prefill, row, key, step = model.costs
    return math.fsum((prefill * load.prefill_tokens, row * load.decode_rows, key * load.context, step))


def observe(model: StepTime, load: StepLoad, seconds: float) -> StepTime:
    """The model with one more step. A time that no clock can have measured changes nothing."""
    if not 0 < seconds < math.inf:
        return model
    if model.steps >= SETTLED and (foreseen := predict(model, load)) > 0:
        seconds = min(max(seconds, foreseen / ODD), foreseen * ODD)
    x = tuple(v / seconds for v in _features(load))
    moments = tuple(
        tuple(DECAY * m + a * b for m, b in zip(row, x, strict=True))
        for row, a in zip(model.moments, x, strict=True)
    )  # fmt: skip
    sums = tuple(DECAY * s + a for s, a in zip(model.sums, x, strict=True))
    return StepTime(_solve(moments, sums, model.costs), moments, sums, model.steps + 1)  # type: ignore[arg-type]


def _solve(moments: tuple, sums: tuple, costs: _Vector) -> _Vector:
    """Least squares without negative costs, by descent along one of them at a time."""
    found = list(costs)
    for _ in range(SWEEPS):
        for i, row in enumerate(moments):
            if row[i] > 0:
                rest = sums[i] - sum(m * c for m, c in zip(row, found, strict=True)) + row[i] * found[i]
                found[i] = max(0.0, rest / row[i])
    return found[0], found[1], found[2], found[3]


def prefill_seconds(model: StepTime, start: int, tokens: int, chunk: int) -> float:
    """Seconds until `tokens` more after the first `start` of a sequence are computed, in steps of `chunk` of its
    own. Neighbours are not thought of: it is a lower bound, but for the error of the model."""
    prefill, _, key, step = model.costs
    steps = max(1, -(-tokens // max(chunk, 1)))
    return prefill * tokens + key * chunk_context(start, tokens) + step * steps


@dataclass(frozen=True, slots=True)
class BudgetFacts:
    """What the allowance for prefills depends on."""

    model: StepTime
    whole: int  # tokens a step can hold
    block: int  # tokens in a block of the KV cache
    decode_rows: int  # sequences that decode in this step
    decode_context: int  # keys they read
    tpot: float  # seconds: the tightest target among them; without meaning when there are none
    prefills: tuple[tuple[int, int], ...] = ()  # in the order of service: tokens computed already, and those to compute
    starved_steps: int = 0  # in a row without a block of prefill; see `count_starved`


def step_budget(facts: BudgetFacts) -> int:
    """Prompt tokens that this step may compute beside its decodes.

    All it can hold when no one decodes. Else as many of `prefills` as keep the step within PACE of the target, or
    within STRETCH times what its decodes take alone: a target that the machine cannot keep must not stop all prefills.
    And now and then a block, whatever the model says: it may be wrong.
    """
    f = facts
    if not f.decode_rows:
        return f.whole
    room = max(0, f.whole - f.decode_rows)
    limit = max(PACE * f.tpot, STRETCH * predict(f.model, StepLoad(f.decode_rows, 0, f.decode_context)))
    within, context = 0, f.decode_context
    for start, tokens in f.prefills:
        most = min(tokens, room - within)
        piece = _piece(f, within, context, start, most, limit)
        within, context = within + piece, context + chunk_context(start, piece)
        if piece < tokens:
            break
    return max(within, prefill_share(f.starved_steps, f.block, f.whole))


def read_budget(model: StepTime, decode_rows: int, decode_context: int) -> int:
    """Positions of prompts of which this step may read log-probabilities.

    Each costs as much as the logits of an answer's token, and a prompt has thousands: beside decodes as many as make
    the step READING times as long as these alone, by the model, but always a few, and never many: rows of answers
    share the reading of the weights, so that the model may think them cheaper than those of a prompt are.
    """
    if not decode_rows:
        return MOST_READ
    row = model.costs[1]
    room = (READING - 1.0) * predict(model, StepLoad(decode_rows, 0, decode_context))
    return max(LEAST_READ, int(min(room / row, BESIDE)) if row > 0 else 0)


def prefill_share(starved_steps: int, block: int, whole: int) -> int:
    """Tokens of a step that are for prefills whatever else it could compute: a block in each PATIENCE steps."""
    return min(block, whole) if starved_steps >= PATIENCE - 1 else 0


def _piece(f: BudgetFacts, before: int, context: int, start: int, most: int, limit: float) -> int:
    """How many tokens of a prefill, at most `most`, a step can take within `limit` beside `before` of others."""

    def seconds(tokens: int) -> float:
        load = StepLoad(f.decode_rows, before + tokens, context + chunk_context(start, tokens))
        return predict(f.model, load)

    return most if seconds(most) <= limit else bisect_right(range(1, most + 1), limit, key=seconds)


def count_starved(before: int, wanted: int, given: int, block: int) -> int:
    """Steps in a row in which prefills that had `wanted` tokens to compute were `given` next to nothing: less than
    1 / PATIENCE of a block. So they get a block in PATIENCE**2 steps at the latest."""
    return before + 1 if PATIENCE * given < min(wanted, block) else 0
