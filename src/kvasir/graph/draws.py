"""Samples slots of logits on the device: buffers at fixed addresses, and the launches of each kind of step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvasir.sampling.device_layout import WIDTH, Column
from kvasir.sampling.device_state import NONE, Logprobs, Needs, SamplerState, Workspace
from kvasir.sampling.triton import describe_known, sample

# The kinds of steps whose launches are recorded; a step makes those of the first kind that has all it needs.
LEVELS = (
    NONE,
    Needs(draws=True, lists=False, processes=False, logprobs=False),
    Needs(draws=True, lists=True, processes=False, logprobs=False),
    Needs(draws=True, lists=True, processes=True, logprobs=False),
    Needs(),
)


class Draws:
    """ids: of the rows, int32 [rows + 1, any]; sampled ids are written to it. slots: most rows of a call."""

    def __init__(self, ids: Tensor, slots: int, vocab: int):
        device = ids.device
        self.ids, self.state = ids, SamplerState(len(ids), vocab, device)
        self.work = Workspace(slots, vocab, device)
        self.logprobs = Logprobs(slots, device)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.rows, self.known, self.mask_of = zeros(slots), zeros(slots), zeros(slots)
        self.masks = zeros(slots, -(-vocab // 32))
        self.tokens, self.errors = zeros(slots), zeros(slots)
        # Of known ids: the settings of each slot, and its number.
        self.asked = torch.zeros(slots, WIDTH, dtype=torch.int64, device=device)
        self.slots = torch.arange(slots, dtype=torch.int32, device=device)

    def level(self, rows: Sequence[int], masked: bool) -> int:
        """The index in LEVELS for a step of these rows."""
        needs = self.state.needs(rows, masked)
        return next(i for i, level in enumerate(LEVELS) if (level | needs) == level)

    def run(self, logits: Tensor, level: int) -> None:
        """Samples one id for each slot of `logits`, [slots, vocabulary]."""
        count = len(logits)
        sample(
            logits, self.rows[:count], self.known[:count], self.ids, self.state, self.work,
            self.tokens[:count], self.errors[:count], needs=LEVELS[level], masks=self.masks,
            mask_S=self.mask_of[:count], logprobs=self.logprobs,
        )  # fmt: skip

    def read(self, logits: Tensor) -> None:
        """Log-probabilities of the ids in `tokens`, one of each slot of `logits`, as `asked` says."""
        count = len(logits)
        describe_known(logits, self.slots[:count], self.asked, self.work, self.tokens[:count], self.logprobs)

    def readings(self, count: int) -> list[Tensor]:
        """The tensors that hold what `read` has found for the first slots: the keys of the greatest logits, which
        `device_state.bad_logits` reads, then as in `results`."""
        return [self.work.raw_ST[:count], *self._described(count)]

    def results(self, count: int, level: int) -> list[Tensor]:
        """The tensors that hold what a run has found for the first slots."""
        found = [self.tokens[:count], self.errors[:count]]
        if LEVELS[level].logprobs:
            found += self._described(count)
        return found

    def _described(self, count: int) -> list[Tensor]:
        p = self.logprobs
        return [part[:count] for part in (p.logprobs_S, p.ranks_S, p.best_ids_SK, p.best_logprobs_SK)]


def asked_of(best: Sequence[int], bucket: int) -> np.ndarray:
    """int64 [bucket, WIDTH]: the settings of slots that want so many best tokens each; none for the others."""
    found = np.zeros((bucket, WIDTH), np.int64)
    found[:, Column.LOGPROBS] = -1
    found[: len(best), Column.LOGPROBS] = best
    return found


def slots_of(rows: Sequence[int], known: Sequence[int], masks: Sequence[int], bucket: int) -> np.ndarray:
    """int32 [3, bucket]: the row, the known ids and the mask of each slot; -1 for an unused slot."""
    found = np.full((3, bucket), -1, np.int32)
    found[:, : len(rows)] = rows, known, masks
    return found
