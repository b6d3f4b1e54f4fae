"""Which replica computes a request. Pure functions of facts: no clock, no state, no I/O.

`cost` predicts in seconds how long a replica would take for the whole request. A step of an engine computes a token of
every running answer, and in the rest of its time prompts:

    |-- decodes --|------ prompts ------|     the step's time is bound by its target (sched.budget)

so prompts advance at the share that decodes leave. The time to the first token is that of all prompt tokens before it,
and its own that are not cached, at this pace; then each token of the answer takes a step of the decodes. What is cached
saves the same time to every request that waits for its first token there.

The other policies are for comparison:

    round-robin     one replica after the other
    least-busy      the fewest requests
    dynamo          blocks to prefill, less what is cached, plus blocks in use (docs.dynamo.nvidia.com, routing)
    prefix          the longest cached prefix, if it is a tenth of the prompt, else the least busy: as in Ray's
                    PrefixCacheAffinityRouter and SGLang's router, which leave a replica that is too far ahead
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.sched.budget import PACE, STRETCH, StepLoad, StepTime, chunk_context, predict

ANSWER = 256.0  # tokens of an answer, as long as nothing is known about answers
DYNAMO_BLOCK = 16  # tokens of a block in Dynamo's cost
UNMEASURED = StepTime()
MATCH = 0.1  # share of a prompt that must be cached before `prefix` prefers that replica
AHEAD, RATIO = (
    32,
    1.5,
)  # `prefix` spreads requests if one replica has as many more, and as many times more, than another


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of one replica when a request arrives.

    cached: tokens of the request's prompt in its prefix cache. requests: that it has. backlog: prompt tokens that they
    still have to compute. rows: answers under way. context: tokens of these. model: the measured times of its steps.
    tpot: its target, in seconds per token."""

    cached: int = 0
    requests: int = 0
    backlog: int = 0
    rows: int = 0
    context: int = 0
    model: StepTime = UNMEASURED
    tpot: float = 0.1


def decode_seconds(f: ReplicaFacts) -> float:
    """Seconds of a step that computes only a token of each answer; 0 without answers."""
    return predict(f.model, StepLoad(f.rows, 0, f.context)) if f.rows else 0.0


def prompt_share(f: ReplicaFacts) -> float:
    """The share of a step's time that prompts get beside the answers under way."""
    alone = decode_seconds(f)
    return 1.0 - alone / max(PACE * f.tpot, STRETCH * alone) if alone else 1.0


def first_seconds(f: ReplicaFacts, prompt: int) -> float:
    """Predicted seconds to the first token of a prompt of this length; 0 if no step has been measured."""
    own = max(1, prompt - f.cached)
    load = StepLoad(0, f.backlog + own, chunk_context(f.cached, own))
    return predict(f.model, load) / prompt_share(f)


def saved_seconds(f: ReplicaFacts) -> float:
    """Predicted seconds that the requests which wait for their first token are spared by what is cached of this one."""
    token, _, key, _ = f.model.costs
    saved = token * f.cached + key * chunk_context(0, f.cached)
    return max(0, f.requests - f.rows) * saved / prompt_share(f)


def cost(f: ReplicaFacts, prompt: int, answer: float = ANSWER) -> float:
    """Predicted seconds for a request of `prompt` tokens with an answer of `answer` tokens, less what others save."""
    step = predict(f.model, StepLoad(f.rows + 1, 0, f.context + prompt))
    return first_seconds(f, prompt) + answer * step - saved_seconds(f)


Rank = Callable[[ReplicaFacts, int, float], float]


def _busy(f: ReplicaFacts, prompt: int, answer: float) -> float:
    return f.requests


def _dynamo(f: ReplicaFacts, prompt: int, answer: float) -> float:
    active = -(-f.context // DYNAMO_BLOCK)
    incoming = -(-prompt // DYNAMO_BLOCK)
    raw = -(-f.backlog // DYNAMO_BLOCK) + incoming
    return max(raw - f.cached // DYNAMO_BLOCK, 0) + active + incoming


_RANKS: dict[str, Rank] = {"cost": cost, "least-busy": _busy, "dynamo": _dynamo}
POLICIES = ("cost", "round-robin", "least-busy", "dynamo", "prefix")


def choose(policy: str, facts: Sequence[ReplicaFacts], prompt: int, turn: int = 0, answer: float = ANSWER) -> int:
    """The index of the replica that computes a request; of equal ones the first, counted from the turn.

    policy: one of POLICIES. facts: of each replica, at least one. prompt: tokens. turn: the number of requests so far.
    answer: tokens that an answer usually has."""
    count = len(facts)
    if policy == "round-robin":
        return turn % count
    if policy == "prefix":
        policy = "least-busy"
        best = max(range(count), key=lambda i: (facts[i].cached, -facts[i].requests, -i))
        busy = [f.requests for f in facts]
        spread = max(busy) > min(busy) + AHEAD and max(busy) > RATIO * min(busy)
        if facts[best].cached >= MATCH * prompt and not spread:
            return best
    rank = _RANKS[policy]
    return min(range(count), key=lambda i: (rank(facts[i], prompt, answer), (i - turn) % count))
