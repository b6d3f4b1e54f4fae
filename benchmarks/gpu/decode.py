"""Steps that add one token to each of several sequences."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.models import bytes_read


def decode(engine: Engine, sequences: int, context: int, probe: dict[str, Any], spec: str = "greedy") -> dict[str, Any]:
    """Times of a step of `sequences` rows that each attend to `context` tokens. The limit: weights, keys and values
    once at the bandwidth of a copy."""
    compute, sample, replays = engine.step([(row, context - 1, 1) for row in range(sequences)], spec)

    def both() -> None:
        compute()
        sample()

    step = engine.place.seconds(both)
    rows, chosen = engine.place.seconds(compute), engine.place.seconds(sample)
    if not bool(torch.isfinite(engine.hidden(sequences)).all()):
        raise ValueError("a hidden state is not finite")
    weights, kv = bytes_read(engine.model), sequences * context * engine.kv_bytes_per_token
    limit = 1e3 * (weights + kv) / probe["copy_bytes_per_s"]
    return {
        **{"sequences": sequences, "context": context, "sampler": spec, "weight_bytes": weights, "kv_bytes": kv},
        **{"step_ms": step, "rows_ms": rows, "sample_ms": chosen, "replays": replays, "limit_ms": limit},
        "of_limit": limit / step["median"],
        "tokens_per_s": 1e3 * sequences / step["median"],
    }
