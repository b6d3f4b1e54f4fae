"""A draft model on the graph executor: launches of its own over the target's rows, block tables and cache. Its hidden
rows and logits stay on the device, and its guesses are drawn there by the target's sampler. This writes them to the
target's ids, where the next round reads them, so the host waits once for all rounds.

    rows, chosen      of the draft model: hidden rows, and logits of its own vocabulary
    sample <level>    of the target: ids from these logits, which take the place of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvasir.device.replays import fetch
from kvasir.graph.draws import slots_of
from kvasir.graph.fold import Call, fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.graph.layout import PRODUCTS, weights_of
from kvasir.graph.triton import NO_TOKEN
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.rows import RowArrays
from kvasir.models.drafting import DRAFT, DraftModel, drafts_blocks
from kvasir.ops.compiling import Progress
from kvasir.plan import Ahead, Work
from kvasir.program.trace import Trace, trace_correct
from kvasir.runner import host_sampling
from kvasir.runner.executor import ExecutorStep, Taken
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.graph_replays import Record, Replays, bucket_of
from kvasir.runner.program_draft import draft_traces
from kvasir.runner.proposals import LAG, LATER, MAX_DRAWN, Array, Draw, Proposer, Span
from kvasir.runner.rows import Row, Rows
from kvasir.sampling.device_state import error_text, reason
from kvasir.sampling.rows import RowContext
from kvasir.sampling.sampler import sample

_MOST_QUEUED = 4


class DraftForwards:
    """The launches of a draft model. layers: of the forward of each of its layers. joining: of its `join`, None if that
    changes nothing. markov: of the Markov head of one that drafts blocks, None without. step: the target's buffers.
    ahead: how far the ids that are embedded lie after their positions.

    traced, target: of the target. cache: of both models. positions: as of a Forward.
    """

    def __init__(
        self, draft: DraftModel, traced: Trace, target: Forward, cache: KVCache,
        *, max_tokens: int, max_rows: int, positions: int,
    ):  # fmt: skip
        blocks = drafts_blocks(draft)
        self.ahead = 0 if blocks else draft.ahead  # a block's ids lie at their own positions
        most = len(target.step.chosen) if blocks else max_rows
        self.max_tokens, self.max_chosen = max_tokens, min(MAX_DRAWN, most)
        # Guesses lie where the target's ids do, unless they need other numbers or other places.
        copies = draft.draft_ids is not None or not draft.advances
        self.ids = torch.zeros_like(target.step.ids) if copies else target.step.ids
        self.step: StepBuffers = target.step
        self.taps_width = sum(target.exports[name].width for name in draft.taps)
        own, joining = draft_traces(draft, traced)

        def forward(
            trace: Trace, layer: int = 0, lender: Forward | None = None, max_tokens: int = max_tokens
        ) -> Forward:
            calls, step = fold(trace), replace(target.step, ids=self.ids[:, self.ahead + layer :])
            return Forward(
                trace, calls, cache.of(DRAFT), step,
                max_tokens=max_tokens, max_chosen=self.max_chosen, positions=positions, dtype=_dtype(calls),
                lender=lender,
            )  # fmt: skip

        first = forward(own[0])
        self.layers = (first, *(forward(trace, 1 + i, first) for i, trace in enumerate(own[1:])))
        self.joining = forward(joining) if joining else None
        correcting = trace_correct(draft) if blocks else None
        self.markov = forward(correcting, max_tokens=self.max_chosen) if correcting else None

    @property
    def num_bytes(self) -> int:
        """Bytes of their buffers, without the step's."""
        return sum(part.num_bytes for part in (*self.layers, self.joining, self.markov) if part)


def _dtype(calls: Sequence[Call]) -> str:
    """That of most matrices' inputs: some may be kept in float32."""
    found = {weight.dtype for call in calls if call.kind in PRODUCTS for weight in weights_of(call)} - {"float32"}
    return found.pop() if len(found) == 1 else "float32"


class GraphDraft:
    """A DraftForward whose rows and logits are tensors on the device: outputs [count, X], carried rows [n, width],
    logits of the draft vocabulary. All methods but `bind` and `enter` run on the executor's thread.

    executor: of the target. record: makes a replay of launches.
    """

    seconds = 0.0  # as the executor itself, it does not measure kernels

    def __init__(self, draft: DraftModel, forwards: DraftForwards, executor: GraphExecutor, record: Record):
        self.draft, self.forwards, self.executor = draft, forwards, executor
        self.max_tokens = forwards.max_tokens
        sizes = forwards.max_tokens, forwards.max_chosen
        self._layers = tuple(Replays(forward, None, *sizes, record) for forward in forwards.layers)
        self._joining = Replays(forwards.joining, None, *sizes, record) if forwards.joining else None
        self._pieces = np.zeros(tuple(forwards.step.pieces.shape), np.int32)
        self._ends: list[int] = []  # the last token row of each span of the last step
        self._layer = 0  # that computed it
        self._kept: list[tuple[Tensor, Sequence[Draw], list[int]]] = []  # results of draws, and which do not wait
        self._drawn_at: dict[int, int] = {}  # the position of the last guess of each row that was drawn on the device
        self._own_ids: Tensor | None = None  # the draft's number of each of the target's ids
        if draft.draft_ids is not None:
            self._own_ids = torch.from_numpy(draft.draft_ids.astype(np.int32)).to(forwards.ids.device)
        self._common: tuple[Tensor, Tensor] | None = None  # of ids that both have: the draft's and the target's
        if draft.target_ids is not None:
            common = np.flatnonzero(draft.target_ids >= 0)
            own, targets = (torch.from_numpy(ids.astype(np.int64)) for ids in (common, draft.target_ids[common]))
            self._common = own.to(forwards.ids.device), targets.to(forwards.ids.device)

    @property
    def replays(self) -> tuple[Replays, ...]:
        """Of all its launches."""
        return self._layers if self._joining is None else (*self._layers, self._joining)

    def record_all(self, progress: Progress | None = None) -> None:
        """As `Replays.record_all`."""
        for replays in self.replays:
            replays.record_all(progress)

    def bind(self, rows: RowArrays, ahead: int) -> None:
        """As `DraftForward.bind`."""
        self._rows = rows

    def enter(self, row: int) -> None:
        """As `DraftForward.enter`: nothing of a row is kept here."""

    def taps(self, first: int, count: int) -> Tensor:
        """As `DraftForward.taps`."""
        target = self.executor.forward
        outputs = [target.value(target.exports[name], first + count)[first:] for name in self.draft.taps]
        return torch.cat(outputs, 1)

    def run(self, spans: Sequence[Span], taps: Tensor | None, rows: Tensor | None, layer: int = 0) -> None:
        """As `DraftForward.run`."""
        self._write(spans, layer)
        count = sum(span.count for span in spans)
        if taps is not None:
            rows = self._joined(taps)
        elif rows is None and layer:
            rows = self._carried(count).clone()
        self._layer = layer
        if rows is not None:
            give(self._forward, rows)
        self._layers[layer]("rows", count)
        self._ends = (np.cumsum([span.count for span in spans]) - 1).tolist()

    @property
    def _forward(self) -> Forward:
        return self.forwards.layers[self._layer]

    def _carried(self, count: int) -> Tensor:
        return self._forward.value(self._forward.exports["carried"], count)

    def _write(self, spans: Sequence[Span], layer: int, both_ways: bool = False) -> None:
        """Writes the pieces of a step and their ids. both_ways: whether all rows of a span see each other."""
        pieces, first, ids, ahead = self._pieces, 0, self.forwards.ids, self.forwards.ahead + layer
        pieces[:] = 0, 0, 0, NO_TOKEN, 0
        for piece, span in zip(pieces, spans, strict=False):
            piece[:] = span.row, span.start, span.count, first, both_ways
            first += span.count
        writer = self.executor.rows.writer
        writer.fill(self.forwards.step.pieces, pieces)
        width = ids.shape[1]
        places = np.concatenate([np.arange(span.start, span.end) + (span.row * width + ahead) for span in spans])
        values = np.concatenate([self._rows.ids[span.row, span.start + ahead : span.end + ahead] for span in spans])
        known = values != LATER
        writer.write(ids, places[known], values[known])
        if ids is not self.executor.forward.step.ids and len(late := places[~known]):
            drawn = np.array([row * width + self._drawn_at[row] for row in (late // width).tolist()])
            writer.move(ids, late, self.executor.forward.step.ids, drawn, self._own_ids)

    def _joined(self, taps: Tensor) -> Tensor:
        if self._joining is None:
            return taps
        assert self.forwards.joining is not None
        give(self.forwards.joining, taps)
        self._joining("rows", len(taps))
        return self.forwards.joining.value(self.forwards.joining.hidden, len(taps))

    def logits(self, at: Sequence[int]) -> Tensor:
        """As `DraftForward.logits`."""
        own = self._forward
        assert own.logits is not None
        chosen = np.array([self._ends[place] for place in at], np.int32)
        self.executor.rows.writer.fill(self.forwards.step.chosen[: len(at)], chosen)
        self._layers[self._layer]("chosen", len(at))
        return own.value(own.logits, len(at))

    def carried(self, at: Sequence[int]) -> Tensor:
        """As `DraftForward.carried`."""
        return self.executor.rows.writer.rows(self._carried(self._ends[-1] + 1), [self._ends[place] for place in at])

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Taken | None]:
        """As `DraftForward.draw`, from logits of the draft vocabulary."""
        logits = self._as_targets(logits)
        here = [i for i, draw in enumerate(draws) if reason(draw.row.spec)]
        found: list[Taken | None] = [Taken()] * len(draws)
        if len(here) < len(draws):
            found = self._draw(draws, here)
        if here:
            for i, taken in zip(here, _sampled(logits[here], [draws[i] for i in here]), strict=True):
                found[i] = taken
        return found

    def _as_targets(self, logits: Tensor) -> Tensor:
        """Puts the logits in the place of the target's: -inf for ids that the draft model lacks."""
        target = self.executor.forward
        assert target.logits is not None
        wide = target.value(target.logits, len(logits))
        if self._common is None:
            return wide.copy_(logits)
        own, targets = self._common
        return wide.fill_(-torch.inf).index_copy_(1, targets, logits.index_select(1, own))

    def _draw(self, draws: Sequence[Draw], left_out: Sequence[int]) -> list[Taken | None]:
        """Draws on the device from the target's logits; nothing for the draws at the places `left_out`. What does not
        wait is kept for `collect`."""
        made, replays, writer = self.executor.draws, self.executor.replays, self.executor.rows.writer
        assert made is not None
        rows = [-1 if i in left_out else draw.row.number for i, draw in enumerate(draws)]
        count, bucket = len(draws), bucket_of(len(draws), replays.max_chosen)
        mask_of = [-1 if draw.mask is None or i in left_out else i for i, draw in enumerate(draws)]
        for i, draw in enumerate(draws):
            if draw.mask is not None and i not in left_out:
                writer.fill(made.masks[i, : len(draw.mask)], draw.mask.copy())
        level = made.level([row for row in rows if row >= 0], masked=max(mask_of) >= 0)
        slots = slots_of(rows, [draw.known for draw in draws], mask_of, bucket)
        for target, values in zip((made.rows, made.known, made.mask_of), slots, strict=True):
            writer.fill(target[:bucket], values)
        replays(f"sample {level}", count)
        results = torch.stack(made.results(count, level)[:2])
        there = [i for i in range(count) if i not in left_out]
        self._drawn_at.update((draws[i].row.number, draws[i].known) for i in there)
        if later := [i for i in there if not draws[i].waits]:
            self._kept.append((results, draws, later))
        found: list[Taken | None] = [None] * count
        if waiting := [i for i in there if draws[i].waits]:
            [known] = fetch([results])()
            for i in waiting:
                found[i] = self._taken(known[:, i], draws[i])
        return found

    def collect(self) -> list[Taken]:
        """As `DraftForward.collect`."""
        kept, self._kept = self._kept, []
        [known] = fetch([torch.cat([results for results, _, _ in kept], 1)])()
        found, first = [], 0
        for results, draws, places in kept:
            found += [self._taken(known[:, first + i], draws[i]) for i in places]
            first += results.shape[1]
        return found

    def _taken(self, result: np.ndarray, draw: Draw) -> Taken:
        """result: the id and the error of a draw."""
        token, error = result.tolist()
        vocab = self.executor.model.config.vocab_size
        return Taken(error=error_text(error, draw.row.spec, vocab)) if error else Taken((token,))


def give(forward: Forward, rows: Tensor) -> None:
    """Writes what a forward reads besides ids."""
    assert forward.given is not None
    forward.value(forward.given, len(rows)).copy_(rows)


def _sampled(logits: Tensor, draws: Sequence[Draw]) -> list[Taken]:
    """Samples on the host."""
    contexts = [
        RowContext(row.spec, row.ids[:known], row.prompt_len, known, mask, carry)
        for row, known, carry, mask, _ in draws
    ]
    return [host_sampling.taken(one) for one in sample(logits.cpu(), contexts)]


@dataclass(slots=True)
class _Queued:
    """A step after which nothing is computed. rows: of its works. taps: copies of the outputs that a head reads."""

    step: ExecutorStep
    rows: Sequence[Row]
    taps: Tensor | None = None


class GraphProposer(Proposer):
    """A Proposer whose forward is a GraphDraft: it runs on the executor's thread, with tensors on the device.

    After a step that asks for no guesses nothing is computed while few hidden rows wait. The next step may then begin
    before its ids are here, so the hidden rows are copied in between, on the device.
    """

    def bind(self, rows: Rows) -> None:
        """As `Proposer.bind`."""
        super().bind(rows)
        assert isinstance(self.forward, GraphDraft)
        self._queued: dict[int, _Queued] = {}  # by the id() of a step, which they hold
        self.forward.executor.after = self._copy_taps

    def begin(self, step: ExecutorStep) -> None:
        """As `Proposer.begin`."""
        super().begin(step)
        if self.draft.taps and not any(self._needs_more(work) for work in step.works):
            self._queued[id(step)] = _Queued(step, [self._rows[work.row] for work in step.works])
        while len(self._queued) > _MOST_QUEUED:  # the results of others are not taken any more
            del self._queued[next(iter(self._queued))]

    def _needs_more(self, work: Work) -> bool:
        waiting = sum(map(len, self._waiting[work.row]))
        return bool(work.propose) or (self.draft.advances and waiting + work.count > LAG)

    def waits(self, step: ExecutorStep) -> bool:
        """As `Proposer.waits`."""
        return id(step) not in self._queued and super().waits(step)

    def _copy_taps(self, step: ExecutorStep) -> None:
        """On the executor's thread, before the next step begins."""
        queued = self._queued.get(id(step))
        if queued and self.draft.advances:
            queued.taps = self.forward.taps(0, step.starts[-1])

    def propose(self, step: ExecutorStep, ahead: Ahead | None = None) -> dict[int, tuple[int, ...]]:
        """As `Proposer.propose`."""
        if queued := self._queued.pop(id(step), None):
            self._let_wait(queued)
            return {}
        if not self.waits(step):
            return {}  # the next step may have begun
        assert isinstance(self.forward, GraphDraft)
        return self.forward.executor.submit(self._propose, step, ahead).result()

    def _let_wait(self, queued: _Queued) -> None:
        """The hidden rows of the sequences that are still there wait until there are more, or guesses are wanted."""
        for work, row, first in zip(queued.step.works, queued.rows, queued.step.starts, strict=False):
            count = min(work.end, row.known - self.draft.ahead) - work.start
            if count <= 0 or work.want_pooled or row.fault or row.known > self.positions:
                continue
            if queued.taps is not None and self._rows.has(work.row, row):
                self._wait(row, work.start, queued.taps[first : first + count])

    @torch.inference_mode()
    def _propose(self, step: ExecutorStep, ahead: Ahead | None) -> dict[int, tuple[int, ...]]:
        return super().propose(step, ahead)

    def _joined(self, parts: Sequence[Array]) -> Tensor:
        return torch.cat(list(parts))

    def _stacked(self, rows: Sequence[Array]) -> Tensor:
        return torch.stack(list(rows))

    def _of_target(self, logits_nv: Array) -> Array:
        return logits_nv  # the forward translates them on the device
