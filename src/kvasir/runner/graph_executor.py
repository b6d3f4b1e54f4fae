"""The graph executor: replays recorded launches over buffers on a device. Steps queue: sampled ids are written where
the next step reads them, and the host gets them later.

One thread follows the plans and launches in order, so the caller can plan while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

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
class Results:
    """Results of a step. logits: float32 rows of works that may be sampled later, by place. taken: of
    `ExecutorStep.now`. before: the carries of those works before they were sampled. The dictionaries are by place."""

    taken: list[Taken] = field(default_factory=list)
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
            self._replay("rows", bucket)
        if self.forward.logits is not None:
            for bucket in buckets(self.max_chosen):
                self._replay("chosen", bucket)

    def _replay(self, name: str, bucket: int) -> Callable[[], None]:
        if (name, bucket) not in self._replays:
            run = self.forward.run_rows if name == "rows" else self.forward.run_chosen
            self._replays[name, bucket] = self._record(lambda: run(bucket))
        return self._replays[name, bucket]

    # -- a step, on the thread

    @torch.inference_mode()
    def compute(self, step: ExecutorStep) -> Results:
        """Follows the step's plan, moves its blocks, then computes its works."""
        self.rows.follow(step.plan)
        found = Results(saved=move_blocks(self._blocks, step.plan))
        if step.works:
            self._write_pieces(step)
            self._replay("rows", bucket_of(step.starts[-1], self.max_tokens))()
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
        self._replay("chosen", bucket_of(len(rows), self.max_chosen))()
        return forward.value(forward.logits, len(rows))

    def _sample(self, found: Results, step: ExecutorStep) -> None:
        """Samples `now`, and keeps the logits of what may be sampled later."""
        for at in step.later:
            work, end = step.works[at], step.starts[at + 1]
            found.logits[at] = self._logits(range(end - 1 - work.drafted, end)).clone()
        for begin in range(0, len(step.now), self.max_chosen):
            part = step.now[begin : begin + self.max_chosen]
            logits = self._logits([step.starts[at + 1] - 1 for at in part])
            for i, at in enumerate(part):
                if self.rows.host[step.works[at].row].spec.guided:
                    found.logits[at] = logits[i : i + 1].clone()
            works = [step.works[at] for at in part]
            found.before.update((at, self.rows.host[work.row].carry) for at, work in zip(part, works, strict=True))
            sampled = self.take(logits, works, [None] * len(works))
            found.taken += sampled
            self._write(works, sampled)

    def take(self, logits_SV: Tensor, works: Sequence[Work], masks: Sequence[bytes | None]) -> list[Taken]:
        """Samples one id from each row of logits."""
        rows = [self.rows.host[work.row] for work in works]
        given = zip(rows, masks, works, strict=True)
        contexts = [_context(row, mask, work.end, row.carry) for row, mask, work in given]
        return [taken(found) for found in sample(logits_SV, contexts)]

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
        found = []
        for place, mask in zip(at, masks, strict=True):
            work = step.works[place]
            if place in results.before:
                self.rows.host[work.row].carry = results.before[place]
            sampled = self._drawn(results.logits[place], work, mask)
            self._write([work], [sampled])
            found.append(sampled)
        return found

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
        self.future.result()
        return 0.0

    def decoded(self) -> NoReturn:
        raise AssertionError("this executor does not support columns")

    def taken(self) -> list[Taken]:
        return self.future.result().taken

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
