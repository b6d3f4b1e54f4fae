"""A lowered program with its memory: the structures that csrc/program.cpp walks, and the call that runs a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvasir.layers.adapters import Pairs
from kvasir.layers.rope import Angles, Rope
from kvasir.ops.attention.native import AttentionArgs, SpanStruct, StoreArgs, attention_scratch
from kvasir.ops.graph import CannotTrace
from kvasir.ops.linear.packed import PackedMatrix
from kvasir.program import native
from kvasir.program.adapters import Adapters
from kvasir.program.cache import NativeCache
from kvasir.program.lower import ELEMENTWISE, FUNCTIONS, MEETINGS, Buffer, Lowered, Step, lower
from kvasir.program.meetings import Meetings
from kvasir.program.trace import Trace
from kvasir.sampling.native import Sampled, SampleRow, sample_scratch

MAX_CHOSEN = 32  # rows of logits at a time: bounds the only buffer that is as wide as the vocabulary
EXPERT_ROWS = 128  # rows that experts compute at a time


def prepared(weight: PackedMatrix) -> tuple[tuple, int]:
    """What rows must be turned into for a matrix, and the bytes of such a row."""
    return (weight.activation, weight.cols, weight.segments, weight.activated_bytes), weight.activated_bytes


class Program:
    """The forward of one model over one cache.

    `run`, or `start` and `wait`, computes a step from works (native.Work) on `states` (native.RowState, one per row of
    the runner) and leaves `results`. `hidden` and `logits` are float32 views of what the last run left: of all its
    rows, and of the chosen ones. seconds: kernel time of the last run. The program of a part of a model meets the
    other ranks in its steps, so theirs must run at the same time.
    """

    def __init__(
        self,
        trace: Trace,
        cache: NativeCache,
        *,
        max_rows: int,
        max_work: int,
        max_states: int,
        max_positions: int,
        threads: int,
        apart: bool = False,
        pin: bool = False,
    ):
        self.lowered: Lowered = lower(trace, max_rows, MAX_CHOSEN, prepared)
        self.cache = cache
        self.pool = native.Pool(threads, pin, apart)
        self.names = [_describe(step) for step in self.lowered.steps]
        self._keep: list[Any] = [trace]
        self._angles: dict[Rope, tuple[native.RopeTable, Angles]] = {}
        self._max_positions = max_positions
        self.arena = _aligned(self.lowered.arena)
        self._base = self.arena.ctypes.data
        self._positions = trace.batch.positions_T
        self._scratch = 64
        self._adapters = Adapters(max_rows)
        self._meetings = Meetings()
        self._tokens = np.zeros(max_rows, np.int64)
        self._keep.append(self._tokens)
        steps = self.lowered.steps
        self._expert_room = self._room_of_experts([step for step in steps if step.op == "experts"])
        vocab = 0 if trace.logits is None else trace.logits.width
        self.vocab = vocab
        self.instrs = (native.Instr * (len(steps) + bool(vocab)))()
        for instr, step in zip(self.instrs, steps, strict=False):
            self._fill(instr, step)
        if self.lowered.logits is not None:
            self._set(self.instrs[len(steps)], "sample", [self._at(self.lowered.logits)], [vocab], barrier=True)
            self._scratch = max(self._scratch, sample_scratch(vocab))
            self.names.append(f"sample      of {vocab}")
        self.states = (native.RowState * max_states)()
        self.works = (native.Work * max_work)()
        self.results = (Sampled * max_work)()
        self.times = np.zeros(len(self.instrs) + 1, np.uint64)
        self.struct = self._program(max_rows, max_work, max_states)
        self._start, self._wait, self._logits = native.start_call(), native.wait_call(), native.logits_call()
        self._address = ctypes.addressof(self.struct)
        self._works = ctypes.addressof(self.works)

    # -- a step

    def start(self, num_works: int, end: int) -> None:
        """Begins to compute the first works; no one touches states, works or results until `wait` has returned.
        end: above every position in them."""
        assert self.pool.address, "the program is closed"
        self._fill_angles(num_works, end)
        error = self._start(self._address, self.pool.address, self._works, num_works)
        assert error == 0, native.RUN_ERRORS.get(error, error)

    def wait(self) -> None:
        assert self.pool.address, "the program is closed"
        self._wait(self.pool.address)
        if self._meetings.errors:
            raise self._meetings.errors.pop()

    def settle(self) -> None:
        """Waits for a step of which no one took the result; drops what went wrong in it."""
        assert self.pool.address, "the program is closed"
        self._wait(self.pool.address)
        self._meetings.errors.clear()

    def run(self, num_works: int, end: int) -> None:
        """A whole step."""
        self.start(num_works, end)
        self.wait()

    @property
    def seconds(self) -> float:
        return self.struct.kernel_nanoseconds * 1e-9

    def hidden(self, count: int) -> np.ndarray:
        return self._view(self.lowered.hidden, count)

    def export(self, name: str, count: int) -> np.ndarray:
        """The first rows of a hidden state that the trace exports, as the last run left them."""
        return self._view(self.lowered.exports[name], count)

    def set_adapter(self, adapter: int, pairs: Pairs | None) -> None:
        """What the rows of this adapter id get added to products, in the place of what they had; None takes the adapter
        away. Not during a step. Raises ValueError for an id, a slot or a shape that cannot be."""
        if pairs is None:
            return self._adapters.remove(adapter)
        self._adapters.set(adapter, pairs)
        self.struct.adapters = ctypes.addressof(self._adapters.struct)

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
        """Float32 [rows, vocabulary] of rows of the last run, at most MAX_CHOSEN; valid until the next call."""
        assert self.lowered.logits is not None
        ids = np.asarray(rows, np.int64)
        error = self._logits(self._address, self.pool.address, ids.ctypes.data, len(ids))
        assert error == 0, native.RUN_ERRORS.get(error, error)
        return self._view(self.lowered.logits, len(ids))

    def left_logits(self, count: int) -> np.ndarray:
        """Float32 [count, vocabulary], at most MAX_CHOSEN: what the last run left of the rows that it sampled, in their
        order, then of those with WORK_LOGITS. Valid until the next call, where a run chose no more rows than that."""
        assert self.lowered.logits is not None and count <= MAX_CHOSEN
        return self._view(self.lowered.logits, count)

    def profile(self, on: bool = True) -> None:
        """Adds up nanoseconds per instruction in `times`; the last is the whole."""
        self.times[:] = 0
        self.struct.nanoseconds = self.times.ctypes.data if on else None

    def close(self) -> None:
        """Waits for a step in progress and ends the threads; before that nothing they use may go."""
        self.pool.close()

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.close()

    @property
    def num_bytes(self) -> int:
        """Of its buffers, without the angles, whose size goes with the positions."""
        return self.lowered.arena + sum(array.nbytes for array in _arrays(self._keep))

    # -- structures

    def _program(self, max_rows: int, max_work: int, max_states: int) -> native.Program:
        cache, s = self.cache, native.Program()
        s.instrs, s.count = ctypes.addressof(self.instrs), len(self.instrs)
        s.chosen_from = self.lowered.chosen_from
        s.max_rows, s.max_chosen, s.max_work, s.max_states = max_rows, MAX_CHOSEN, max_work, max_states
        s.groups, s.block_size = len(cache.groups), cache.block_size
        s.tokens, s.positions = self._tokens.ctypes.data, self._array(np.int64, max_rows)
        s.chosen, s.sampler_rows = self._array(np.int64, max(max_work, MAX_CHOSEN)), self._array(np.int32, max_work)
        specs = (SampleRow * max_work)()
        s.specs, s.states, s.results = map(ctypes.addressof, (specs, self.states, self.results))
        self._keep.append(specs)
        for g, group in enumerate(cache.groups):
            spans = (SpanStruct * max_work)()
            self._keep.append(spans)
            s.num_blocks[g], s.windows[g] = cache.num_blocks[g], group.window
            s.slots[g], s.spans[g] = self._array(np.int64, max_rows), ctypes.addressof(spans)
        scratch = _aligned(self._scratch * self.pool.threads)
        self._keep.append(scratch)
        s.scratch, s.scratch_bytes = scratch.ctypes.data, self._scratch
        return s

    def _fill(self, instr: native.Instr, step: Step) -> None:
        name = "meeting" if step.op in MEETINGS else step.op
        filler: Callable = getattr(self, f"_{name}", None) or self._elementwise
        filler(instr, step)
        instr.flags = native.BARRIER if step.barrier else 0

    def _set(self, instr: native.Instr, op: str, p: list, n: list, f: list = [], barrier: bool = False) -> None:  # noqa: B006
        instr.op, instr.flags = native.OP[op], native.BARRIER if barrier else 0
        for target, values in ((instr.p, p), (instr.n, n), (instr.f, f)):
            for i, value in enumerate(values):
                target[i] = value

    def _embedding(self, instr: native.Instr, step: Step) -> None:
        ids, weight, first = step.inputs
        (out,) = step.buffers
        n = [weight.cols, int(ids.base is self._positions.base), first or 0, int(first is not None)]
        self._set(instr, "embedding", [weight.address, self._at(out)], n)

    def _rms_norm(self, instr: native.Instr, step: Step) -> None:
        x, weight, eps = step.inputs
        out, rows = step.buffers
        width = x.shape[-1]
        n = [x.width // width, width, x.width, x.width]
        self._set(instr, "rms_norm", [self._at(out), self._at(rows), self._vector(weight)], n, [eps])

    def _layer_norm(self, instr: native.Instr, step: Step) -> None:
        x, weight, bias, eps = step.inputs
        out, rows = step.buffers
        p = [self._at(out), self._at(rows), self._vector(weight), self._vector(bias)]
        self._set(instr, "layer_norm", p, [x.width], [eps])

    def _prepare(self, instr: native.Instr, step: Step) -> None:
        weight, x = step.inputs
        out, rows = step.buffers
        self._set(instr, "prepare", [weight.address, self._at(out), self._at(rows)], [x.width])

    def _linear(self, instr: native.Instr, step: Step) -> None:
        parts = (native.LinearPart * len(step.products))()
        for part, (product, activated, out, residual) in zip(parts, step.products, strict=True):
            part.matrix, part.activated = product.weight.address, self._at(activated)
            part.out, part.out_stride = self._at(out), product.out.width
            part.bias = None if product.bias is None else self._vector(product.bias)
            if residual is not None:
                part.residual, part.residual_stride = self._at(residual), product.out.width
            self._keep.append(product.weight)
        seats = [(p.slot, residual == out) for p, _, out, residual in step.products]
        for part, slot in zip(parts, self._adapters.linear(seats), strict=True):
            part.slot = slot
        self._keep.append(parts)
        self._set(instr, "linear", [ctypes.addressof(parts), self._at(step.buffers[0])], [len(parts)])

    def _meeting(self, instr: native.Instr, step: Step) -> None:
        views = tuple(partial(_rows_of, self.arena, buffer) for buffer in step.buffers)
        self._set(instr, "call", [self._meetings.of_step(step, views, self._tokens, self._adapters)], [])

    def _adapt_inner(self, instr: native.Instr, step: Step) -> None:
        self._set(instr, "adapt_inner", [self._at(step.buffers[0])], [self._adapters.place(step.inputs[1])])

    def _adapt_add(self, instr: native.Instr, step: Step) -> None:
        (total, slot), (out, _) = step.inputs, step.buffers
        self._set(instr, "adapt_add", [self._at(out)], [self._adapters.place(slot), total.width])

    def _rope(self, instr: native.Instr, step: Step) -> None:
        x, rope, _ = step.inputs
        out, rows = step.buffers
        if rope not in self._angles:
            angles = Angles(rope, self._max_positions)
            self._angles[rope] = (native.RopeTable(angles.cos.data_ptr(), angles.sin.data_ptr()), angles)
        heads, head_dim = x.shape
        n = [heads, head_dim, rope.half, x.width, x.width]
        self._set(instr, "rope", [self._at(out), self._at(rows), ctypes.addressof(self._angles[rope][0])], n)

    def _store_kv(self, instr: native.Instr, step: Step) -> None:
        k, v, layer = step.inputs
        k_rows, v_rows = step.buffers
        group = self.cache.group_of(layer)
        args = StoreArgs(
            self.cache.layouts[group],
            self.cache.address(layer, False),
            self.cache.address(layer, True),
            self._at(k_rows),
            self._at(v_rows),
            k.width,
            v.width,
        )
        self._keep.append(args)
        self._set(instr, "store_kv", [ctypes.addressof(args)], [group])

    def _paged_attention(self, instr: native.Instr, step: Step) -> None:
        q, k_part, _, _, scale, softcap, sinks = step.inputs
        out, rows = step.buffers
        layer, heads = k_part.layer, q.shape[0]
        group = self.cache.group_of(layer)
        layout = self.cache.layouts[group]
        args = AttentionArgs(
            layout,
            self.cache.address(layer, False),
            self.cache.address(layer, True),
            self._at(rows),
            self._at(out),
            q.width,
            q.width,
            heads,
            self.cache.spec[layer].window,
            scale,
            softcap,
            None if sinks is None else self._vector(sinks),
        )
        self._keep.append(args)
        self._scratch = max(self._scratch, attention_scratch(layout, heads))
        self._set(instr, "paged_attention", [ctypes.addressof(args)], [group])

    def _gated(self, instr: native.Instr, step: Step) -> None:
        gate, _, function = step.inputs
        self._set(instr, "gated", [self._at(b) for b in step.buffers], [gate.width, native.FUNCTION[function]])

    def _route(self, instr: native.Instr, step: Step) -> None:
        logits, top_k, normalise = step.inputs
        room = self._array(np.float32, (2 * logits.width + 32) * self.pool.threads)
        p = [*(self._at(b) for b in step.buffers), room]
        self._set(instr, "route", p, [logits.width, top_k, int(normalise)])

    def _experts(self, instr: native.Instr, step: Step) -> None:
        x, ids, _, gate, up, down, act, share = step.inputs
        inner, top_k, slots = gate[0].rows, ids.width, EXPERT_ROWS * ids.width
        first, count = (share.held[0], share.experts.size) if share else (0, len(gate))
        args = native.Experts(count, top_k, x.width, inner, EXPERT_ROWS, first, len(gate), native.FUNCTION[act.name])
        args.gate, args.up, args.down = self._matrices(gate), self._matrices(up), self._matrices(down)
        begins = np.zeros(count + 1, np.int64)
        args.begins = begins.ctypes.data
        args.slots, args.sources = self._array(np.int64, slots), self._array(np.int64, slots)
        activated, gate_out, up_out, down_out = self._expert_room
        args.activated, args.gate_out, args.up_out = (a.ctypes.data for a in (activated, gate_out, up_out))
        args.down_out = down_out.ctypes.data
        if share:
            rows = down_out.view(np.float32)[: slots * x.width].reshape(slots, x.width)
            args.meet = self._meetings.of_experts(share, rows, begins)
        self._keep += [args, begins]
        self._set(instr, "experts", [ctypes.addressof(args), *(self._at(b) for b in step.buffers)], [])

    def _room_of_experts(self, steps: Sequence[Step]) -> list[np.ndarray]:
        """For one layer at a time: rows that gate, up and down are to meet, and the results of each."""
        sizes = [0] * 4
        for x, ids, _, gate, _, down, *_ in (step.inputs for step in steps):
            row_bytes = max(gate[0].activated_bytes, down[0].activated_bytes)
            room = (row_bytes, gate[0].rows * 4, gate[0].rows * 4, x.width * 4)
            sizes = [max(size, EXPERT_ROWS * ids.width * of_row) for size, of_row in zip(sizes, room, strict=True)]
        arrays = [_aligned(size) for size in sizes] if steps else []
        self._keep.append(arrays)
        return arrays

    def _matrices(self, stack: Sequence[PackedMatrix]) -> int:
        structs = (type(stack[0].struct) * len(stack))(*(m.struct for m in stack))
        self._keep += [structs, list(stack)]
        return ctypes.addressof(structs)

    def _choose(self, instr: native.Instr, step: Step) -> None:
        self._set(instr, "choose", [self._at(b) for b in step.buffers], [step.outs[0].width])

    def _elementwise(self, instr: native.Instr, step: Step) -> None:
        if step.op not in ELEMENTWISE:
            raise CannotTrace(f"there is no kernel for {step.op}")
        p, n, f = [self._at(b) for b in step.buffers], [step.outs[0].width], []
        if step.op in FUNCTIONS:
            n.append(native.FUNCTION[step.op])
        elif step.op in ("scale", "softcap"):
            f.append(step.inputs[1])
        elif step.op == "add_vector":
            p.append(self._vector(step.inputs[1]))
        self._set(instr, "activate" if step.op in FUNCTIONS else step.op, p, n, f)

    # -- memory

    def _at(self, buffer: Buffer) -> int:
        return self._base + buffer.offset

    def _view(self, buffer: Buffer, count: int) -> np.ndarray:
        return _rows_of(self.arena, buffer, count)

    def _vector(self, tensor: Any) -> int:
        array = np.ascontiguousarray(tensor.float().numpy())
        self._keep.append(array)
        return array.ctypes.data

    def _array(self, dtype: Any, count: int) -> int:
        array = np.zeros(count, dtype)
        self._keep.append(array)
        return array.ctypes.data

    def _fill_angles(self, num_works: int, end: int) -> None:
        """Of the positions of the first works, all below `end`."""
        assert end <= self._max_positions, "positions that the program does not have rows of angles for"
        for _, angles in self._angles.values():
            if end > angles.until:
                for work in self.works[:num_works]:
                    angles.fill(work.start, work.start + work.count)


def _rows_of(arena: np.ndarray, buffer: Buffer, count: int) -> np.ndarray:
    """The first rows of a buffer, float32 [count, width]."""
    flat = arena[buffer.offset : buffer.offset + count * buffer.row_bytes]
    return flat.view(np.float32).reshape(count, -1)


def _arrays(kept: Sequence[Any]) -> Iterator[np.ndarray]:
    for item in kept:
        if isinstance(item, np.ndarray):
            yield item
        elif isinstance(item, list):
            yield from _arrays(item)


def _aligned(size: int) -> np.ndarray:
    """Uninitialised bytes that begin at a multiple of 4096."""
    raw = np.empty(size + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + size]


def _describe(step: Step) -> str:
    if step.op == "linear":
        parts = (f"{p.weight.format} {p.weight.rows}x{p.weight.cols}" for p, _, _, _ in step.products)
        extra = "".join(
            f" + {name}"
            for name in ("bias", "residual")
            if any(getattr(p, name) is not None for p, *_ in step.products)
        )
        return f"linear      {', '.join(parts)}{extra}"
    if step.op == "prepare":
        return f"prepare     {step.inputs[0].activation} of {step.inputs[0].cols}"
    widths = " x ".join(str(v.width) for v in step.outs)
    return f"{step.op:<11} {widths}".rstrip()
