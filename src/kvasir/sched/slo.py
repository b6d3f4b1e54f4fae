"""The order of service: classes, targets, turns. Pure functions of facts; the caller supplies the time.

Sequences that want prefill are served in this order:

    the promoted sequence                              so that nothing starves
    by class                                           interactive, batch, background
      sequences that have sampled tokens               preempted during decode
      by the tenant's turn                             see `fairness`
        by the request's own priority
          in time: the target can still be met         shortest prefill first, equal prefixes together; of similar
                                                       lengths, requests that end with their prefill
          late: the target is missed already           first come, first served

Late sequences come last: they have nothing left to lose, and serving them would make others miss their targets.
Sequences with little slack left are not hurried: in an overloaded queue all of them would be served just before or just
after their targets.

Late sequences alone could starve this way, as could lower classes and long prefills. So a sequence that has waited
PROMOTE_AFTER times its target may be promoted above all others: the one furthest past it, one at a time, until it ends.
If k others are further past that time, a sequence is promoted after at most k of them have ended, whatever else
arrives. The promoted sequence is always served first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from kvasir.sched import fairness
from kvasir.sched.fairness import Fairness
from kvasir.types import ServiceClass, Target

PROMOTE_AFTER = 5.0
CLASS_KEY = 3  # leading fields of a service key that rank above the tenants' turns


class ServiceFacts(NamedTuple):
    """A sequence that has more than one token to compute, running or not."""

    order: int  # of arrival
    slo: ServiceClass
    target: Target
    waited: float  # seconds since its last token, or since its arrival
    prefill: int  # tokens to compute before its next token, without those in the prefix cache
    prefill_seconds: float  # predicted time of the prefill
    tenant: str = ""
    priority: int = 0
    started: bool = False  # has sampled a token
    running: bool = False  # has a row
    promoted: bool = False
    prefix: Hashable = None  # equal for sequences that share a prefix; None: shared with no other
    prefill_only: bool = False  # ends with its prefill, as an embedding does, and shares nothing


def slack(f: ServiceFacts) -> float:
    """Seconds that the prefill can be delayed without missing the target; negative if it is missed already."""
    return f.target.ttft - f.waited - f.prefill_seconds


def service_key(f: ServiceFacts, group: int) -> tuple:
    """Sort key of a sequence among those of its tenant and class. group: lowest `order` with its prefix."""
    # By powers of two: prefills of similar length stay together by prefix, and a few tokens do not change the order.
    # Requests that end with their prefill have no such reason, and are served by their exact length (arXiv:2505.07203).
    kind = (False, f.prefill) if f.prefill_only else (True, group)
    standing = (1, 0, False, 0) if slack(f) < 0 else (0, f.prefill.bit_length(), *kind)
    return (*_class_key(f), f.priority, *standing, not f.running, f.order)


def _class_key(f: ServiceFacts) -> tuple[bool, int, bool]:
    return not f.promoted, f.slo.rank, not f.started


def service_order(candidates: Sequence[ServiceFacts], shares: Mapping[ServiceClass, Fairness]) -> list[int]:
    """Indices of the candidates in the order of service. shares: of each class; all tenants must be present in it."""
    groups: dict[Hashable, int] = {}
    for f in candidates:
        groups[f.prefix] = min(groups.get(f.prefix, f.order), f.order)
    keys = [service_key(f, f.order if f.prefix is None else groups[f.prefix]) for f in candidates]
    by_key = sorted(range(len(candidates)), key=keys.__getitem__)
    work: dict[ServiceClass, list[int]] = {}
    for i in by_key:
        work.setdefault(candidates[i].slo, []).append(i)
    if all(len(shares[c].weights) < 2 for c in work):
        return by_key  # a single tenant needs no turns
    turns = [0.0] * len(candidates)
    for service_class, members in work.items():
        tags = fairness.tags(shares[service_class], [(candidates[i].tenant, candidates[i].prefill) for i in members])
        for i, tag in zip(members, tags, strict=True):
            turns[i] = tag
    return sorted(by_key, key=lambda i: (*keys[i][:CLASS_KEY], turns[i]))


def promote(candidates: Sequence[ServiceFacts], taken: bool) -> int | None:
    """Index of the candidate to promote: the one that has exceeded PROMOTE_AFTER times its target the most; None if
    none has. taken: a promoted sequence exists, so none is promoted until it ends."""
    if taken:
        return None
    beyond = [
        (f.waited - PROMOTE_AFTER * f.target.ttft, -f.order, i)
        for i, f in enumerate(candidates)
        if f.waited > PROMOTE_AFTER * f.target.ttft
    ]
    return max(beyond)[2] if beyond else None


def victim_key(promoted: bool, service_class: ServiceClass, lead: int, order: int) -> tuple[bool, int, int, int]:
    """Sort key of preemption. When blocks run out, the sequence with the greatest key is preempted: lowest class, most
    served tenant (`fairness.lead`), latest arrival. A sequence may take blocks only from one with a greater key."""
    return not promoted, service_class.rank, lead, order


def expired(waited: float, deadline: float | None) -> bool:
    """Whether a request that arrived `waited` seconds ago is past its deadline."""
    return deadline is not None and waited >= deadline
