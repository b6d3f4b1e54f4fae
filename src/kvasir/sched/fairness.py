"""Fair shares between tenants of one class: virtual token counters, as pure state transitions.

After Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant's counter grows by what it is
served, divided by its weight, and the lowest goes first. Who was away comes back at the lowest counter of those who
were not: absence saves up nothing, and neither does it pay a debt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

PROMPT_COST = 1.0
GENERATED_COST = 2.0  # beside a prompt token: it has a row of its own in a step, and cannot be computed in bulk
COARSE = 1024.0  # weighted tokens: what differs by less is no reason to preempt


@dataclass(frozen=True, slots=True)
class Fairness:
    """counters: weighted tokens served, of the tenants present and of those absent that are ahead of `floor`.
    weights: of the tenants present. floor: the lowest counter of those present; it never falls."""

    counters: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0


def present(state: Fairness, weights: Mapping[str, float]) -> Fairness:
    """Says which tenants have requests now, with their weights (above 0). To be called before tenants are charged or
    ordered: those who come newly get the floor, unless they are ahead of it."""
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
    """Tenants, which are present, were served so many prompt and generated tokens."""
    counters = dict(state.counters)
    for tenant, (prompt_tokens, generated_tokens) in served.items():
        cost = PROMPT_COST * prompt_tokens + GENERATED_COST * generated_tokens
        counters[tenant] += cost / state.weights[tenant]
    return replace(state, counters=counters)


def order(state: Fairness, tenants: Iterable[str]) -> list[str]:
    """The tenants (each present), who was served least first; of equals the one that was named first."""
    return sorted(tenants, key=state.counters.__getitem__)


def tags(state: Fairness, work: Iterable[tuple[str, float]]) -> list[float]:
    """For each piece of work (tenant, prompt tokens), in the order in which its tenant wants it done, where its
    tenant's counter will be when its turn comes. Sorted by that, the pieces of all tenants are in fair order."""
    counters = dict(state.counters)
    found = []
    for tenant, tokens in work:
        found.append(counters[tenant])
        counters[tenant] += PROMPT_COST * tokens / state.weights[tenant]
    return found


def lead(state: Fairness, tenant: str) -> int:
    """How far a tenant is ahead of the lowest one present, coarsely, so that it seldom changes."""
    return int(max(0.0, state.counters[tenant] - _floor(state)) // COARSE)
