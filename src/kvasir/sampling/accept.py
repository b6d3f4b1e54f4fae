"""Acceptance of drafted tokens by equality.

Speculative decoding (Leviathan et al., ICML 2023) accepts a draft with a probability that keeps the target's
distribution. Here more is kept. The target's own token at a position is a function of its logits, the ids
before it, seed and position (Gumbel-max with counter-based noise), so it can be sampled for every drafted
position at once; a draft is right exactly if it is that token. The answer is then identical to the one
without drafts, at any temperature, and nothing but the count of accepted tokens depends on the drafter.

    draft       d0  d1  d2          proposed
    sampled     s0  s1  s2  s3      s_i: the target's token after the known ids and d0 .. d_(i-1)
    accept = the number of leading i with d_i == s_i; the step brings s0 .. s_accept
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(sampled: Sequence[int], draft: Sequence[int]) -> int:
    """How many drafted ids are right: each equal to the sampled one, and all before it too.

    sampled: the target's tokens at the drafted positions, and usually one more after them. A failed row's
    token, -1, equals no draft.
    """
    count = 0
    for ours, drafted in zip(sampled, draft, strict=False):
        if ours != drafted or ours < 0:
            break
        count += 1
    return count
