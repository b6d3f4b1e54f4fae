"""The program executor: runs a traced program, one native call per step, while the caller can plan.

From joining to leaving, a row's ids and block tables stay where the kernels read them; a few integers per sequence
describe a step. Rows with a grammar's mask are sampled by a second native call, from the logits of the first, so masks
can be computed during the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvasir.lora import Adapter
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL, PIECE_LOGITS, PIECE_SAMPLE, Piece
from kvasir.plan import BlockSink, Decodes, Join, Work
from kvasir.program.cache import NativeCache
from kvasir.program.grown import GrownBlocks
from kvasir.program.marshal import MAX_CHOSEN
from kvasir.program.native import records
from kvasir.program.program import Program
from kvasir.runner.blocks import move_blocks, wait_all
from kvasir.runner.computed import refuse
from kvasir.runner.drafts import accepted, along, masks_of
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.rows import Row, Rows
from kvasir.runner.streaming import WeightStream
from kvasir.sampling.native import (
    SAMPLE_ERRORS,
    NativeSampler,
    SampledStruct,
    SampleRow,
    entry_of,
    fill_carry,
    fill_spec,
    next_carry,
)
from kvasir.sampling.rows import BadLogits


class Position(NamedTuple):
    """What to sample: the id after the first `known` ids of a row."""

    row: Row
    known: int
    mask: bytes | None
    carry: bytes


class ProgramExecutor:
    """model: pools embeddings. program: computes steps. stream: of weights, closed with the executor."""

    computes = frozenset(("drafted", "second", "adapters"))
    queues = False
    columns = True

    def __init__(self, model: Any, program: Program, stream: WeightStream | None = None):
        self.grown: GrownBlocks | None = None
        self._growing = False  # blocks of the last step may still be read
        self.model, self.program, self.stream = model, program, stream
        if isinstance(program, Program) and not stream and program.pool.apart:  # else no core is free to read blocks
            self.grown = GrownBlocks(program)
        self.hidden = frozenset(program.lowered.exports)
        self._kept: dict[int, list] = {}  # by row, the arrays that its native state points to

    @property
    def cache(self) -> NativeCache:
        return self.program.cache

    @property
    def overlaps(self) -> bool:
        return self.program.pool.apart

    @property
    def grows(self) -> tuple[int, ...]:
        return self.grown.groups if self.grown else ()

    def watch(self, sink: BlockSink) -> None:
        self._sink = sink

    def bind(self, rows: Rows) -> None:
        self.rows = rows
        rows.arrays = self.program.bind(rows.arrays)
        self._pieces = records(self.program.pieces, Piece)
        self.results = records(self.program.results, SampledStruct)

    def enter(self, join: Join, row: Row) -> None:
        state = self.program.states[join.row]
        state.reached = 0
        state.adapt(row.adapters)
        self._kept[join.row] = [*fill_spec(state.spec, row.spec, row.prompt_len)]

    def settle(self) -> None:
        self.program.settle()

    def start(self, step: ExecutorStep) -> ProgramHandle:
        if self.grown and self._growing:
            self.grown.settle()
            self._growing = False
        saved = wait_all(move_blocks(self.cache, step.plan))
        works, pieces, first = step.works, self.program.pieces, len(step.plan.decodes)
        kept = PIECE_LOGITS * (_chosen(step) <= MAX_CHOSEN)  # else the buffer could not hold all logits
        flags = dict.fromkeys(step.now, PIECE_SAMPLE) | dict.fromkeys(step.later, kept)
        end = self._decode(step.plan.decodes) if step.plan.decodes else 0
        for at, work in enumerate(works):
            piece = pieces[first + at]
            piece.flags = flags.get(at, 0) | PIECE_BIDIRECTIONAL * work.indivisible
            piece.row, piece.start, piece.count, piece.drafted = work.row, work.start, work.count, work.drafted
            end = max(end, work.end)
            if work.sample and (row := self.rows[work.row]).spec.carries:
                fill_carry(self.program.states[work.row].spec, row.spec, row.carry)
        if self.program.types is not None:
            self._fill_types(self.program.types, works, step.starts)
        if end:
            self._run(step, first + len(works), end)
        return ProgramHandle(self, step, saved)

    def _run(self, step: ExecutorStep, num_pieces: int, end: int) -> None:
        blocks = [block for work in step.works for block in work.grows]
        if self.grown and blocks:
            self.grown.begin(step.plan.step, blocks, self._sink)
            self._growing = True
        try:
            self.program.start(num_pieces, end)
        except BaseException:
            if self.grown:
                self.grown.stop()
            raise

    def _fill_types(self, types: np.ndarray, works: Sequence[Work], starts: Sequence[int]) -> None:
        """Sets the token types of a step's rows."""
        for work, begin in zip(works, starts, strict=False):
            second = self.rows.arrays.seconds[work.row] or work.end
            types[begin : begin + work.count] = np.arange(work.start, work.end) >= second

    def _decode(self, decodes: Decodes) -> int:
        """Fills the first pieces with the decodes; returns their greatest end."""
        pieces, starts = self._pieces[: len(decodes)], np.frombuffer(decodes.starts, np.int32)
        pieces["row"], pieces["start"] = np.frombuffer(decodes.rows, np.int32), starts
        pieces["flags"], pieces["count"], pieces["drafted"] = PIECE_SAMPLE, 1, 0
        return int(starts.max()) + 1

    def check_adapter(self, adapter: Adapter) -> None:
        if what := self.program.lacks(adapter):
            refuse("the program executor", what)

    def pack_adapter(self, adapter: Adapter) -> Any:
        self.check_adapter(adapter)
        return self.program.pack_adapter(adapter)

    def set_adapter(self, adapter: int, packed: Any) -> None:
        self.program.set_adapter(adapter, packed)

    def close(self) -> None:
        if self.grown:
            self.grown.close()
        self.program.close()
        if self.stream:
            self.stream.close()

    def __del__(self) -> None:
        if hasattr(self, "program"):  # its threads read the rows
            self.close()

    # -- sampling from computed logits

    @cached_property
    def sampler(self) -> NativeSampler:
        return NativeSampler(self.program.vocab, self.program.pool)

    def take(self, logits: np.ndarray, positions: Sequence[Position]) -> list[Taken]:
        """Samples one id from each row of logits."""
        specs = (SampleRow * len(positions))()
        for i, position in enumerate(positions):
            specs[i] = self.program.states[position.row.number].spec  # a copy
            _complete(specs[i], position)
        results = zip(self.sampler.run(logits, specs), positions, strict=True)
        return [self.taken(found, position.row, position.carry) for found, position in results]

    def taken(self, found: SampledStruct, row: Row, carry: bytes) -> Taken:
        if found.error:
            return Taken(error=SAMPLE_ERRORS[found.error])
        carry = next_carry(found, row.spec, carry) if row.spec.carries else carry
        entry = entry_of(found, row.spec.logprobs, self.program.vocab) if row.spec.logprobs >= 0 else None
        return Taken((found.token,), () if entry is None else (entry,), carry)


@dataclass(frozen=True, slots=True)
class ProgramHandle:
    """A pending step, whose results are in the program's buffers."""

    executor: ProgramExecutor
    step: ExecutorStep
    blocks: tuple[memoryview, ...]

    def wait(self) -> float:
        if not (self.step.works or self.step.plan.decodes):
            return 0.0
        self.executor.program.wait()
        return self.executor.program.seconds

    def decoded(self) -> tuple[np.ndarray, dict[int, str]]:
        found = self.executor.results[: len(self.step.plan.decodes)]
        failed = np.flatnonzero(found["error"]).tolist()
        return found["token"], {place: SAMPLE_ERRORS[int(found["error"][place])] for place in failed}

    def taken(self) -> list[Taken]:
        executor, first, taken = self.executor, len(self.step.plan.decodes), []
        for work in (self.step.works[at] for at in self.step.now):
            row, end = executor.rows[work.row], first + 1 + work.drafted
            found = (executor.taken(executor.program.results[i], row, row.carry) for i in range(first, end))
            taken.append(accepted(work, found) if work.drafted else next(found))
            first = end
        return taken

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        return False

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        executor, works, mask_of = self.executor, self.step.works, dict(zip(at, masks, strict=True))
        rows = {place: executor.rows[works[place].row] for place in at}
        carrying = [place for place in at if works[place].drafted and rows[place].spec.carries]
        wanted: dict[tuple[int, int], Position] = {}
        for place in mask_of.keys() - set(carrying):
            row, first = rows[place], works[place].end - works[place].drafted
            for i, mask in enumerate(masks_of(works[place], mask_of[place])):
                wanted[place, i] = Position(row, first + i, mask, row.carry)
        found: dict[tuple[int, int], Taken] = {}
        for part, logits in self.logits_of([*wanted]):
            found.update(zip(part, executor.take(logits, [wanted[one] for one in part]), strict=True))
        taken = {place: self._along(place, mask_of[place]) for place in carrying}
        for place in mask_of.keys() - set(carrying):
            ids = (found[place, i] for i in range(1 + works[place].drafted))
            taken[place] = accepted(works[place], ids)
        return [taken[place] for place in at]

    def _along(self, place: int, mask: bytes | None) -> Taken:
        executor, work = self.executor, self.step.works[place]
        row, parts = executor.rows[work.row], self.logits_of([(place, i) for i in range(1 + work.drafted)])
        logits = (part[i : i + 1] for places, part in parts for i in range(len(places)))

        def draw(i: int, known: int, mask: bytes | None, carry: bytes) -> Taken:
            [found] = executor.take(next(logits), [Position(row, known, mask, carry)])
            return found

        return along(work, row, mask, draw)

    def logits_of(self, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, int]], np.ndarray]]:
        """The logits of (place, i): of the i-th of a work's last 1 + drafted token rows. Slices of the buffer
        if the run left them there, otherwise computed again; those of a part are then valid until the next."""
        program, left, open_ = self.executor.program, self._left(), list(wanted)
        while open_:
            count = 1
            if left:
                open_.sort(key=left.__getitem__)
                first = left[open_[0]]
                while count < len(open_) and left[open_[count]] == first + count:
                    count += 1
                logits = program.left_logits(first + count)[first:]
            else:
                count = min(len(open_), MAX_CHOSEN)
                logits = program.logits_of([self._token_row(*one) for one in open_[:count]])
            yield open_[:count], logits
            open_ = open_[count:]

    def _token_row(self, place: int, i: int) -> int:
        return self.step.starts[place + 1] - 1 - self.step.works[place].drafted + i

    def _left(self) -> dict[tuple[int, int], int]:
        """The buffer index of each sampled or kept row; empty if the step's rows exceeded the buffer."""
        if _chosen(self.step) > MAX_CHOSEN:
            return {}
        chosen = ((at, i) for at in (*self.step.now, *self.step.later) for i in range(1 + self.step.works[at].drafted))
        return {one: index for index, one in enumerate(chosen, len(self.step.plan.decodes))}

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        work, first = self.step.works[at], self.step.starts[at]
        row, entries = self.executor.rows[work.row], []
        for begin in range(*work.read, MAX_CHOSEN):
            end = min(begin + MAX_CHOSEN, work.read[1])
            rows = range(first + begin - work.start, first + end - work.start)
            logits = self.executor.program.logits_of(rows)
            try:
                entries += self.executor.sampler.describe(logits, *row.read(begin, end))
            except BadLogits as error:
                return (), str(error)
        return tuple(entries), ""

    def pooled(self, at: int) -> bytes:
        first, end = self.step.starts[at], self.step.starts[at + 1]
        executor, task = self.executor, self.step.works[at].want_pooled
        name = getattr(executor.model, "outputs", {}).get(task)
        rows = executor.program.hidden(end) if name is None else executor.program.export(name, end)
        return executor.model.pool(rows[first:], task).tobytes()

    def hidden(self, at: int, name: str) -> bytes:
        first, end = self.step.starts[at], self.step.starts[at + 1]
        return self.executor.program.export(name, end)[first:].tobytes()

    def saved(self) -> tuple[memoryview, ...]:
        return self.blocks


def _chosen(step: ExecutorStep) -> int:
    """How many rows of logits a step samples from or keeps."""
    return len(step.plan.decodes) + sum(1 + step.works[at].drafted for at in (*step.now, *step.later))


def _complete(target: SampleRow, position: Position) -> None:
    """Sets the fields that change from step to step. The position's mask must live as long as the target is used."""
    row = position.row
    fill_carry(target, row.spec, position.carry)
    target.ids, target.num_ids, target.position = row.ids.ctypes.data, position.known, position.known
    if position.mask is not None:
        words = np.frombuffer(position.mask, np.int32)
        target.mask, target.mask_words = words.ctypes.data, len(words)
