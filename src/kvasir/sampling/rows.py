"""The input and result of sampling a row of logits, shared by the reference and the native sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir.plan import SamplingSpec

FRACTION_BITS = 40  # fraction bits of a weight; 2^22 tokens of weight 1 fit in an int64
MAX_VOCAB = 1 << (62 - FRACTION_BITS)

Entry = tuple[int, float, int, tuple[tuple[int, float], ...]]  # as in `plan.RowResult`; see logprobs.py

NOTHING_ALLOWED = "no token is allowed: grammar, min_tokens, bad_words and logit_bias forbid all of them"


class BadLogits(ValueError):
    """A row has no valid distribution: it holds a NaN, or only -inf."""


def fault(peak: float) -> str:
    """The error message for a row with this maximum (NaN if the row holds one); empty if the row is valid."""
    if peak != peak:
        return "the model's logits hold NaN"
    return "all of the model's logits are -inf" if peak == float("-inf") else ""


@dataclass(frozen=True, slots=True)
class RowContext:
    """Everything besides its logits that a row's token depends on.

    ids: int32, all known ids up to the position, the first `prompt_len` of them the prompt. position: absolute position
    of the token to sample, len(ids). mask: int32 words of a grammar, bit i & 31 of word i >> 5 allows token i; None
    allows all. carry: the sampler's state at this position, which is not a function of the ids.
    """

    spec: SamplingSpec
    ids: np.ndarray
    prompt_len: int
    position: int
    mask: np.ndarray | None = None
    carry: bytes = b""

    @property
    def num_sampled(self) -> int:
        """Number of known ids after the prompt."""
        return len(self.ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Sampled:
    """token: -1 if there is none; `error` then gives the reason. logprob: as in `plan.RowResult`, if requested."""

    token: int
    logprob: Entry | None = None
    carry: bytes = b""
    error: str = ""
