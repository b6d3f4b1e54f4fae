"""The sampler's carry: the state that some filters keep from token to token, and which rows have one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvasir.plan import SamplingSpec

GREEDY_BELOW = 1e-5  # as in vLLM, a temperature below this is greedy
CARRIED = 2  # numbers of a carry at most


def draws(spec: SamplingSpec) -> bool:
    """Whether the token is drawn at random; otherwise sampling is greedy, and no filter matters."""
    return spec.temperature >= GREEDY_BELOW


def is_adaptive(spec: SamplingSpec) -> bool:
    """Whether adaptive-p acts. As in llama.cpp, mirostat takes its place."""
    return spec.adaptive_target >= 0.0 and spec.mirostat == 0


def carried(spec: SamplingSpec, carry: bytes) -> tuple[float, ...]:
    """The sampler's state at this position, at most CARRIED numbers; () if the row has none. carry: as `packed` makes
    it, or empty at the first position."""
    first = _first(spec)
    return struct.unpack(f"<{len(first)}d", carry) if first and carry else first


def _first(spec: SamplingSpec) -> tuple[float, ...]:
    if spec.mirostat and draws(spec):
        return (2.0 * spec.mirostat_tau,)
    if is_adaptive(spec) and draws(spec):
        left = 1.0 - spec.adaptive_decay
        return (spec.adaptive_target / left, 1.0 / left)
    return ()


def packed(state: Sequence[float]) -> bytes:
    """The carry that holds this state: little-endian float64."""
    return struct.pack(f"<{len(state)}d", *state)
