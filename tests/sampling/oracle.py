"""The sampler once more, slowly: Python loops and integers, libm, one row at a time; no code of ours."""

import math

import numpy as np

MASK = 2**32 - 1


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def word(seed, position, token, stream=0):
    seed %= 2**64
    return philox((position, token >> 2, stream, 0), (seed & MASK, seed >> 32))[token & 3]


def process(row, spec, ids, prompt_len, allowed=None):
    """float32 logits after mask, min_tokens, bias and penalties; `allowed` is a set of ids or None."""
    x = [np.float32(v) for v in row]
    for token in range(len(x)):
        if allowed is not None and token not in allowed:
            x[token] = np.float32(-math.inf)
        if token in spec.stop_ids and len(ids) - prompt_len < spec.min_tokens:
            x[token] = np.float32(-math.inf)
        for t, bias in spec.logit_bias:
            if t == token:
                x[token] += np.float32(bias)
        if token in ids:
            penalty = np.float32(spec.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        count = list(ids[prompt_len:]).count(token)
        if count:
            x[token] -= np.float32(count) * np.float32(spec.frequency_penalty)
            x[token] -= np.float32(spec.presence_penalty)
    return np.array(x, np.float32)


def order(x):
    return sorted(range(len(x)), key=lambda t: (-x[t], t))


def kept(x, spec):
    """Ids that temperature, top-k, top-p and min-p leave, in order."""
    ids = [t for t in order(x) if x[t] > -math.inf]
    z = {t: (float(x[t]) - float(x[ids[0]])) / spec.temperature for t in ids}
    if spec.top_k > 0:
        ids = ids[: spec.top_k]
    if spec.top_p < 1.0:
        total, before, head = math.fsum(math.exp(z[t]) for t in ids), 0.0, []
        for t in ids:
            if head and before >= spec.top_p * total:
                break
            head.append(t)
            before += math.exp(z[t])
        ids = head
    return [t for t in ids if math.exp(z[t]) >= spec.min_p], z


def log_exponential(k):
    return math.log(-math.log1p(-(k + 0.5) / 2**32))


def token(row, spec, ids, prompt_len, allowed=None):
    x = process(row, spec, ids, prompt_len, allowed)
    if spec.temperature == 0.0:
        return order(x)[0]
    ids_kept, z = kept(x, spec)
    return min(ids_kept, key=lambda t: (log_exponential(word(spec.seed, len(ids), t)) - z[t], t))


def entry(row, token, k):
    """(token, logprob in float64, rank, best)."""
    peak = float(max(row))
    log_sum = math.log(math.fsum(math.exp(float(v) - peak) for v in row)) + peak
    by_rank = order(row)
    best = tuple((t, float(row[t]) - log_sum) for t in by_rank[:k])
    return token, float(row[token]) - log_sum, by_rank.index(token) + 1, best


def bitmask(allowed, vocab):
    words = [0] * -(-vocab // 32)
    for t in allowed:
        words[t >> 5] |= 1 << (t & 31)
    return np.array(words, np.uint32).view(np.int32)


def chi_square_limit(freedom, sigmas=4.5):
    """A value that chi-square exceeds with the probability of `sigmas` (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + sigmas * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(observed, expected):
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
