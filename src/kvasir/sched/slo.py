"""The order of service: classes, targets, turns. Pure functions over facts; the clock is the caller's.

Who wants prompt tokens computed is served in this order:

    the one that was promoted                          so that no one starves
    by class                                           interactive, batch, background
      who has given tokens already                     preempted in the middle of an answer
      by the tenant's turn                             see `fairness`
        by the request's own priority
          in time: the target can still be kept        shortest prefill first, those with one beginning together
          late: it is missed already                   first come, first served

Late ones come last since they have nothing left to lose, and others would miss their targets for them. Nor is anybody
hurried whose slack is nearly used up: in a queue that is too long all would come just before their time, or just after.

That alone could starve them, as classes could, and short prefills. So whoever has waited PATIENCE times its target may
be promoted above all: the one that is farthest beyond, one at a time, until it ends. A sequence beyond its patience
with k others farther beyond is thus promoted when at most k of these have ended, whoever else may come; and the
promoted one is always first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from kvasir.sched import fairness
from kvasir.sched.fairness import Fairness
from kvasir.types import ServiceClass, Target

PATIENCE = 5.0
CLASS_KEY = 3  # so many fields of a service key are of the class; turns come after them


class ServiceFacts(NamedTuple):
    """A sequence that has more than one token to compute, running or not."""

    order: int  # of arrival
    slo: ServiceClass
    target: Target
    waited: float  # seconds since its last token, or since it came
    prefill: int  # tokens to compute before its next one; those that the cache has do not count
    prefill_seconds: float  # that this will take
    tenant: str = ""
    priority: int = 0
    started: bool = False  # has given a token
    running: bool = False  # has a row
    promoted: bool = False
    prefix: Hashable = None  # sequences with an equal one begin alike; None: like no one


def slack(f: ServiceFacts) -> float:
    """Seconds that the prefill can be put off without missing the target; negative when it is missed already."""
    return f.target.ttft - f.waited - f.prefill_seconds


def service_key(f: ServiceFacts, group: int) -> tuple:
    """Where a sequence stands among those of its tenant and class. group: `order` of the first with its prefix."""
    # By powers of two: what is about as long stays together by prefix, and no one is overtaken for a few tokens.
    standing = (1, 0, 0) if slack(f) < 0 else (0, f.prefill.bit_length(), group)
    return (*_class_key(f), f.priority, *standing, not f.running, f.order)


def _class_key(f: ServiceFacts) -> tuple[bool, int, bool]:
    return not f.promoted, f.slo.rank, not f.started


def service_order(candidates: Sequence[ServiceFacts], shares: Mapping[ServiceClass, Fairness]) -> list[int]:
    """Indices of the candidates in the order of service. shares: of each class, in which all tenants are present."""
    groups: dict[Hashable, int] = {}
    for f in candidates:
        groups[f.prefix] = min(groups.get(f.prefix, f.order), f.order)
    keys = [service_key(f, f.order if f.prefix is None else groups[f.prefix]) for f in candidates]
    by_key = sorted(range(len(candidates)), key=keys.__getitem__)
    work: dict[ServiceClass, list[int]] = {}
    for i in by_key:
        work.setdefault(candidates[i].slo, []).append(i)
    if all(len(shares[c].weights) < 2 for c in work):
        return by_key  # one tenant's turns come in its own order
    turns = [0.0] * len(candidates)
    for service_class, members in work.items():
        tags = fairness.tags(shares[service_class], [(candidates[i].tenant, candidates[i].prefill) for i in members])
        for i, tag in zip(members, tags, strict=True):
            turns[i] = tag
    return sorted(by_key, key=lambda i: (*keys[i][:CLASS_KEY], turns[i]))


def promote(candidates: Sequence[ServiceFacts], taken: bool) -> int | None:
    """Index of the one to be promoted now: the farthest beyond its patience; None when no one is beyond. Who was
    promoted stays so until it ends; `taken` says that there is one."""
    if taken:
        return None
    beyond = [
        (f.waited - PATIENCE * f.target.ttft, -f.order, i)
        for i, f in enumerate(candidates)
        if f.waited > PATIENCE * f.target.ttft
    ]
    return max(beyond)[2] if beyond else None


def victim_key(promoted: bool, service_class: ServiceClass, lead: int, order: int) -> tuple[bool, int, int, int]:
    """The one with the last key leaves when blocks run out: it is of the last class, of the tenant that was served most
    (`fairness.lead`), and came last. One may only take blocks from another with a greater key."""
    return not promoted, service_class.rank, lead, order


def expired(waited: float, deadline: float | None) -> bool:
    """Whether a request that came `waited` seconds ago is beyond its own deadline."""
    return deadline is not None and waited >= deadline
