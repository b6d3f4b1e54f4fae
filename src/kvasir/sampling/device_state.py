"""The host side of the sampler on a device (triton.py): rows' parameters and buffers in device memory, and the results.

All tensors keep their addresses, so that a graph of launches can be captured once and replayed.

Letters: S slots of a step, V vocabulary, T tiles of the vocabulary, K best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir.plan import SamplingSpec
from kvasir.sampling import device_layout as layout
from kvasir.sampling import dry
from kvasir.sampling.carry import draws
from kvasir.sampling.chain import needs_chain
from kvasir.sampling.device_layout import REAL, Column
from kvasir.sampling.filters import needs_list
from kvasir.sampling.numerics import log
from kvasir.sampling.philox import split_seed
from kvasir.sampling.rows import MAX_VOCAB, NOTHING_ALLOWED, Entry, fault

MAX_LIST_WORDS = 8192  # of a row's lists
TEXTS = {
    layout.OK: "",
    layout.NOT_A_NUMBER: fault(math.nan),
    layout.ALL_LOW: fault(-math.inf),
    layout.NOTHING_LEFT: NOTHING_ALLOWED,
}
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Needs:
    """Which launches a step makes. More than its rows need change no result.

    draws: some row does not take the best token. lists: some row has top-k or top-p. processes: some row's logits are
    changed, by a mask too. logprobs: some row wants log-probabilities.
    """

    draws: bool = True
    lists: bool = True
    processes: bool = True
    logprobs: bool = True

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.draws or other.draws,
            self.lists or other.lists,
            self.processes or other.processes,
            self.logprobs or other.logprobs,
        )


ALL = Needs()
NONE = Needs(draws=False, lists=False, processes=False, logprobs=False)


def reason(spec: SamplingSpec) -> str:
    """Why the device cannot sample for this spec; empty if it can."""
    if draws(spec) and needs_chain(spec):
        return "typical_p, top_n_sigma, XTC, dynamic temperature, mirostat and adaptive-p run on the host"
    if dry.is_on(spec):
        return "DRY runs on the host"
    if spec.logprobs > layout.MAX_BEST:
        return f"{spec.logprobs} log-probabilities are more than the device's {layout.MAX_BEST}"
    if (words := _list_words(spec)) > MAX_LIST_WORDS:
        return f"stop ids, biases and bad words take {words} words, more than the device's {MAX_LIST_WORDS}"
    return ""


def error_text(code: int, spec: SamplingSpec, vocab: int) -> str:
    """The reference's message for an error code."""
    if code != layout.BIAS_OUTSIDE:
        return TEXTS[code]
    outside = next(i for i in _totals(spec) if not 0 <= i < vocab)
    return f"logit_bias names token {outside}, the vocabulary has {vocab}"


def entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    ranks: Sequence[int],
    best_ids: Sequence[Sequence[int]],
    best_logprobs: Sequence[Sequence[float]],
    asked: Sequence[int],
    vocab: int,
) -> list[Entry | None]:
    """The entries of slots, as `logprobs.logprobs` gives them, from the lists of fetched `Logprobs`; None for a slot
    without a token or whose `asked`, the spec's logprobs, is -1."""
    return [
        None
        if count < 0 or token < 0
        else (token, own, rank, tuple(zip(ids[: min(count, vocab)], values[: min(count, vocab)], strict=True)))
        for token, own, rank, ids, values, count in zip(
            tokens, logprobs, ranks, best_ids, best_logprobs, asked, strict=True
        )
    ]


def bad_logits(keys: Sequence[int]) -> str:
    """What is wrong with logits whose greatest have these keys, by tile (`triton_numerics.key_of`); "" if nothing."""
    greatest = max(keys)
    if greatest == layout.KEY_NAN:
        return TEXTS[layout.NOT_A_NUMBER]
    return TEXTS[layout.ALL_LOW] if greatest == layout.KEY_LOW else ""


class Logprobs:
    """Results of slots that want log-probabilities; other slots' are unspecified."""

    def __init__(self, slots: int, device: torch.device | str):
        self.logprobs_S = torch.zeros(slots, dtype=torch.float32, device=device)
        self.ranks_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.best_ids_SK = torch.zeros(slots, layout.MAX_BEST, dtype=torch.int32, device=device)
        self.best_logprobs_SK = torch.zeros(slots, layout.MAX_BEST, dtype=torch.float32, device=device)


class Workspace:
    """Scratch of the kernels for up to `slots` slots. Nothing in it outlives a step. Takes 8 bytes for each logit."""

    def __init__(self, slots: int, vocab: int, device: torch.device | str, tile: int = layout.TILE):
        """tile: tokens of a program, a power of two of at least 16; no result depends on it."""
        tiles = -(-vocab // tile)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slots, self.vocab, self.tile, self.tiles = slots, vocab, tile, tiles
        self.x_SV = empty(slots, vocab, dtype=torch.float32)  # processed logits
        self.counts_SV = empty(slots, vocab)  # of known ids
        self.changed_S = empty(slots)  # whether a slot's logits lie in x_SV
        self.raw_ST, self.low_ST = empty(slots, tiles), empty(slots, tiles)
        self.best_ST = empty(slots, tiles, dtype=torch.int64)
        self.bin_counts_SB = empty(slots, layout.BINS)
        self.bin_weights_SB = empty(slots, layout.BINS, dtype=torch.int64)
        self.found_S = empty(slots)
        self.listed_SL = empty(slots, layout.LISTED)
        self.cuts_S = empty(slots, dtype=torch.int64)
        self.scores_ST = empty(slots, tiles, dtype=torch.float64)
        self.drawn_ST = empty(slots, tiles)
        self.totals_ST = empty(slots, tiles, dtype=torch.int64)
        self.ahead_ST = empty(slots, tiles)
        self.bests_STK = empty(slots, tiles, layout.MAX_BEST, dtype=torch.int64)


class SamplerState:
    """The sampling parameters of a runner's rows, in device memory."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str):
        """Raises ValueError for a vocabulary that is empty or too large."""
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} is empty or beyond {MAX_VOCAB}")
        self.vocab = vocab
        self.params = torch.zeros(rows, layout.WIDTH, dtype=torch.int64, device=device)
        self.lists = torch.zeros(rows, MAX_LIST_WORDS, dtype=torch.int32, device=device)
        self._needs = [NONE] * rows

    def enter(self, row: int, spec: SamplingSpec, prompt_len: int) -> None:
        """Writes a row's parameters, in the order of the current stream. Raises ValueError if `reason` names one."""
        if text := reason(spec):
            raise ValueError(text)
        params, lists = packed(spec, prompt_len, self.vocab)
        # Copies from pageable memory do not read it after the call.
        self.params[row].copy_(torch.from_numpy(params), non_blocking=True)
        if len(lists):
            self.lists[row, : len(lists)].copy_(torch.from_numpy(lists), non_blocking=True)
        self._needs[row] = needs(spec, self.vocab)

    def needs(self, rows: Iterable[int], masked: bool = False) -> Needs:
        """What a step of these rows needs. masked: one has a mask."""
        found = NONE
        for row in rows:
            found |= self._needs[row]
        return found | Needs(draws=False, lists=False, processes=masked, logprobs=False)


def needs(spec: SamplingSpec, vocab: int) -> Needs:
    """What any step of a row with this spec needs, but for masks."""
    drawn = draws(spec)
    changes = (
        *(spec.logit_bias, spec.bad_words, spec.min_tokens > 0 and spec.stop_ids),
        *(spec.repetition_penalty != 1.0, spec.frequency_penalty != 0.0, spec.presence_penalty != 0.0),
    )
    return Needs(drawn, drawn and needs_list(spec, vocab), any(changes), spec.logprobs >= 0)


def packed(spec: SamplingSpec, prompt_len: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A row's parameters and lists as the kernels read them (device_layout.py)."""
    totals = _totals(spec)
    outside = any(not 0 <= token < vocab for token in totals)
    stops = _ids(spec.stop_ids) if spec.min_tokens > 0 else _ids(())
    biases = {} if outside else totals
    values = np.array(list(biases.values()), np.float64).astype(np.float32).view(np.int32)
    words = [_ids(word) for word in spec.bad_words]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32)
    lists = np.concatenate([stops, _ids(biases), values, ends, *words]).astype(np.int32)
    low, high = split_seed(spec.seed)
    ends_at = len(stops) + 2 * len(biases)
    of = {
        Column.DRAWS: draws(spec),
        Column.LIMIT: spec.top_k if 0 < spec.top_k < vocab else 0,
        Column.TOP_P: spec.top_p,
        Column.LEAST_Z: _log(max(spec.min_p, 1e-300)) if spec.min_p > 0.0 else -math.inf,
        Column.INVERSE_TEMPERATURE: 1.0 / spec.temperature if draws(spec) else 1.0,
        Column.SEED_LOW: low,
        Column.SEED_HIGH: high,
        Column.PROMPT_LEN: prompt_len,
        Column.LOGPROBS: spec.logprobs,
        Column.MIN_TOKENS: spec.min_tokens,
        Column.STOPS: len(stops),
        Column.BIASES: -1 if outside else len(biases),
        Column.WORDS: len(words),
        Column.LONGEST: max(map(len, words), default=0),
        Column.BIASES_AT: len(stops),
        Column.WORD_ENDS_AT: ends_at,
        Column.WORD_IDS_AT: ends_at + len(words),
        Column.REPETITION: spec.repetition_penalty,
        Column.REPETITION_LAST_N: spec.repetition_last_n,
        Column.FREQUENCY: spec.frequency_penalty,
        Column.PRESENCE: spec.presence_penalty,
        Column.OCCURRENCE_LAST_N: spec.occurrence_last_n,
    }
    params = np.zeros(layout.WIDTH, np.int64)
    for column, value in of.items():
        params[column] = np.float64(value).view(np.int64) if column in REAL else int(value)
    return params, lists


def _list_words(spec: SamplingSpec) -> int:
    return len(spec.stop_ids) + 2 * len(spec.logit_bias) + len(spec.bad_words) + sum(map(len, spec.bad_words))


def _totals(spec: SamplingSpec) -> dict[int, float]:
    """The total bias of each id, in the order of first occurrence."""
    totals: dict[int, float] = {}
    for token, value in spec.logit_bias:
        totals[token] = totals.get(token, 0.0) + value
    return totals


def _ids(ids: Iterable[int]) -> np.ndarray:
    """As int32; values out of range become a number that is not an id."""
    return np.array([i if _INT32.min < i <= _INT32.max else _INT32.min for i in ids], np.int32)


def _log(x: float) -> float:
    return float(log(torch.tensor(x, dtype=torch.float64)))
