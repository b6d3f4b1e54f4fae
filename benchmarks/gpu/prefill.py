"""Steps of one sequence's chunk."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.models import multiply_adds


def prefill(engine: Engine, start: int, tokens: int, probe: dict[str, Any]) -> dict[str, Any]:
    """Times of a chunk of `tokens` from position `start` on, with the logits of its last token. The limit: the
    multiply-adds of matrices and of causal attention at the rate of cuBLAS in bfloat16."""
    compute, sample, _ = engine.step([(0, start, tokens)])

    def both() -> None:
        compute()
        sample()

    step, config = engine.place.seconds(both), engine.model.config
    keys = tokens * start + tokens * (tokens + 1) // 2
    attention = 2 * config.num_layers * config.heads * config.head_dim * keys
    flops = 2 * (tokens * multiply_adds(engine.model) + attention)
    limit = 1e3 * flops / probe["matmul_flops"]
    return {
        **{"start": start, "tokens": tokens, "step_ms": step, "flops": flops, "limit_ms": limit},
        "of_limit": limit / step["median"],
        "tokens_per_s": 1e3 * tokens / step["median"],
    }
