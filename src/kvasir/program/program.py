"""Running a program: one native call per step, over the rows that it is bound to."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from kvasir.layers.adapters import ModelChanges, Slot
from kvasir.layers.rows import RowArrays
from kvasir.program import native
from kvasir.program.adapters import Adapters
from kvasir.program.cache import NativeCache
from kvasir.program.calls import NO_HOOKS, Hooks
from kvasir.program.changes import PackedAdapter
from kvasir.program.lower import Buffer, Instruction, Lowered, lower
from kvasir.program.marshal import MAX_CHOSEN, Marshal, prepared
from kvasir.program.memory import ProgramMemory
from kvasir.program.places import Places
from kvasir.program.trace import Trace
from kvasir.sampling.native import SampledStruct


class Program:
    """The forward of one model over one cache.

    `run`, or `start` and `wait`, computes a step: it reads `pieces` (native.Piece, the work of a row) and `states`
    (native.RowState, one per row of the runner), and writes `results`. `hidden` and `left_logits` are float32 views of
    the values of the last run: of all its token rows, and of the chosen rows. The program of one rank performs
    collectives with the other ranks in its steps, so their programs must run at the same time.

    max_tokens: token rows of a step. max_rows: rows of the runner, and pieces of a step. max_positions: number of
    positions with rope angles. max_drafted: drafted ids of a piece. apart: see native.ThreadPool. hooks: called in the
    middle of a step. pool: the threads of another program, whose steps never run at the same time; without it the
    program has its own. memory: of another such program, whose values the next run may overwrite. samples: whether it
    samples ids, which one of several ranks does. vocab: width of the logits, 0 without.
    """

    def __init__(
        self,
        trace: Trace,
        cache: NativeCache,
        *,
        max_tokens: int,
        max_rows: int,
        max_positions: int,
        threads: int,
        max_drafted: int = 0,
        apart: bool = False,
        pin: bool = False,
        hooks: Hooks = NO_HOOKS,
        pool: native.ThreadPool | None = None,
        memory: ProgramMemory | None = None,
        samples: bool = True,
    ):
        self.lowered: Lowered = lower(trace, max_tokens, MAX_CHOSEN, prepared, hooks)
        self.trace = trace
        self.cache = cache
        self._owns_pool = pool is None
        self.pool = pool or native.ThreadPool(threads, pin, apart)
        self.memory = ProgramMemory(self.lowered.arena, memory)
        self.states = (native.RowState * max_rows)()
        self.pieces = (native.Piece * max_rows)()
        self._records = native.records(self.pieces, native.Piece)
        self.results = (SampledStruct * min(max_tokens, max_rows * (1 + max_drafted)))()
        self.marshal = Marshal(
            self.memory, self.lowered, trace, cache, threads, max_tokens, max_rows, max_positions, hooks, samples
        )
        self.struct = self.marshal.program(self.states, self.pieces, self.results)
        self.vocab = self.marshal.vocab
        self.types = self.marshal.types
        self.names = [
            *map(_describe, self.lowered.instructions),
            *([f"sample      of {self.vocab}"] if self.vocab and samples else []),
        ]
        self.times = np.zeros(len(self.marshal.instrs) + 1, np.uint64)
        self._start, self._wait, self._logits = native.start_call(), native.wait_call(), native.logits_call()
        self._progress = native.progress_call()
        self._address = ctypes.addressof(self.struct)
        self._pieces = ctypes.addressof(self.pieces)

    def bind(self, rows: RowArrays, ahead: int = 0) -> RowArrays:
        """Binds the rows that pieces refer to, and returns them; their ids and block tables must keep their addresses.
        ahead: how far after each position its id lies."""
        self._rows = rows
        for i, state in zip(range(len(rows.ids)), self.states, strict=False):
            state.ids, state.max_ids = rows.ids[i, ahead:].ctypes.data, rows.ids.shape[1] - ahead
            for group, table in enumerate(rows.tables):
                state.tables[group], state.table_blocks = table[i].ctypes.data, table.shape[1]
        self._dry_room = np.empty((self.pool.threads, rows.ids.shape[1]), np.int32)
        self.struct.dry_room, self.struct.dry_ids = self._dry_room.ctypes.data, self._dry_room.shape[1]
        return rows

    # -- a step

    def start(self, num_pieces: int, end: int) -> None:
        """Begins to compute the first `num_pieces` pieces. Nothing may access states, pieces or results until `wait`
        has returned. end: greater than every position in the pieces."""
        assert self.pool.address, "the program is closed"
        self.marshal.fill_angles(self._records[:num_pieces], end)
        error = self._start(self._address, self.pool.address, self._pieces, num_pieces)
        assert error == 0, native.RUN_ERRORS.get(error, error)

    def wait(self) -> None:
        """Waits for the started step. Raises the error of a hook or a collective, if there was one."""
        assert self.pool.address, "the program is closed"
        self._wait(self.pool.address)
        if self.marshal.calls.errors:
            raise self.marshal.calls.errors.pop()

    def settle(self) -> None:
        """Waits for a step whose results are not needed, and drops its errors."""
        assert self.pool.address, "the program is closed"
        self._wait(self.pool.address)
        self.marshal.calls.errors.clear()

    def run(self, num_pieces: int, end: int) -> None:
        """Computes a step: `start`, then `wait`."""
        self.start(num_pieces, end)
        self.wait()

    def reset_progress(self) -> None:
        """Call it when no step runs: `progress` is 0 until the next one starts."""
        self.struct.progress = 0

    def progress(self) -> int:
        """How many of the lowered instructions up to `chosen_from` are complete on all threads in the run in progress,
        or were in the last one. For any thread: what they have written to the cache may be read."""
        return self._progress(self._address)

    @property
    def seconds(self) -> float:
        """Kernel time of the last run."""
        return self.struct.kernel_nanoseconds * 1e-9

    # -- values of the last step

    def rows(self, count: int) -> np.ndarray:
        """What the next run reads besides ids, for its first `count` token rows: float32 [count, width]."""
        assert self.lowered.rows is not None
        return self.memory.view(self.lowered.rows, count)

    def hidden(self, count: int) -> np.ndarray:
        """The forward's result for the first `count` token rows of the last run, float32 [count, width]."""
        return self.memory.view(self.lowered.hidden, count)

    def export(self, name: str, count: int) -> np.ndarray:
        """The first `count` rows of an exported hidden state of the last run, float32 [count, width]."""
        return self.memory.view(self.lowered.exports[name], count)

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
        """Computes the logits of at most MAX_CHOSEN token rows of the last run, float32 [rows, vocabulary]; valid until
        the next call."""
        ids = np.asarray(rows, np.int64)
        error = self._logits(self._address, self.pool.address, ids.ctypes.data, len(ids))
        assert error == 0, native.RUN_ERRORS.get(error, error)
        return self.memory.view(self._logits_buffer, len(ids))

    def left_logits(self, count: int) -> np.ndarray:
        """The logits that the last run computed, float32 [count, vocabulary]: of the sampled pieces in their order,
        then of those with PIECE_LOGITS, 1 + drafted rows of each. Correct only if the run chose at most MAX_CHOSEN
        rows; valid until the next call."""
        assert count <= MAX_CHOSEN
        return self.memory.view(self._logits_buffer, count)

    @property
    def _logits_buffer(self) -> Buffer:
        assert self.lowered.logits is not None
        return self.lowered.logits

    # -- between steps

    @property
    def adapters(self) -> Adapters:
        """Of this program."""
        return self.marshal.adapters

    @property
    def places(self) -> Places:
        """What adapters may change."""
        return self.marshal.adapters.places

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The linears among them, by name."""
        return self.places.slots

    def lacks(self, adapter: ModelChanges) -> str:
        """What of an adapter the program cannot compute; empty if it can."""
        return self.adapters.lacks(adapter)

    def pack_adapter(self, adapter: ModelChanges) -> PackedAdapter:
        """Packs an adapter for `set_adapter`. Any thread may do so, also during a step. Raises ValueError for what the
        program cannot compute and for shapes that do not fit."""
        adapters = self.marshal.adapters
        adapters.check(adapter)
        return adapters.pack(adapter, adapters.squares(adapter))

    def set_adapter(self, adapter: int, packed: PackedAdapter | None) -> None:
        """Sets what is applied to rows with this adapter id, in place of what was; None removes the adapter. Must not
        run during a step. Raises ValueError for an invalid id."""
        adapters = self.marshal.adapters
        if packed is None:
            return adapters.remove(adapter)
        adapters.set(adapter, packed)
        self.struct.adapters = ctypes.addressof(adapters.struct)

    def profile(self, on: bool = True) -> None:
        """Starts (from zero) or stops adding up nanoseconds per instruction in `times`; the last entry is the total."""
        self.times[:] = 0
        self.struct.nanoseconds = self.times.ctypes.data if on else None

    def close(self) -> None:
        """Waits for a step in progress and ends the threads, if they are its own. The memory that they use must live
        until then."""
        if self._owns_pool:
            self.pool.close()

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers, without those whose size depends on the number of positions: the rope angles, and DRY's
        int32 for each thread and position."""
        return self.memory.num_bytes + self.marshal.state_bytes + self.marshal.record_bytes


def _describe(instruction: Instruction) -> str:
    if instruction.op == "linear":
        parts = (f"{p.weight.format} {p.weight.rows}x{p.weight.cols}" for p, _, _, _ in instruction.products)
        extra = "".join(
            f" + {name}"
            for name in ("bias", "residual")
            if any(getattr(p, name) is not None for p, *_ in instruction.products)
        )
        return f"linear      {', '.join(parts)}{extra}"
    if instruction.op == "prepare":
        return f"prepare     {instruction.inputs[0].activation} of {instruction.inputs[0].cols}"
    widths = " x ".join(str(v.width) for v in instruction.outs)
    return f"{instruction.op:<11} {widths}".rstrip()
