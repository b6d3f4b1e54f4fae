"""Fair shares between tenants of one class: virtual token counters, as pure state transitions.

After Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant's counter grows by the tokens it
is served, divided by its weight; the tenant with the lowest counter goes first. A tenant that returns gets at least the
lowest counter of the tenants present: absence earns no credit and cancels no debt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

PROMPT_COST = 1.0
GENERATED_COST = 2.0  # relative to a prompt token: it takes its own row in a step, and cannot be computed in bulk
COARSE = 1024.0  # weighted tokens; a smaller difference does not justify a preemption


@dataclass(frozen=True, slots=True)
class Fairness:
    """counters: weighted tokens served, for tenants that are present or ahead of `floor`. weights: of the present
    tenants. floor: the lowest counter of the present tenants; it never falls."""

    counters: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0


def present(state: Fairness, weights: Mapping[str, float]) -> Fairness:
    """Sets the tenants that have requests now, with their weights (above 0). Call it before tenants are charged or
    ordered. A tenant that was absent starts at the floor, unless it is ahead of it."""
    if state.weights == weights:
        return state
    floor = _floor(state)
    counters = {t: c for t, c in state.counters.items() if c > floor or t in weights}
    for tenant in weights:
        if tenant not in state.weights:
            counters[tenant] = max(counters.get(tenant, floor), floor)
    return Fairness(counters, dict(weights), floor)


def _floor(state: Fairness) -> float:
    return max(state.floor, min((state.counters[t] for t in state.weights), default=state.floor))


def charge(state: Fairness, served: Mapping[str, tuple[int, int]]) -> Fairness:
    """Adds the cost of served tokens to the counters. served: prompt and generated tokens per present tenant."""
    counters = dict(state.counters)
    for tenant, (prompt_tokens, generated_tokens) in served.items():
        cost = PROMPT_COST * prompt_tokens + GENERATED_COST * generated_tokens
        counters[tenant] += cost / state.weights[tenant]
    return replace(state, counters=counters)


def order(state: Fairness, tenants: Iterable[str]) -> list[str]:
    """The tenants (all present), least served first; ties keep the given order."""
    return sorted(tenants, key=state.counters.__getitem__)


def tags(state: Fairness, work: Iterable[tuple[str, float]]) -> list[float]:
    """The counter of its tenant at which each item of work (tenant, prompt tokens) begins. The items of one tenant must
    be in their order of service. Sorted by tag, the items of all tenants are in fair order."""
    counters = dict(state.counters)
    found = []
    for tenant, tokens in work:
        found.append(counters[tenant])
        counters[tenant] += PROMPT_COST * tokens / state.weights[tenant]
    return found


def lead(state: Fairness, tenant: str) -> int:
    """How far a tenant is ahead of the lowest present tenant, in units of COARSE, so that it seldom changes."""
    return int(max(0.0, state.counters[tenant] - _floor(state)) // COARSE)
