"""The further samplers once more: plain numpy and libm, from their papers and llama.cpp; no code of ours."""

import math
from itertools import pairwise

import numpy as np

from tests.sampling.oracle import log_exponential, order, word


class OnAnEdge(Exception):
    """Rounding decides."""


def apart(a, b, by=1e-7):
    if a != b and abs(a - b) <= by * max(1.0, abs(a), abs(b)):
        raise OnAnEdge
    return a - b


def probabilities(z):
    """By id, of z by id."""
    peak = max(z.values())
    total = math.fsum(math.exp(v - peak) for v in z.values())
    return {t: math.exp(v - peak) / total for t, v in z.items()}


def entropy(p):
    return -math.fsum(v * math.log(v) for v in p.values() if v > 0)


def nucleus(ids, p, mass):
    kept, reached = [], 0.0
    for t in ids:
        if kept and apart(reached, mass) >= 0:
            break
        kept.append(t)
        reached += p[t]
    return kept


def narrowed(x, spec, position, mu=None):
    """z by id of the tokens that are left, in the chain's order."""
    x = [float(v) for v in x]
    ids = [t for t in order(x) if x[t] > -math.inf]
    if spec.top_n_sigma > 0:
        peak, sigma = x[ids[0]], float(np.std([x[t] for t in ids]))
        ids = [t for t in ids if t == ids[0] or apart(x[t], peak - spec.top_n_sigma * sigma) >= 0]
    if spec.top_k > 0:
        ids = ids[: spec.top_k]
    dynamic = spec.dynatemp_range > 0
    z = {t: x[t] / (1.0 if dynamic else spec.temperature) for t in ids}
    if spec.typical_p < 1.0:
        p = probabilities(z)
        expected = entropy(p)
        away = {t: abs(-(math.log(p[t]) if p[t] else -math.inf) - expected) for t in ids}
        ranked = sorted(ids, key=lambda t: (away[t], t))
        for a, b in pairwise(ranked):
            if x[a] != x[b]:
                apart(away[a], away[b])
                if away[a] == away[b]:
                    raise OnAnEdge
        ids = nucleus(ranked, p, spec.typical_p)
        z = {t: z[t] for t in order(x) if t in ids}
    if spec.top_p < 1.0:
        z = {t: z[t] for t in nucleus(list(z), probabilities(z), spec.top_p)}
    if spec.min_p > 0.0:
        peak = max(z.values())
        z = {t: v for t, v in z.items() if v == peak or apart(math.exp(v - peak), spec.min_p) >= 0}
    if spec.xtc_probability > 0 and (word(spec.seed, position, 0, 1) + 0.5) / 2**32 <= spec.xtc_probability:
        p = probabilities(z)
        above = [t for t in z if apart(p[t], spec.xtc_threshold) >= 0]
        z = {t: v for t, v in z.items() if t not in above[:-1]}
    if dynamic and len(z) > 1:
        share = min(1.0, entropy(probabilities(z)) / math.log(len(z)))
        low, high = max(0.0, spec.temperature - spec.dynatemp_range), spec.temperature + spec.dynatemp_range
        temperature = max(1e-5, low + (high - low) * share**spec.dynatemp_exponent)
        z = {t: v / temperature for t, v in z.items()}
    if spec.mirostat:
        p, best = probabilities(z), next(iter(z))
        z = {t: v for t, v in z.items() if t == best or (p[t] and apart(mu, -math.log2(p[t])) >= 0)}
    return z


def preferred(p, target, state):
    """What adaptive-p makes of probabilities: new z by id. state: weighted sum of probabilities, sum of weights."""
    aim = min(max(2 * target - state[0] / state[1], 0.0), 1.0)
    far = {t: abs(v - aim) / 0.3 for t, v in p.items()}
    return {t: 5 - 10 * d * d / (1 + d) for t, d in far.items()}


def drawn_adaptively(x, spec, position, state):
    """(token, state after it)."""
    p = probabilities(narrowed(x, spec, position))
    z = preferred(p, spec.adaptive_target, state)
    scores = sorted((log_exponential(word(spec.seed, position, t)) - v, t) for t, v in z.items())
    if len(scores) > 1:
        apart(scores[0][0], scores[1][0])
    token, decay = scores[0][1], spec.adaptive_decay
    return token, (p[token] + decay * state[0], 1 + decay * state[1])


def drawn(x, spec, position, mu=None):
    """(token, mu after it)."""
    z = narrowed(x, spec, position, mu)
    peak = max(z.values())
    scores = sorted((log_exponential(word(spec.seed, position, t)) - (z[t] - peak), t) for t in z)
    if len(scores) > 1:
        apart(scores[0][0], scores[1][0])
    token = scores[0][1]
    if not spec.mirostat:
        return token, None
    return token, mu - spec.mirostat_eta * (-math.log2(probabilities(z)[token]) - spec.mirostat_tau)


def repeats(ids):
    """For each place, how many ids up to it equal the last ones."""
    lengths = []
    for place in range(len(ids)):
        n = 0
        while n <= place and ids[place - n] == ids[-1 - n]:
            n += 1
        lengths.append(n)
    return lengths


def dry_penalties(ids, spec, alone, sequences):
    """What DRY takes from tokens' logits, place by place. alone: a set of ids."""
    ids = list(ids)[-spec.dry_penalty_last_n :] if spec.dry_penalty_last_n > 0 else list(ids)
    limit = len(ids)
    for head in reversed(range(len(ids))):
        breakers = [s for s in [(ids[head],)] * (ids[head] in alone) + list(sequences) if s]
        ends = [head + len(s) for s in breakers if tuple(ids[head : head + len(s)]) == s]
        if ends:
            limit = len(ids) - max(ends)
            break
    found = {}
    for place, n in enumerate(repeats(ids)[:-1]):
        token, n = ids[place + 1], min(n, limit)
        if n >= spec.dry_allowed_length and token not in alone:
            exponent = n - spec.dry_allowed_length
            try:
                penalty = spec.dry_multiplier * spec.dry_base**exponent
            except OverflowError:
                penalty = math.inf
            found[token] = max(found.get(token, 0.0), min(penalty, float(np.finfo(np.float32).max)))
    return found
