"""Sampling along a draft: each position from its own row of logits, as if a step of its own had come to it.

Speculative decoding (Leviathan et al., ICML 2023) accepts a draft with a probability that keeps the target's
distribution. Here a drafted id is right exactly if it is the one that the sampler draws at its place, which is a
function of the logits, the ids before it, the seed and the position: the answer is the one without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.plan import Work
from kvasir.runner.executor import Taken
from kvasir.runner.rows import Row

Draw = Callable[[int, int, bytes | None, bytes], Taken]


def along(work: Work, row: Row, mask: bytes | None, draw: Draw) -> Taken:
    """What was sampled after the known ids, and after each drafted one as long as all before it were right. mask: one
    after the other, of equal length. draw(i, known, mask, carry): samples from the i-th of the last rows of the work,
    after the first `known` ids of the row.

    An error at a drafted id ends the draft before it: the next step meets it again.
    """
    size = len(mask) // (work.drafted + 1) if mask is not None else 0
    tokens, entries, carry = [], [], row.carry
    for i in range(work.drafted + 1):
        known = row.known - work.drafted + i
        taken = draw(i, known, mask[i * size :][:size] if mask is not None else None, carry)
        if taken.error:
            if tokens:
                break
            return taken
        tokens += taken.tokens
        entries += taken.logprobs
        carry = taken.carry
        if known < row.known and row.ids[known] != tokens[-1]:
            break
    return Taken(tuple(tokens), tuple(entries), carry)
