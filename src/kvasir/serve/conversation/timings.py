"""Timings of a choice, in the format of llama.cpp's server."""

from __future__ import annotations

from kvasir.engine.pace import Pace
from kvasir.types import Usage


def timings_object(pace: Pace, usage: Usage) -> dict[str, float]:
    """llama.cpp's timings of one choice so far, in milliseconds. The prompt's time starts with the request, so it
    includes queueing; the generation's time starts with the first token. Counts of drafts are included if there were
    any."""
    prompt = predicted = 0.0
    if pace.first is not None and pace.last is not None:
        prompt, predicted = 1000 * (pace.first - pace.begun), 1000 * (pace.last - pace.first)
    fresh, made = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    found: dict[str, float] = {"cache_n": usage.cached_tokens}
    for name, count, ms in (("prompt", fresh, prompt), ("predicted", made, predicted)):
        found |= {
            f"{name}_n": count,
            f"{name}_ms": ms,
            f"{name}_per_token_ms": ms / count if count else 0.0,
            f"{name}_per_second": 1000 * count / ms if ms else 0.0,
        }
    if drafted := usage.accepted_tokens + usage.rejected_tokens:
        found |= {"draft_n": drafted, "draft_n_accepted": usage.accepted_tokens}
    return found
