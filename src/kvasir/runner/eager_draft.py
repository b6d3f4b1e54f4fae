"""A draft model on the eager executor: op by op, over the same cache, rows and thread as the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.batch import InputBuffers, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.rows import RowArrays
from kvasir.models.drafting import DRAFT, BlockDraft, DraftModel, drafts_blocks
from kvasir.plan import Work
from kvasir.runner import host_sampling
from kvasir.runner.eager_executor import EagerExecutor
from kvasir.runner.executor import Taken
from kvasir.runner.proposals import Draw, Span
from kvasir.sampling.rows import RowContext
from kvasir.sampling.sampler import sample


class EagerDraft:
    """A DraftForward. executor: of the target, whose `taps` it sets. cache: of both models. max_tokens: most token rows
    of a step."""

    seconds = 0.0  # as the executor itself, it does not measure kernels

    def __init__(self, draft: DraftModel, executor: EagerExecutor, cache: KVCache, max_tokens: int):
        self.draft, self.max_tokens = draft, max_tokens
        self._executor, self._cache = executor, cache.of(DRAFT)
        executor.taps = frozenset(draft.taps)

    def bind(self, rows: RowArrays, ahead: int) -> None:
        """As `DraftForward.bind`."""
        self._rows = [replace(rows, ids=rows.ids[:, ahead + layer :]) for layer in range(self.draft.depth)]
        self._inputs = InputBuffers(self.max_tokens, len(self._cache.groups), self._cache.device)

    def enter(self, row: int) -> None:
        """As `DraftForward.enter`: nothing of a row is kept here."""

    def taps(self, first: int, count: int) -> np.ndarray:
        """As `DraftForward.taps`."""
        outputs = [self._executor.tapped[name][first : first + count] for name in self.draft.taps]
        return torch.cat(outputs, 1).cpu().numpy()

    def run(self, spans: Sequence[Span], taps: np.ndarray | None, rows: np.ndarray | None, layer: int = 0) -> None:
        """As `DraftForward.run`."""
        self._executor.submit(self._run, spans, taps, rows, layer).result()

    @torch.inference_mode()
    def _run(self, spans: Sequence[Span], taps: np.ndarray | None, rows: np.ndarray | None, layer: int) -> None:
        works = [Work(span.row, span.start, span.count) for span in spans]
        batch = make_batch(works, self._rows[layer], self._cache, inputs=self._inputs)
        given = self._carried_TD if layer else None
        if rows is not None:
            given = self._padded(rows, len(batch.tokens_T))
        if taps is not None:
            given = self.draft.join(self._padded(taps, len(batch.tokens_T)))
        self._layer = layer
        self._hidden_TD, self._carried_TD = self.draft.forward(batch.tokens_T, given, batch, layer)
        self._ends = torch.from_numpy(batch.starts[1:] - 1).to(self._cache.device)

    def _padded(self, rows: np.ndarray, size: int) -> Tensor:
        """The rows as a tensor of `size` rows, as linear layers expect it."""
        wide = torch.zeros((size, rows.shape[1]), device=self._cache.device)
        wide[: len(rows)] = torch.from_numpy(rows)
        return wide

    @torch.inference_mode()
    def logits(self, at: Sequence[int]) -> np.ndarray:
        """As `DraftForward.logits`."""
        hidden_RD = self._hidden_TD[self._ends[list(at)]]
        return self.draft.logits(hidden_RD, self._layer)[: len(at)].float().cpu().numpy()

    def carried(self, at: Sequence[int]) -> np.ndarray:
        """As `DraftForward.carried`."""
        assert self._carried_TD is not None
        return self._carried_TD[self._ends[list(at)]].float().cpu().numpy()

    @torch.inference_mode()
    def draw(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Taken]:
        """As `DraftForward.draw`."""
        contexts = [
            RowContext(row.spec, row.ids[:known], row.prompt_len, known, mask, carry)
            for row, known, carry, mask, _ in draws
        ]
        return [host_sampling.taken(one) for one in sample(torch.from_numpy(logits), contexts)]

    def collect(self) -> tuple[Taken, ...]:
        """As `DraftForward.collect`: `draw` gives all ids itself."""
        return ()


class EagerBlocks(EagerDraft):
    """A BlockForward."""

    draft: BlockDraft

    def bind(self, rows: RowArrays, ahead: int) -> None:
        """As `DraftForward.bind`. A block's ids lie at their own positions."""
        super().bind(rows, 0)

    @torch.inference_mode()
    def _run(self, spans: Sequence[Span], taps: np.ndarray | None, rows: np.ndarray | None, layer: int) -> None:
        both_ways = taps is None and not self.draft.causal
        works = [Work(span.row, span.start, span.count, indivisible=both_ways) for span in spans]
        batch = make_batch(works, self._rows[layer], self._cache, inputs=self._inputs)
        if taps is not None:
            self.draft.keep(self._padded(taps, len(batch.tokens_T)), batch)
            return
        self._hidden_TD, _ = self.draft.forward(batch.tokens_T, None, batch)
        self._logits = self.draft.logits(self._hidden_TD).float().cpu().numpy()

    def logits(self, at: Sequence[int]) -> np.ndarray:
        """As `DraftForward.logits`, of token rows that give ids."""
        return self._logits[list(at)]

    def correct(
        self, spans: Sequence[Span], at: Sequence[int], states: Sequence[np.ndarray | None]
    ) -> np.ndarray | None:
        """As `BlockForward.correct`."""
        return self._executor.submit(self._correct, spans, at, states).result()

    @torch.inference_mode()
    def _correct(
        self, spans: Sequence[Span], at: Sequence[int], states: Sequence[np.ndarray | None]
    ) -> np.ndarray | None:
        head = self.draft.markov
        assert head is not None
        batch = make_batch([Work(*span) for span in spans], self._rows[0], self._cache, inputs=self._inputs)
        none = np.zeros(head.state_width, np.float32)
        states_nS = torch.from_numpy(np.stack([none if state is None else state for state in states]))
        rows = torch.cat([self._hidden_TD[list(at)].float(), states_nS.to(self._cache.device)], 1)
        rows = self._padded(rows.cpu().numpy(), len(batch.tokens_T))
        hidden, left = self.draft.correct(batch.tokens_T, rows, batch)
        self._logits[list(at)] += self.draft.corrections(hidden)[: len(at)].float().cpu().numpy()
        return None if left is None else left[: len(at)].float().cpu().numpy()


def eager_draft(draft: DraftModel, executor: EagerExecutor, cache: KVCache, max_tokens: int) -> EagerDraft:
    """The forward of a draft model beside a model of the eager executor. The others are as of an EagerDraft."""
    return (EagerBlocks if drafts_blocks(draft) else EagerDraft)(draft, executor, cache, max_tokens)
