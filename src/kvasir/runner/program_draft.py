"""A draft model as a second program: over the same cache, rows and threads as the target's, with its own buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvasir.layers.rows import RowArrays
from kvasir.models.drafting import DRAFT, BlockDraft, DraftModel, drafts_blocks
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL, PIECE_LOGITS
from kvasir.program.cache import NativeCache
from kvasir.program.marshal import MAX_CHOSEN
from kvasir.program.program import Program
from kvasir.program.trace import Trace, trace_correct, trace_draft, trace_join
from kvasir.runner.executor import Taken
from kvasir.runner.proposals import Draw, Span
from kvasir.sampling.native import SAMPLE_ERRORS, NativeSampler, SampleRow, fill_carry, next_carry


def draft_traces(draft: DraftModel, target: Trace) -> tuple[tuple[Trace, ...], Trace | None]:
    """Of the forward of each layer of the draft model, and of its `join`, None if that changes nothing, or its `keep`.
    Raises CannotTrace."""
    width = sum(target.exports[name].width for name in draft.taps)
    layers = tuple(trace_draft(draft, layer) for layer in range(draft.depth))
    return layers, trace_join(draft, width) if draft.taps else None


class ProgramDraft:
    """A DraftForward. target: the program whose results it reads. cache: of both. max_tokens, max_rows, max_positions:
    as of a Program."""

    def __init__(
        self, draft: DraftModel, target: Any, cache: NativeCache,
        *, max_tokens: int, max_rows: int, max_positions: int,
    ):  # fmt: skip
        sizes: dict[str, Any] = {"max_tokens": max_tokens, "max_rows": max_rows, "max_positions": max_positions}
        sizes |= {"threads": target.pool.threads, "pool": target.pool}
        self.draft, self.target, self.max_tokens, self.seconds = draft, target, max_tokens, 0.0
        self.taps_width = sum(target.trace.exports[name].width for name in draft.taps)
        own, joining = draft_traces(draft, target.trace)
        self.program = Program(own[0], cache.of(DRAFT), **sizes)  # of the layer that was computed last
        more = (Program(one, cache.of(DRAFT), **sizes, memory=self.program.memory) for one in own[1:])
        self.layers = (self.program, *more)
        self.joining = Program(joining, cache.of(DRAFT), **sizes) if joining else None
        self._sampler = NativeSampler(target.vocab, target.pool)
        assert draft.target_ids is not None or self.program.vocab == target.vocab, "vocabularies differ"

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the draft model."""
        return (*self.layers, self.joining) if self.joining else self.layers

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(program.num_bytes for program in self.programs)

    def bind(self, rows: RowArrays, ahead: int) -> None:
        """As `DraftForward.bind`."""
        for layer, program in enumerate(self.layers):
            program.bind(rows, ahead + layer)
        if self.joining:
            self.joining.bind(rows, ahead)

    def enter(self, row: int) -> None:
        """As `DraftForward.enter`."""
        for program in self.layers:
            program.states[row].reached = 0

    def taps(self, first: int, count: int) -> np.ndarray:
        """As `DraftForward.taps`."""
        outputs = [self.target.export(name, first + count)[first:] for name in self.draft.taps]
        return np.concatenate(outputs, 1)

    def run(self, spans: Sequence[Span], taps: np.ndarray | None, rows: np.ndarray | None, layer: int = 0) -> None:
        """As `DraftForward.run`."""
        count = sum(span.count for span in spans)
        if taps is not None:
            rows = self._joined(spans, taps)
        elif rows is None and layer:
            rows = self.program.export("carried", count).copy()
        self.program = self.layers[layer]
        if rows is not None:
            self.program.rows(count)[:] = rows
        self._compute(self.program, spans, PIECE_LOGITS * (len(spans) <= MAX_CHOSEN))
        self._ends, self._left = np.cumsum([span.count for span in spans]) - 1, len(spans) <= MAX_CHOSEN

    def _joined(self, spans: Sequence[Span], taps: np.ndarray) -> np.ndarray:
        if self.joining is None:
            return taps
        self.joining.rows(len(taps))[:] = taps
        self._compute(self.joining, spans, 0)
        return self.joining.hidden(len(taps))

    def _compute(self, program: Program, spans: Sequence[Span], flags: int) -> None:
        for piece, span in zip(program.pieces, spans, strict=False):
            piece.row, piece.flags, piece.start, piece.count = span.row, flags, span.start, span.count
        program.run(len(spans), max(span.end for span in spans))
        self.seconds += program.seconds

    def logits(self, at: Sequence[int]) -> np.ndarray:
        """As `DraftForward.logits`."""
        if self._left:
            return self.program.left_logits(len(self._ends))[list(at)]
        return self.program.logits_of(self._ends[list(at)].tolist())

    def carried(self, at: Sequence[int]) -> np.ndarray:
        """As `DraftForward.carried`."""
        ends = self._ends[list(at)]
        return self.program.export("carried", int(ends.max()) + 1)[ends]

    def draw(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Taken]:
        """As `DraftForward.draw`."""
        specs = (SampleRow * len(draws))()
        for i, (row, known, carry, mask, _) in enumerate(draws):
            specs[i] = self.target.states[row.number].spec  # a copy
            spec = specs[i]
            fill_carry(spec, row.spec, carry)
            spec.ids, spec.num_ids, spec.position, spec.logprobs = row.ids.ctypes.data, known, known, -1
            spec.mask, spec.mask_words = (None, 0) if mask is None else (mask.ctypes.data, len(mask))
        found = self._sampler.run(logits, specs)
        return [
            Taken(error=SAMPLE_ERRORS[one.error]) if one.error
            else Taken((one.token,), (), next_carry(one, draw.row.spec, draw.carry))
            for one, draw in zip(found, draws, strict=True)
        ]  # fmt: skip

    def collect(self) -> tuple[Taken, ...]:
        """As `DraftForward.collect`: `draw` gives all ids itself."""
        return ()


class ProgramBlocks(ProgramDraft):
    """A BlockForward."""

    draft: BlockDraft

    def __init__(self, draft: DraftModel, target: Any, cache: NativeCache, **sizes: Any):
        super().__init__(draft, target, cache, **sizes)
        traced = trace_correct(draft)
        few = {**sizes, "max_tokens": MAX_CHOSEN, "threads": target.pool.threads, "pool": target.pool}
        self.markov = Program(traced, cache.of(DRAFT), **few) if traced else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """As of a ProgramDraft."""
        return (*super().programs, self.markov) if self.markov else super().programs

    def bind(self, rows: RowArrays, ahead: int) -> None:
        """As `DraftForward.bind`. A block's ids lie at their own positions."""
        super().bind(rows, 0)
        if self.markov:
            self.markov.bind(rows)

    def run(self, spans: Sequence[Span], taps: np.ndarray | None, rows: np.ndarray | None, layer: int = 0) -> None:
        """As `DraftForward.run`, of a BlockProposer."""
        if taps is not None:
            self._joined(spans, taps)
            return
        self._compute(self.program, spans, 0 if self.draft.causal else PIECE_BIDIRECTIONAL)
        first, self._chosen = 0, []
        for span in spans:
            self._chosen += range(first + (not self.draft.anchored), first + span.count)
            first += span.count
        self._logits = self.program.logits_of(self._chosen)

    def logits(self, at: Sequence[int]) -> np.ndarray:
        """As `DraftForward.logits`, of token rows that give ids."""
        return self._logits[np.searchsorted(self._chosen, at)]

    def correct(
        self, spans: Sequence[Span], at: Sequence[int], states: Sequence[np.ndarray | None]
    ) -> np.ndarray | None:
        """As `BlockForward.correct`."""
        head, program = self.draft.markov, self.markov
        assert head is not None and program is not None
        rows = program.rows(len(at))
        rows[:, : head.width] = self.program.hidden(max(at) + 1)[list(at)]
        for row, state in zip(rows, states, strict=True):
            row[head.width :] = 0.0 if state is None else state
        self._compute(program, spans, 0)
        left = program.export("carried", len(at)).copy() if program.trace.exports else None
        self._logits[np.searchsorted(self._chosen, at)] += program.logits_of(range(len(at)))
        return left


def program_draft(draft: DraftModel, target: Any, cache: NativeCache, **sizes: Any) -> ProgramDraft:
    """The forward of a draft model beside a program. The others are as of a ProgramDraft."""
    return (ProgramBlocks if drafts_blocks(draft) else ProgramDraft)(draft, target, cache, **sizes)
