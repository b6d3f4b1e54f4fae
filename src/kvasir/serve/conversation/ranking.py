"""The best of several choices."""

from __future__ import annotations

import math
from dataclasses import replace

from kvasir.engine.answer import Answer


def best(answers: list[Answer], n: int, always: bool = False) -> list[Answer]:
    """The n choices whose tokens have the highest mean log-probability, best first, renumbered; unchanged if there are
    at most n, unless `always`. Ties keep their order."""
    if len(answers) <= n and not always:
        return answers

    def mean(answer: Answer) -> float:
        found = [info.logprob for info in answer.logprobs if info.logprob is not None]
        return math.fsum(found) / len(found) if found else -math.inf

    order = sorted(answers, key=lambda answer: (-mean(answer), answer.index))
    return [replace(answer, index=i) for i, answer in enumerate(order[:n])]
