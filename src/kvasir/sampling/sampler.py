"""The sampler: from rows of logits to tokens.

A row's result is a function of its raw float32 logits, spec, ids, position, mask and carry. Other rows, their number,
threads and chunks have no influence: sums are of integers, and float operations are elementwise (see numerics.py).

    raw logits --> processors --> peak --> temperature 0: the lowest id at the peak
        |                            \\---> else z, filters or chain, Gumbel draw
        \\--> logprobs

Letters: R rows, V vocabulary, K listed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir.sampling import chain
from kvasir.sampling.carry import draws
from kvasir.sampling.chain import needs_chain
from kvasir.sampling.filters import listed, min_p_, needs_list, scaled
from kvasir.sampling.gumbel import Noise, draw, draw_listed
from kvasir.sampling.logprobs import chunks, logprobs
from kvasir.sampling.numerics import first_at
from kvasir.sampling.processors import changes_logits, process_
from kvasir.sampling.rows import MAX_VOCAB, NOTHING_ALLOWED, Entry, RowContext, Sampled, fault


def sample(logits_RV: Tensor, rows: Sequence[RowContext]) -> list[Sampled]:
    """One token for each row. logits_RV: float32, on any device; not modified.

    A row returns an error if its logits hold NaN or only -inf, or if its spec does not match the vocabulary; other rows
    are unaffected. Tokens at +inf share all the probability.
    """
    if len(logits_RV) != len(rows):
        raise ValueError(f"{len(logits_RV)} rows of logits for {len(rows)} contexts")
    if logits_RV.shape[1] > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {logits_RV.shape[1]} is beyond {MAX_VOCAB}")
    results: list[Sampled] = []
    for part in chunks(len(rows), logits_RV.device):
        results += _sample(logits_RV[part].float(), rows[part])
    return results


def _sample(logits_RV: Tensor, rows: Sequence[RowContext]) -> list[Sampled]:
    errors = [fault(peak) for peak in logits_RV.amax(-1).tolist()]
    x_RV = _processed(logits_RV, rows, errors)
    peak_R1 = x_RV.amax(-1, keepdim=True)
    for i, peak in enumerate(peak_R1[:, 0].tolist()):
        if peak == -math.inf:
            errors[i] = errors[i] or NOTHING_ALLOWED
    sound = [i for i, error in enumerate(errors) if not error]
    chained = [i for i in sound if draws(rows[i].spec) and needs_chain(rows[i].spec)]
    tokens = _choose(x_RV, peak_R1, rows, [i for i in sound if i not in chained])
    carries = {i: row.carry for i, row in enumerate(rows)}
    for i in chained:
        row = rows[i]
        tokens[i], carries[i] = chain.choose(x_RV[i], peak_R1[i], row.spec, row.position, row.carry)
    entries = _logprobs(logits_RV, rows, tokens)
    return [Sampled(tokens.get(i, -1), entries.get(i), carries[i], error) for i, error in enumerate(errors)]


def _processed(logits_RV: Tensor, rows: Sequence[RowContext], errors: list[str]) -> Tensor:
    """The processed logits: a copy if any row changes them. Writes a row's error message to `errors`."""
    changed = [i for i, r in enumerate(rows) if not errors[i] and changes_logits(r.spec, r.num_sampled, r.mask)]
    if not changed:
        return logits_RV
    x_RV = logits_RV.clone()
    for i in changed:
        try:
            process_(x_RV[i], rows[i].spec, rows[i].ids, rows[i].prompt_len, rows[i].mask)
        except ValueError as e:
            errors[i] = str(e)
    return x_RV


def _choose(x_RV: Tensor, peak_R1: Tensor, rows: Sequence[RowContext], sound: list[int]) -> dict[int, int]:
    """Tokens of the valid rows: the greedy ones, then those drawn from a list, then those drawn from the whole
    vocabulary."""
    top_R = first_at(x_RV, peak_R1)
    tops = top_R.tolist()
    tokens = {i: tops[i] for i in sound}
    drawn = [i for i in sound if draws(rows[i].spec)]
    ordered = [i for i in drawn if needs_list(rows[i].spec, x_RV.shape[1])]
    for group, filtered in ((ordered, True), ([i for i in drawn if i not in ordered], False)):
        if not group:
            continue
        at = torch.tensor(group, device=x_RV.device)
        specs = [rows[i].spec for i in group]
        noise = Noise.of([s.seed for s in specs], [rows[i].position for i in group], x_RV.device)
        if filtered:
            chosen = draw_listed(*listed(x_RV[at], peak_R1[at], specs), noise)
        else:
            chosen = draw(min_p_(scaled(x_RV[at], peak_R1[at], specs), specs), top_R[at], noise)
        tokens.update(zip(group, chosen.tolist(), strict=True))
    return tokens


def _logprobs(logits_RV: Tensor, rows: Sequence[RowContext], tokens: dict[int, int]) -> dict[int, Entry]:
    wanted = [i for i in tokens if rows[i].spec.logprobs >= 0]
    if not wanted:
        return {}
    at = torch.tensor(wanted, device=logits_RV.device)
    entries = logprobs(logits_RV[at], [tokens[i] for i in wanted], [rows[i].spec.logprobs for i in wanted])
    return dict(zip(wanted, entries, strict=True))
