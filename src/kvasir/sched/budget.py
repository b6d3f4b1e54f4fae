"""How many prompt tokens a step may compute without slowing the running sequences below their pace. Pure functions.

The time of a step is modelled as linear in its load,

    seconds = prefill tokens * p + decode rows * r + keys read * k + s

and the four costs are fitted to measured steps. The fit minimizes relative errors, so that a few long steps do not
outweigh the many short ones, and newer steps weigh more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

DECAY = 0.99  # weight of a step in the fit, relative to the step after it
SWEEPS = 8  # sweeps of the solver per step; each solve starts from the previous solution
SETTLED = 16  # steps after which outliers are clamped
ODD = 8.0  # a measured time is clamped to within this factor of the predicted time

PACE = 0.9  # fraction of the time-per-token target that a step may take: predictions are never exact
STRETCH = 2.0  # a step may always take this many times what its decodes take alone, whatever their target
READING = 1.4  # a step that reads log-probabilities of positions may take this many times what its decodes take alone
LEAST_READ, BESIDE, MOST_READ = 4, 16, 128  # positions that a step may read: least and most with decodes, most without
STARVED_STEPS = 4  # of this many consecutive steps with almost no prefill tokens, the last gives prefills a block


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes. A decode row computes one token; the other rows compute `prefill_tokens` in total. A prompt
    position whose log-probabilities are read also counts as a decode row, because both need logits. context: keys
    read, summed over all computed tokens."""

    decode_rows: int = 0
    prefill_tokens: int = 0
    context: int = 0


def chunk_context(start: int, count: int) -> int:
    """Keys that `count` tokens after the first `start` read: each reads the keys before it and its own."""
    return count * start + count * (count + 1) // 2


# In the solver's order: if the measured steps cannot separate two costs, the first one takes the total. So prefills do
# not look free while only one length has been measured.
_Vector = tuple[float, float, float, float]


def _features(load: StepLoad) -> _Vector:
    return float(load.prefill_tokens), float(load.decode_rows), float(load.context), 1.0


_ZERO: _Vector = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The fitted model. costs: seconds per prefill token, decode row, key and step; never negative, initially 0."""

    costs: _Vector = _ZERO
    moments: tuple[_Vector, _Vector, _Vector, _Vector] = (_ZERO, _ZERO, _ZERO, _ZERO)  # sums of x x' / seconds**2
    sums: _Vector = _ZERO  # sums of x / seconds
    steps: int = 0


def predict(model: StepTime, load: StepLoad) -> float:
    """Seconds that a step will take; 0 before any step was observed."""
    prefill, row, key, step = model.costs
    return math.fsum((prefill * load.prefill_tokens, row * load.decode_rows, key * load.context, step))


def observe(model: StepTime, load: StepLoad, seconds: float) -> StepTime:
    """The model after one more measured step. Ignores times that are not positive and finite."""
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
    """Non-negative least squares by coordinate descent."""
    found = list(costs)
    for _ in range(SWEEPS):
        for i, row in enumerate(moments):
            if row[i] > 0:
                rest = sums[i] - sum(m * c for m, c in zip(row, found, strict=True)) + row[i] * found[i]
                found[i] = max(0.0, rest / row[i])
    return found[0], found[1], found[2], found[3]


def prefill_seconds(model: StepTime, start: int, tokens: int, chunk: int) -> float:
    """Seconds to compute `tokens` tokens after the first `start` of a sequence, in steps of `chunk` tokens each.
    Ignores the other sequences of those steps: apart from the model's error, a lower bound."""
    prefill, _, key, step = model.costs
    steps = max(1, -(-tokens // max(chunk, 1)))
    return prefill * tokens + key * chunk_context(start, tokens) + step * steps


@dataclass(frozen=True, slots=True)
class BudgetFacts:
    """Inputs of `step_budget`."""

    model: StepTime
    whole: int  # tokens a step can hold
    block: int  # tokens in a block of the KV cache
    decode_rows: int  # sequences that decode in this step
    decode_context: int  # keys they read
    tpot: float  # seconds per token: the tightest target among them; meaningless without decodes
    prefills: tuple[tuple[int, int], ...] = ()  # in the order of service: tokens already computed, tokens to compute
    starved_steps: int = 0  # consecutive steps that starved prefills; see `count_starved`


def step_budget(facts: BudgetFacts) -> int:
    """Prompt tokens that this step may compute besides its decodes.

    Without decodes, all that the step can hold. Otherwise as many tokens of `prefills` as keep the step within PACE of
    the target, or within STRETCH times what its decodes take alone: a target that the machine cannot meet must not
    stop all prefills. `prefill_share` is the minimum, whatever the model predicts, since it may be wrong.
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
    """Prompt positions whose log-probabilities this step may read.

    Each position costs as much as the logits of a sampled token, and a prompt has thousands. With decodes, as many
    positions as make the step READING times as long as its decodes alone, by the model; at least LEAST_READ, and at
    most BESIDE, because decode rows share one read of the weights, so the model may underestimate the cost of a prompt
    position. Without decodes, MOST_READ.
    """
    if not decode_rows:
        return MOST_READ
    row = model.costs[1]
    room = (READING - 1.0) * predict(model, StepLoad(decode_rows, 0, decode_context))
    return max(LEAST_READ, int(min(room / row, BESIDE)) if row > 0 else 0)


def prefill_share(starved_steps: int, block: int, whole: int) -> int:
    """Tokens of a step that are reserved for prefills: a block after STARVED_STEPS - 1 starved steps, else 0."""
    return min(block, whole) if starved_steps >= STARVED_STEPS - 1 else 0


def _piece(f: BudgetFacts, before: int, context: int, start: int, most: int, limit: float) -> int:
    """How many tokens of a prefill, at most `most`, fit into a step of `limit` seconds after `before` prompt tokens
    of others."""

    def seconds(tokens: int) -> float:
        load = StepLoad(f.decode_rows, before + tokens, context + chunk_context(start, tokens))
        return predict(f.model, load)

    return most if seconds(most) <= limit else bisect_right(range(1, most + 1), limit, key=seconds)


def count_starved(before: int, wanted: int, given: int, block: int) -> int:
    """The number of consecutive steps, `before` of them before this one, that starved prefills: these wanted `wanted`
    tokens and got less than 1 / STARVED_STEPS of that, or of a block if they wanted more. So prefills get a block in at
    most STARVED_STEPS**2 steps."""
    return before + 1 if STARVED_STEPS * given < min(wanted, block) else 0
