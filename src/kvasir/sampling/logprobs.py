"""Log-probabilities of the raw float32 logits, as the model computed them: without penalties, mask or temperature.

An entry is as in `plan.RowResult`: (token, logprob, rank, ((id, logprob), ...)), with the best tokens by descending
logit, ties by ascending id. Log-probabilities are natural, computed in float64 and rounded once to float32. The rank
counts from 1 in the same order.

Letters: R rows, V vocabulary, K best tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvasir.sampling.numerics import best_ids, centred, log_weight, total_weight
from kvasir.sampling.rows import BadLogits, Entry, fault

CPU_ROWS = 4


def chunks(num_rows: int, device: torch.device) -> Iterator[slice]:
    """Ranges of rows to process together: few on a CPU, to fit its caches. Results do not depend on it."""
    size = CPU_ROWS if device.type == "cpu" else 64
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def logprobs(logits_RV: Tensor, tokens: Sequence[int], best: Sequence[int]) -> list[Entry]:
    """For each row r of float32 logits, the entry of tokens[r] with the best[r] best tokens.

    Raises BadLogits for a row with NaN or with only -inf, ValueError for an id outside the vocabulary.
    """
    if not len(logits_RV) == len(tokens) == len(best):
        raise ValueError(f"{len(logits_RV)} rows of logits, {len(tokens)} tokens, {len(best)} counts")
    entries: list[Entry] = []
    for part in chunks(len(tokens), logits_RV.device):
        entries += _entries(logits_RV[part], tokens[part], best[part])
    return entries


def _entries(logits_RV: Tensor, tokens: Sequence[int], best: Sequence[int]) -> list[Entry]:
    vocab = logits_RV.shape[1]
    for token in tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab}")
    peak_R1 = logits_RV.amax(-1, keepdim=True)
    for peak in peak_R1[:, 0].tolist():
        if text := fault(peak):
            raise BadLogits(text)  # without the row's index, which depends on how the prompt was chunked
    log_total_R1 = log_weight(total_weight(logits_RV, peak_R1))

    def of(ids_RK: Tensor) -> list[list[float]]:
        return (centred(logits_RV.gather(1, ids_RK), peak_R1) - log_total_R1).float().tolist()

    tokens_R1 = torch.tensor(tokens, device=logits_RV.device).unsqueeze(1)
    ranks = _ranks(logits_RV, tokens_R1).tolist()
    best_RK = best_ids(logits_RV, min(max(best), vocab)) if max(best) > 0 else tokens_R1[:, :0]
    rows = zip(tokens, of(tokens_R1), ranks, best, best_RK.tolist(), of(best_RK), strict=True)
    return [
        (int(token), own[0], rank, tuple(zip(ids[:k], values[:k], strict=True)))
        for token, own, rank, k, ids, values in rows
    ]


def _ranks(logits_RV: Tensor, tokens_R1: Tensor) -> Tensor:
    """[R] 1 + the number of greater logits + the number of equal ones with a lower id."""
    own_R1 = logits_RV.gather(1, tokens_R1)
    ids = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    ahead_RV = (logits_RV > own_R1) | ((logits_RV == own_R1) & (ids < tokens_R1))
    return ahead_RV.sum(-1) + 1
