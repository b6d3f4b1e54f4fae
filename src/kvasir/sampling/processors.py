"""Logit processors: changes to a row of logits before a token is chosen, greedily or not. In vLLM's order, with DRY
where llama.cpp has it:

1. the mask of a grammar: forbidden ids stay forbidden, since no later processor raises -inf;
2. min_tokens: ids that would end the sequence are forbidden until enough tokens are sampled;
3. bad words (vLLM): the last id of each is forbidden if the output ends with the ids before it;
4. logit bias (OpenAI API): added to the logit;
5. repetition penalty (Keskar et al., CTRL, 2019): for ids of prompt and output, or the last of them, positive logits
   are divided by it, others multiplied;
6. frequency and presence penalty (OpenAI API): for ids of the output only, or the last of all ids (llama.cpp),
   frequency times their count, and presence once, are subtracted;
7. DRY (dry.py): penalises tokens that would continue a repetition.

Biases come before penalties so that a penalty acts on the biased logit; penalties come before temperature so that their
size does not depend on it. Each processor is a stateless function of the ids up to the position. All arithmetic is
float32, one operation at a time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvasir.plan import SamplingSpec
from kvasir.sampling import dry


def changes_logits(spec: SamplingSpec, num_sampled: int, mask: np.ndarray | None) -> bool:
    """Whether `process_` would change anything for such a row."""
    return (
        mask is not None
        or bool(spec.logit_bias)
        or bool(spec.bad_words)
        or dry.is_on(spec)
        or (num_sampled < spec.min_tokens and bool(spec.stop_ids))
        or spec.repetition_penalty != 1.0
        or spec.frequency_penalty != 0.0
        or spec.presence_penalty != 0.0
    )


def process_(x_V: Tensor, spec: SamplingSpec, ids: np.ndarray, prompt_len: int, mask: np.ndarray | None) -> None:
    """Applies all processors in place to one float32 row. ids: int32, all known ids, the prompt first.

    mask: see `mask_`. Raises ValueError if the bias names an id outside the vocabulary.
    """
    if mask is not None:
        mask_(x_V, mask)
    if len(ids) - prompt_len < spec.min_tokens:
        forbid_(x_V, spec.stop_ids)
    if spec.bad_words:
        forbid_(x_V, ended_by(ids[prompt_len:], spec.bad_words))
    if spec.logit_bias:
        bias_(x_V, spec.logit_bias)
    if spec.repetition_penalty != 1.0:
        repetition_(x_V, last_of(ids, spec.repetition_last_n), spec.repetition_penalty)
    if spec.frequency_penalty != 0.0 or spec.presence_penalty != 0.0:
        counted = last_of(ids, spec.occurrence_last_n) if spec.occurrence_last_n else ids[prompt_len:]
        occurrence_(x_V, counted, spec.frequency_penalty, spec.presence_penalty)
    if dry.is_on(spec):
        subtract_(x_V, dry.penalties(ids, spec))


def mask_(x_V: Tensor, mask: np.ndarray) -> None:
    """mask: int32 words, bit i & 31 of word i >> 5 allows token i. Ids beyond the words are forbidden."""
    words = np.ascontiguousarray(mask, "<i4") if len(mask) else np.zeros(1, "<i4")
    bits = np.unpackbits(words.view(np.uint8), count=x_V.shape[0], bitorder="little")
    x_V.masked_fill_(torch.from_numpy(bits == 0).to(x_V.device), -math.inf)


def forbid_(x_V: Tensor, ids: tuple[int, ...]) -> None:
    """Sets the ids to -inf. Ignores ids outside the vocabulary."""
    x_V[_index([i for i in ids if 0 <= i < x_V.shape[0]], x_V)] = -math.inf


def ended_by(output_ids: np.ndarray, words: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The last id of each word whose other ids are the last ids of the output."""
    longest = max(map(len, words))
    end = tuple(output_ids[max(0, len(output_ids) - longest) :].tolist())
    return tuple(w[-1] for w in words if len(w) <= len(end) + 1 and end[len(end) - len(w) + 1 :] == w[:-1])


def bias_(x_V: Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    """Adds each id's total bias. Raises ValueError if an id is outside the vocabulary."""
    totals: dict[int, float] = {}
    for token, value in bias:
        totals[token] = totals.get(token, 0.0) + value
    outside = [token for token in totals if not 0 <= token < x_V.shape[0]]
    if outside:
        raise ValueError(f"logit_bias names token {outside[0]}, the vocabulary has {x_V.shape[0]}")
    x_V[_index(list(totals), x_V)] += torch.tensor(list(totals.values()), dtype=torch.float32, device=x_V.device)


def last_of(ids: np.ndarray, count: int) -> np.ndarray:
    """The last `count` ids; all for -1."""
    return ids if count < 0 else ids[max(0, len(ids) - count) :]


def repetition_(x_V: Tensor, ids: np.ndarray, penalty: float) -> None:
    """For each id in `ids`, divides its logit by the penalty if it is positive, else multiplies it."""
    index = _index(np.flatnonzero(_counts(ids, x_V.shape[0])), x_V)
    logits = x_V[index]
    # A tensor, because some devices divide by a scalar by multiplying with its rounded inverse.
    by = torch.full_like(logits, penalty)
    x_V[index] = torch.where(logits > 0, logits / by, logits * by)


def occurrence_(x_V: Tensor, ids: np.ndarray, frequency: float, presence: float) -> None:
    """For each id in `ids`, subtracts frequency times its count, and presence once."""
    counts = _counts(ids, x_V.shape[0])
    present = np.flatnonzero(counts)
    index = _index(present, x_V)
    counted = torch.from_numpy(counts[present]).to(x_V.device, torch.float32)
    x_V[index] = x_V[index] - counted * frequency - presence


def subtract_(x_V: Tensor, penalties: dict[int, float]) -> None:
    """Subtracts the penalties. Ignores ids outside the vocabulary."""
    inside = {token: value for token, value in penalties.items() if 0 <= token < x_V.shape[0]}
    x_V[_index(list(inside), x_V)] -= torch.tensor(list(inside.values()), dtype=torch.float32, device=x_V.device)


def _counts(ids: np.ndarray, vocab: int) -> np.ndarray:
    """[V] how often each id occurs. Ignores ids without a logit (padded embeddings have some)."""
    return np.bincount(ids[(ids >= 0) & (ids < vocab)], minlength=vocab)


def _index(ids: list[int] | np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device=like.device)
