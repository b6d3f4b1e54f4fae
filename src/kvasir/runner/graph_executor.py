"""The graph executor: replays recorded launches over buffers on a device. Steps queue: sampled ids are written where
the next step reads them, and the host gets them later.

One thread follows the plans and launches in order, so the caller can plan while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvasir.device.replays import fetch
from kvasir.graph.draws import LEVELS, Draws, slots_of
from kvasir.graph.forward import Forward
from kvasir.graph.triton import NO_TOKEN
from kvasir.layers.adapters import Pairs
from kvasir.layers.kv_cache import KVCache
from kvasir.plan import Join, Work
from kvasir.runner.blocks import BlockCache, Copies, Exported, StagedBlocks, move_blocks, wait_all
from kvasir.runner.device_rows import DeviceRows
from kvasir.runner.drafts import along
from kvasir.runner.eager_executor import taken
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.rows import Row, Rows
from kvasir.sampling.device_state import entries, error_text, reason
from kvasir.sampling.logprobs import logprobs
from kvasir.sampling.rows import BadLogits, RowContext
from kvasir.sampling.sampler import sample

Record = Callable[[Callable[[], None]], Callable[[], None]]


def bucket_of(count: int, most: int) -> int:
    """The bucket of `count` rows: the next power of two, at most `most`."""
    return min(1 << max(0, count - 1).bit_length(), most)


def buckets(most: int) -> list[int]:
    """All buckets up to `most` rows."""
    return sorted({bucket_of(1 << i, most) for i in range(most.bit_length() + 1)})


@dataclass(slots=True)
class Drawn:
    """Ids sampled on the device, on their way to the host. places: of their works. fetched: waits for the tensors of
    `Draws.results`. unread: whether the host's rows lack them."""

    places: Sequence[int]
    works: Sequence[Work]
    rows: Sequence[Row]
    fetched: Callable[[], list[np.ndarray]]


@dataclass(slots=True)
class Results:
    """Results of a step. logits: float32 rows of works that may be sampled later, by place. taken: of works of
    `ExecutorStep.now` that the host has sampled, drawn: of the others. before: the carries of the former before they
    were sampled. The dictionaries are by place."""

    taken: dict[int, Taken] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    before: dict[int, bytes] = field(default_factory=dict)
    read: dict[int, tuple[tuple[Entry, ...], str]] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    hidden: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    saved: tuple[Exported, ...] = ()


class GraphExecutor:
    """model: pools embeddings. max_tokens, max_chosen: the largest buckets. record: makes a replay of launches. copies:
    transfers blocks while the device computes."""

    computes = frozenset(("drafted",))
    queues = True
    columns = False

    def __init__(
        self, model: Any, forward: Forward, *, max_tokens: int, max_chosen: int, record: Record,
        overlaps: bool = False, copies: Copies | None = None,
    ):  # fmt: skip
        self.model, self.forward = model, forward
        self.max_tokens, self.max_chosen = max_tokens, max_chosen
        self.hidden = frozenset(forward.exports)
        self._overlaps, self._copies, self._record = overlaps, copies, record
        self._blocks: BlockCache = StagedBlocks(forward.cache, copies) if copies else forward.cache
        self._replays: dict[tuple[str, int], Callable[[], None]] = {}
        self.draws = None if forward.logits is None else Draws(forward.step.ids, max_chosen, forward.logits.width)
        self.unread: list[Drawn] = []  # whose ids the host's rows lack
        self._pieces = np.zeros(tuple(forward.step.pieces.shape), np.int32)
        self._thread = ThreadPoolExecutor(1, "kvasir-runner")

    @property
    def cache(self) -> KVCache:
        return self.forward.cache

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def bind(self, rows: Rows) -> None:
        self.rows = DeviceRows(deepcopy(rows), self.forward.step)

    def enter(self, join: Join, row: Row) -> None: ...

    def settle(self) -> None: ...

    def start(self, step: ExecutorStep) -> GraphHandle:
        return GraphHandle(self, step, self.submit(self.compute, step))

    def set_adapter(self, adapter: int, pairs: Pairs | None) -> None:
        raise ValueError("the graph executor has no adapters yet")

    def close(self) -> None:
        self._thread.shutdown()
        if self._copies:
            self._copies.close()

    def submit(self, *call: Any) -> Future:
        return self._thread.submit(*call)

    # -- replays

    def record_all(self) -> None:
        """Records the launches of every bucket."""
        for bucket in buckets(self.max_tokens):
            self._recorded("rows", bucket)
        if self.forward.logits is not None:
            for bucket in buckets(self.max_chosen):
                self._recorded("chosen", bucket)
                for level in range(len(LEVELS)):
                    self._recorded(f"sample {level}", bucket)

    def replay(self, name: str, bucket: int) -> None:
        """Makes the launches of a bucket: "rows", "chosen" or "sample <level>"."""
        self._recorded(name, bucket)()

    def _recorded(self, name: str, bucket: int) -> Callable[[], None]:
        if (name, bucket) not in self._replays:
            self._replays[name, bucket] = self._record(partial(self._run(name), bucket))
        return self._replays[name, bucket]

    def _run(self, name: str) -> Callable[[int], None]:
        """The function that makes the launches of a bucket."""
        forward, draws = self.forward, self.draws
        if name == "rows":
            return forward.run_rows
        if name == "chosen":
            return forward.run_chosen
        assert draws is not None and forward.logits is not None
        logits, level = forward.logits, int(name.split()[1])
        return lambda bucket: draws.run(forward.value(logits, bucket), level)

    # -- a step, on the thread

    @torch.inference_mode()
    def compute(self, step: ExecutorStep) -> Results:
        """Follows the step's plan, moves its blocks, then computes its works."""
        self._collect(later=min(1, len(self.unread)))  # earlier draws are on the host already
        self.rows.follow(step.plan)
        for join in step.plan.joined:
            if self.draws and not reason(join.spec):
                self.draws.state.enter(join.row, join.spec, join.prompt_len)
        found = Results(saved=move_blocks(self._blocks, step.plan))
        if step.works:
            self._write_pieces(step)
            self.replay("rows", bucket_of(step.starts[-1], self.max_tokens))
            self._keep(found, step)
            self._sample(found, step)
        return found

    def _write_pieces(self, step: ExecutorStep) -> None:
        pieces = self._pieces
        pieces[:] = 0, 0, 0, NO_TOKEN, 0
        for at, work in enumerate(step.works):
            pieces[at] = work.row, work.start, work.count, step.starts[at], work.indivisible
        self.rows.writer.fill(self.forward.step.pieces, pieces)

    def _keep(self, found: Results, step: ExecutorStep) -> None:
        """Copies the outputs that works want to the host."""
        for at, work in enumerate(step.works):
            first, end = step.starts[at], step.starts[at + 1]
            if work.want_pooled:
                found.pooled[at] = self.model.pool(_host(self._hidden(end)[first:]))
            for name in work.want_hidden:
                found.hidden[at, name] = _host(self.forward.value(self.forward.exports[name], end)[first:])
            if any(work.read):
                found.read[at] = self._read(work, first)

    def _hidden(self, count: int) -> Tensor:
        return self.forward.value(self.forward.hidden, count)

    def _read(self, work: Work, first: int) -> tuple[tuple[Entry, ...], str]:
        """Log-probabilities of known ids, or an error. first: the work's first token row."""
        entries: list = []
        for begin in range(*work.read, self.max_chosen):
            end = min(begin + self.max_chosen, work.read[1])
            logits = self._logits(range(first + begin - work.start, first + end - work.start))
            try:
                entries += logprobs(logits, *self.rows.host[work.row].read(begin, end))
            except BadLogits as error:
                return (), str(error)
        return tuple(entries), ""

    def _logits(self, rows: Sequence[int]) -> Tensor:
        """The logits of at most `max_chosen` token rows, float32 [rows, vocabulary]; valid until the next call."""
        forward = self.forward
        assert forward.logits is not None
        self.rows.writer.fill(forward.step.chosen[: len(rows)], np.array(rows, np.int32))
        self.replay("chosen", bucket_of(len(rows), self.max_chosen))
        return forward.value(forward.logits, len(rows))

    def _sample(self, found: Results, step: ExecutorStep) -> None:
        """Samples `now`, and keeps the logits of what may be sampled later."""
        for at in step.later:
            work, end = step.works[at], step.starts[at + 1]
            found.logits[at] = self._logits(range(end - 1 - work.drafted, end)).clone()
        on_host = [at for at in step.now if reason(self._row(step.works[at]).spec)]
        on_device = [at for at in step.now if at not in on_host] if on_host else step.now
        for places, sample_part in ((on_device, self._sample_there), (on_host, self._sample_here)):
            for begin in range(0, len(places), self.max_chosen):
                part = places[begin : begin + self.max_chosen]
                logits = self._logits([step.starts[at + 1] - 1 for at in part])
                for i, at in enumerate(part):
                    if self._row(step.works[at]).spec.guided:
                        found.logits[at] = logits[i : i + 1].clone()
                sample_part(found, part, [step.works[at] for at in part], logits)

    def _row(self, work: Work) -> Row:
        return self.rows.host[work.row]

    def _sample_there(self, found: Results, places: Sequence[int], works: Sequence[Work], logits: Tensor) -> None:
        """Samples on the device, where the next step finds the ids; the host does not wait."""
        found.drawn.append(drawn := self._draw(places, works, [None] * len(works)))
        self.unread.append(drawn)
        for row in drawn.rows:
            row.append(0)  # until `_collect`

    def _draw(self, places: Sequence[int], works: Sequence[Work], masks: Sequence[bytes | None]) -> Drawn:
        """Starts to sample from the logits that the last launches left."""
        assert self.draws is not None
        draws, writer, bucket = self.draws, self.rows.writer, bucket_of(len(works), self.max_chosen)
        level = draws.level([work.row for work in works], masked=any(mask is not None for mask in masks))
        for i, mask in enumerate(masks):
            if mask is not None:
                writer.fill(draws.masks[i, : len(mask) // 4], np.frombuffer(mask, np.int32))
        mask_of = [-1 if mask is None else i for i, mask in enumerate(masks)]
        slots = slots_of([work.row for work in works], [work.end for work in works], mask_of, bucket)
        for target, values in zip((draws.rows, draws.known, draws.mask_of), slots, strict=True):
            writer.fill(target[:bucket], values)
        self.replay(f"sample {level}", bucket)
        return Drawn(places, works, [self._row(work) for work in works], fetch(draws.results(len(works), level)))

    def _collect(self, later: int = 0) -> None:
        """Completes the host's rows by the ids that were sampled on the device, except in the last `later` draws."""
        done, self.unread = self.unread[: len(self.unread) - later], self.unread[len(self.unread) - later :]
        for drawn in done:
            tokens = drawn.fetched()[0]
            for work, row, token in zip(drawn.works, drawn.rows, tokens.tolist(), strict=True):
                if self.rows.host.has(work.row, row):
                    row.ids[work.end] = max(token, 0)

    def _sample_here(self, found: Results, places: Sequence[int], works: Sequence[Work], logits: Tensor) -> None:
        """Samples with the reference, for parameters that the device's sampler lacks."""
        self._collect()
        found.before.update((at, self._row(work).carry) for at, work in zip(places, works, strict=True))
        sampled = self.take(logits, works, [None] * len(works))
        found.taken.update(zip(places, sampled, strict=True))
        self._write(works, sampled)

    def take(self, logits_SV: Tensor, works: Sequence[Work], masks: Sequence[bytes | None]) -> list[Taken]:
        """Samples one id from each row of logits."""
        rows = [self.rows.host[work.row] for work in works]
        given = zip(rows, masks, works, strict=True)
        contexts = [_context(row, mask, work.end, row.carry) for row, mask, work in given]
        return [taken(found) for found in sample(logits_SV, contexts)]

    def read_drawn(self, drawn: Drawn) -> list[Taken]:
        """What was sampled on the device."""
        tokens, errors, *described = (part.tolist() for part in drawn.fetched())
        specs, vocab = [row.spec for row in drawn.rows], self.model.config.vocab_size
        found: list[Entry | None] = [None] * len(specs)
        if described:
            own, ranks, best_ids, best = described
            found = entries(tokens, own, ranks, best_ids, best, [spec.logprobs for spec in specs], vocab)
        return [
            Taken(error=error_text(error, spec, vocab)) if error else Taken((token,), () if entry is None else (entry,))
            for token, error, entry, spec in zip(tokens, errors, found, specs, strict=True)
        ]

    def _write(self, works: Sequence[Work], sampled: Sequence[Taken]) -> None:
        """Appends sampled ids to the rows, here and on the device."""
        for work, found in zip(works, sampled, strict=True):
            if not found.error:
                row = self.rows.host[work.row]
                row.take(work, found.tokens, found.carry)
                self.rows.write_ids(work.row, work.end - work.drafted, row.known)

    @torch.inference_mode()
    def draw(
        self, results: Results, step: ExecutorStep, at: Sequence[int], masks: Sequence[bytes | None]
    ) -> list[Taken]:
        """Samples works with their masks. What was sampled without a mask is replaced."""
        self._collect()
        found: dict[int, Taken] = {}
        there = [i for i, place in enumerate(at) if self._draws_there(step.works[place])]
        for begin in range(0, len(there), self.max_chosen):
            part = there[begin : begin + self.max_chosen]
            found.update(
                zip(
                    part, self._draw_masked(results, step, [at[i] for i in part], [masks[i] for i in part]), strict=True
                )
            )
        for i, (place, mask) in enumerate(zip(at, masks, strict=True)):
            if i not in found:
                work = step.works[place]
                if place in results.before:
                    self._row(work).carry = results.before[place]
                found[i] = self._drawn(results.logits[place], work, mask)
                self._write([work], [found[i]])
        return [found[i] for i in range(len(at))]

    def _draws_there(self, work: Work) -> bool:
        return not work.drafted and not reason(self._row(work).spec)

    def _draw_masked(
        self, results: Results, step: ExecutorStep, places: Sequence[int], masks: Sequence[bytes | None]
    ) -> list[Taken]:
        """Samples on the device from kept logits, and waits for the ids."""
        assert self.forward.logits is not None
        works = [step.works[place] for place in places]
        torch.cat([results.logits[place] for place in places], out=self.forward.value(self.forward.logits, len(places)))
        sampled = self.read_drawn(self._draw(places, works, masks))
        for work, found in zip(works, sampled, strict=True):
            if not found.error:
                self._row(work).take(work, found.tokens, found.carry)
        return sampled

    def _drawn(self, logits_nV: Tensor, work: Work, mask: bytes | None) -> Taken:
        if not work.drafted:
            return self.take(logits_nV, [work], [mask])[0]
        row = self.rows.host[work.row]

        def draw(i: int, known: int, mask: bytes | None, carry: bytes) -> Taken:
            [found] = sample(logits_nV[i : i + 1], [_context(row, mask, known, carry)])
            return taken(found)

        return along(work, row, mask, draw)


@dataclass(slots=True)
class GraphHandle:
    """A pending step on the executor's thread."""

    executor: GraphExecutor
    step: ExecutorStep
    future: Future[Results]

    def wait(self) -> float:
        for drawn in self.future.result().drawn:
            drawn.fetched()
        return 0.0

    def decoded(self) -> NoReturn:
        raise AssertionError("this executor does not support columns")

    def taken(self) -> list[Taken]:
        results, found = self.future.result(), {}
        for drawn in results.drawn:
            found.update(zip(drawn.places, self.executor.read_drawn(drawn), strict=True))
        found.update(results.taken)
        return [found[at] for at in self.step.now]

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        results = self.future.result()
        return self.executor.submit(self.executor.draw, results, self.step, at, masks).result()

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        return self.future.result().read[at]

    def pooled(self, at: int) -> bytes:
        return self.future.result().pooled[at].tobytes()

    def hidden(self, at: int, name: str) -> bytes:
        return self.future.result().hidden[at, name].tobytes()

    def saved(self) -> tuple[memoryview, ...]:
        return wait_all(self.future.result().saved)


def _host(rows: Tensor) -> np.ndarray:
    return rows.float().cpu().numpy()


def _context(row: Row, mask: bytes | None, known: int, carry: bytes) -> RowContext:
    words = None if mask is None else np.frombuffer(mask, np.int32)
    return RowContext(row.spec, row.ids[:known], row.prompt_len, known, words, carry)
