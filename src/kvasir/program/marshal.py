"""Marshals a lowered program into the C structures that csrc/program.cpp interprets."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvasir.layers.pages import paged
from kvasir.layers.rope import Angles, Rope
from kvasir.ops.attention.native import AttentionArgs, RelativeStruct, StoreArgs, attention_scratch
from kvasir.ops.graph import CHOSEN, CannotTrace
from kvasir.ops.linear.packed import PackedMatrix
from kvasir.ops.ssm import ScanSizes, Taps
from kvasir.program import native, scans, sparse, wkv
from kvasir.program.adapters import Adapters
from kvasir.program.cache import NativeCache
from kvasir.program.calls import Hooks, NativeCalls
from kvasir.program.experts import ExpertMarshal
from kvasir.program.lower import COLLECTIVES, ELEMENTWISE, FUNCTIONS, Instruction, Lowered
from kvasir.program.meetings import meeting, shared_meeting
from kvasir.program.memory import ProgramMemory, aligned
from kvasir.program.trace import Trace
from kvasir.sampling.native import SampleRow, sample_scratch

MAX_CHOSEN = 32  # rows of logits per pass: bounds the only buffer that is as wide as the vocabulary


def prepared(weight: PackedMatrix) -> tuple[tuple, int]:
    """The format that the input rows of a matrix are converted to (a key), and the bytes of such a row."""
    rule = weight.inputs.key if weight.inputs else None
    return (weight.activation, weight.cols, weight.segments, weight.activated_bytes, rule), weight.activated_bytes


class Marshal:
    """Writes a lowered program into the structures of csrc/program.h, in the memory of a program.

    instrs: the instructions; the last is the sampler's if the model has logits and the program `samples`. vocab: width
    of the logits, 0 without.
    calls: from a step into Python. max_tokens: token rows of a step. max_rows: rows of the runner. Raises CannotTrace
    for an op without a kernel.
    """

    def __init__(
        self,
        memory: ProgramMemory,
        lowered: Lowered,
        trace: Trace,
        cache: NativeCache,
        threads: int,
        max_tokens: int,
        max_rows: int,
        max_positions: int,
        hooks: Hooks,
        samples: bool = True,
    ):
        self.lowered, self.cache, self._threads = lowered, cache, threads
        self._at, self._view, self._keep = memory.at, memory.view, memory.kept
        self._array, self._vector = memory.array, memory.vector
        self._angles: dict[Rope, tuple[native.RopeTable, Angles]] = {}
        self._max_positions = max_positions
        self._positions = trace.batch.positions_T
        self._scratch = 64
        self.state_bytes = 0  # of the rows' recurrent states
        self.record_bytes = 0  # of the arrays of structures that describe a step
        self.adapters = Adapters(trace, max_tokens, MAX_CHOSEN)
        self.calls = NativeCalls()
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._tokens = np.zeros(max_tokens, np.int64)
        self.types: np.ndarray | None = None  # int64 [max_tokens], set by the caller if the model has token types
        self._keep.append(self._tokens)
        instructions = lowered.instructions
        experts = [instruction for instruction in instructions if instruction.op == "experts"]
        self._expert_marshal = ExpertMarshal(memory, self.calls, experts, trace.names, hooks, max_tokens)
        self.vocab = 0 if trace.logits is None else trace.logits.width
        self.instrs = (native.Instr * (len(instructions) + bool(self.vocab and samples)))()
        for instr, instruction in zip(self.instrs, instructions, strict=False):
            self._fill(instr, instruction)
        if lowered.logits is not None and samples:
            self._set(self.instrs[len(instructions)], "sample", [self._at(lowered.logits)], [self.vocab], barrier=True)
            self._scratch = max(self._scratch, sample_scratch(self.vocab))

    # -- structures

    def program(self, states: Any, pieces: Any, results: Any) -> native.ProgramStruct:
        """The complete program structure, over the arrays that a run reads (states, pieces) and writes (results)."""
        cache, s = self.cache, native.ProgramStruct()
        s.instrs, s.count = ctypes.addressof(self.instrs), len(self.instrs)
        s.chosen_from = self.lowered.chosen_from
        s.max_tokens, s.max_chosen, s.max_rows = self._max_tokens, MAX_CHOSEN, self._max_rows
        s.max_sampled = sampled = len(results)
        s.groups, s.block_size = len(cache.groups), cache.block_size
        s.tokens, s.positions = self._tokens.ctypes.data, self._array(np.int64, self._max_tokens)
        s.chosen, s.sampler_rows = self._array(np.int64, max(sampled, MAX_CHOSEN)), self._array(np.int32, sampled)
        specs = (SampleRow * sampled)()
        s.specs, s.states, s.pieces, s.results = map(ctypes.addressof, (specs, states, pieces, results))
        self._keep.append(specs)
        self.record_bytes = sum(map(ctypes.sizeof, (specs, states, pieces, results)))
        for g, group in enumerate(cache.groups):
            s.num_blocks[g], s.windows[g] = cache.num_blocks[g], min(0, group.kind.window) or group.kind.reach
            s.slots[g] = self._array(np.int64, self._max_tokens)
        scratch = aligned(self._scratch * self._threads)
        self._keep.append(scratch)
        s.scratch, s.scratch_bytes = scratch.ctypes.data, self._scratch
        return s

    def _fill(self, instr: native.Instr, instruction: Instruction) -> None:
        name = "meeting" if instruction.op in COLLECTIVES else instruction.op
        filler: Callable = getattr(self, f"_{name}", None) or self._elementwise
        filler(instr, instruction)
        instr.flags = native.BARRIER if instruction.barrier else 0

    def _set(self, instr: native.Instr, op: str, p: list, n: list, f: list = [], barrier: bool = False) -> None:  # noqa: B006
        instr.op, instr.flags = native.OP[op], native.BARRIER if barrier else 0
        for target, values in ((instr.p, p), (instr.n, n), (instr.f, f)):
            for i, value in enumerate(values):
                target[i] = value

    def _embedding(self, instr: native.Instr, instruction: Instruction) -> None:
        ids, weight, first, or_first = instruction.inputs
        (out,) = instruction.buffers
        part = 0 if first is None else 1 + or_first
        place = -1 if or_first else self.adapters.places.table(weight)
        n = [weight.cols, int(ids.base is self._positions.base), first or 0, part, 1 + place]
        self._set(instr, "embedding", [weight.address, self._at(out)], n)

    def _type_rows(self, instr: native.Instr, instruction: Instruction) -> None:
        _, weight = instruction.inputs
        (out,) = instruction.buffers
        types = self.types = np.zeros(self._max_tokens, np.int64)
        table, view = np.stack([weight.row(i) for i in range(weight.rows)]), partial(self._view, out)

        def fill(rows: int) -> None:
            np.take(table, types[:rows], 0, out=view(rows), mode="clip")

        self._set(instr, "call", [self.calls.address(fill)], [])

    def _rms_norm(self, instr: native.Instr, instruction: Instruction) -> None:
        x, weight, eps = instruction.inputs
        out, rows = instruction.buffers
        width = x.shape[-1]
        n = [x.width // width, width, x.width, x.width]
        scale = None if weight is None else self._vector(weight)
        n += [0, 1 + self.adapters.places.norm(weight), int(instruction.domain == CHOSEN)]
        self._set(instr, "rms_norm", [self._at(out), self._at(rows), scale], n, [eps])

    def _grouped_rms_norm(self, instr: native.Instr, instruction: Instruction) -> None:
        self._rms_norm(instr, instruction)
        instr.n[4] = instruction.inputs[0].shape[-1]  # each group has weights of its own

    def _layer_norm(self, instr: native.Instr, instruction: Instruction) -> None:
        x, weight, bias, eps = instruction.inputs
        out, rows = instruction.buffers
        p, width, by_head = [self._at(out), self._at(rows)], x.shape[-1], 0
        if weight is not None:
            p += [self._vector(weight), self._vector(bias)]
            by_head = width if weight.size > width else 0
        n = [x.width // width, width, by_head, 1 + self.adapters.places.norm(weight), int(instruction.domain == CHOSEN)]
        self._set(instr, "layer_norm", p, n, [eps])

    def _prepare(self, instr: native.Instr, instruction: Instruction) -> None:
        weight, x = instruction.inputs
        out, rows = instruction.buffers
        self._set(instr, "prepare", [weight.address, self._at(out), self._at(rows)], [x.width])

    def _linear(self, instr: native.Instr, instruction: Instruction) -> None:
        parts = (native.LinearPart * len(instruction.products))()
        for part, (product, activated, out, residual) in zip(parts, instruction.products, strict=True):
            part.matrix, part.activated = product.weight.address, self._at(activated)
            part.out, part.out_stride = self._at(out), product.out.width
            part.bias = None if product.bias is None else self._vector(product.bias)
            if residual is not None:
                part.residual, part.residual_stride = self._at(residual), product.out.width
            self._keep.append(product.weight)
        slots = self.adapters.linear([(p, residual == out) for p, _, out, residual in instruction.products])
        self._keep.append(parts)
        p = [ctypes.addressof(parts), self._at(instruction.buffers[0]), None if slots is None else slots.ctypes.data]
        replaces = instruction.products[0][0].replaces
        self._set(instr, "linear", p, [len(parts), int(instruction.domain == CHOSEN), int(replaces)])

    def _meeting(self, instr: native.Instr, instruction: Instruction) -> None:
        if args := shared_meeting(instruction):
            self._keep.append(args)
            with_inner = instruction.op == "all_reduce" and len(instruction.inputs) > 3
            return self._set(instr, "meet", [*self._rows(instruction), ctypes.addressof(args)], [int(with_inner)])
        views = tuple(partial(self._view, buffer) for buffer in instruction.buffers)
        self._set(instr, "call", [self.calls.address(meeting(instruction, views, self._tokens, self.adapters))], [])

    def _call(self, instr: native.Instr, instruction: Instruction) -> None:
        function, views = instruction.inputs[0], [partial(self._view, buffer) for buffer in instruction.buffers]
        self._set(instr, "call", [self.calls.address(lambda rows: function(*(view(rows) for view in views)))], [])

    def _adapt_inner(self, instr: native.Instr, instruction: Instruction) -> None:
        _, slot, scaled = instruction.inputs
        n = [self.adapters.place(slot), int(scaled)]
        self._set(instr, "adapt_inner", [self._at(instruction.buffers[0])], n)

    def _adapt_add(self, instr: native.Instr, instruction: Instruction) -> None:
        (total, slot), (out, _) = instruction.inputs, instruction.buffers
        self._set(instr, "adapt_add", [self._at(out)], [self.adapters.place(slot), total.width])

    def _rope(self, instr: native.Instr, instruction: Instruction) -> None:
        x, rope, _ = instruction.inputs
        out, rows = instruction.buffers
        if rope not in self._angles:
            angles = Angles(rope, self._max_positions)
            self._angles[rope] = (native.RopeTable(angles.cos.ctypes.data, angles.sin.ctypes.data), angles)
        heads, head_dim = x.shape
        n = [heads, head_dim, rope.half, x.width, x.width]
        self._set(instr, "rope", [self._at(out), self._at(rows), ctypes.addressof(self._angles[rope][0])], n)

    def _store_kv(self, instr: native.Instr, instruction: Instruction) -> None:
        k, v, layer = instruction.inputs
        k_rows, v_rows = instruction.buffers
        assert self.cache.owns(layer), "the layer shares the cache of another"
        group = self.cache.group_of(layer)
        args = StoreArgs(
            self.cache.layout_at(layer),
            self.cache.address(layer, False),
            self.cache.address(layer, True),
            self._at(k_rows),
            self._at(v_rows),
            k.width,
            v.width,
        )
        self._keep.append(args)
        self._set(instr, "store_kv", [ctypes.addressof(args)], [group])

    def _paged_attention(self, instr: native.Instr, instruction: Instruction) -> None:
        q, k_part, _, _, scale, softcap, sinks, relative, k, _ = instruction.inputs
        out, rows, *k_rows = instruction.buffers
        layer, heads = k_part.layer, q.shape[0]
        group = self.cache.group_of(layer)
        layout = self.cache.layout_at(layer)
        args = AttentionArgs(
            layout,
            self.cache.address(layer, False),
            self.cache.address(layer, True),
            self._at(rows),
            self._at(out),
            q.width,
            instruction.outs[0].width,
            heads,
            self.cache.spec[layer].window,
            scale,
            softcap,
            self.cache.spec[layer].distance,
            self.cache.spec[layer].causal,
            None if sinks is None else self._vector(sinks),
        )
        if relative is not None:
            tables = RelativeStruct.of(relative, self._at(k_rows[0]) if k_rows else None, k.width if k_rows else 0)
            args.relative = ctypes.addressof(tables)
            self._keep += [relative, tables]
        self._keep.append(args)
        self._scratch = max(self._scratch, attention_scratch(layout, heads))
        self._set(instr, "paged_attention", [ctypes.addressof(args)], [group])

    def _gated_delta(self, instr: native.Instr, instruction: Instruction) -> None:
        *_, b, _, first, log_rate, bias, strength, kernel_CK, layer, heads, act = instruction.inputs
        first_of_a = first * heads.decays
        out, *rows = (self._at(buffer) for buffer in instruction.buffers)
        array, width = self.cache.arrays(layer)[0][0], heads.v * heads.dim * heads.v_dim
        kernel_KC = np.ascontiguousarray(kernel_CK.T)
        taps, channels = kernel_KC.shape
        if max(heads.dim, heads.v_dim) > native.MAX_DELTA_DIM or taps > native.MAX_TAPS:
            raise CannotTrace(f"no kernel for a gated delta rule of width {heads.dim} and {taps} taps")
        numbers = width + (taps - 1 + self.cache.block_size) * heads.inputs
        assert channels == heads.channels and array.shape[1] == numbers
        states = paged((self._max_rows, width), np.dtype(np.float32))
        args = native.DeltaArgs(
            heads.qk, heads.v, heads.tiled, heads.decays, heads.dim, heads.v_dim, taps, native.FUNCTION[act.name],
            self.cache.block_size, self.cache.group_of(layer), strength, 0, array.ctypes.data, array.shape[1],
            states.ctypes.data, *rows[:3], rows[3] + 4 * first, rows[4] + 4 * first_of_a, b.width,
            kernel_KC.ctypes.data, self._vector(log_rate), self._vector(bias), out,
        )  # fmt: skip
        self._keep += [args, states, kernel_KC, array]
        self.state_bytes += states.nbytes
        self._set(instr, "gated_delta", [ctypes.addressof(args)], [])

    def _select_tokens(self, instr: native.Instr, instruction: Instruction) -> None:
        args = sparse.index_args(self.cache, instruction.inputs, self._rows(instruction), self._max_positions)
        self._keep.append(args)
        self._scratch = max(self._scratch, sparse.index_scratch(self._max_positions))
        self._set(instr, "select_tokens", [ctypes.addressof(args)], [])

    def _selected_attention(self, instr: native.Instr, instruction: Instruction) -> None:
        args = sparse.selected_args(self.cache, instruction.inputs, self._rows(instruction))
        self._keep.append(args)
        self._scratch = max(self._scratch, sparse.selected_scratch(args))
        self._set(instr, "selected_attention", [ctypes.addressof(args)], [args.attention.group])

    def _short_conv(self, instr: native.Instr, instruction: Instruction) -> None:
        *_, kernel_DK, bias_D, cached, _ = instruction.inputs
        out, *rows = (self._at(buffer) for buffer in instruction.buffers)
        array, kernel_KD = self.cache.arrays(cached.layer)[0][0], np.ascontiguousarray(kernel_DK.T)
        taps, width = kernel_KD.shape
        if taps > native.MAX_TAPS:
            raise CannotTrace(f"no kernel for a short convolution of {taps} taps")
        assert array.shape[1] == (taps - 1 + self.cache.block_size) * width
        args = native.ShortConvArgs(
            width, taps, self.cache.block_size, self.cache.group_of(cached.layer), array.ctypes.data, array.shape[1],
            *rows, kernel_KD.ctypes.data, None if bias_D is None else self._vector(bias_D), out,
        )  # fmt: skip
        self._keep += [args, kernel_KD, array]
        self._set(instr, "short_conv", [ctypes.addressof(args)], [])

    def _causal_convolution(self, instr: native.Instr, instruction: Instruction) -> None:
        _, taps, state, _, _, sizes = instruction.inputs
        out, rows = (self._at(buffer) for buffer in instruction.buffers)
        args = self._convolution(taps, state.layer, sizes, rows, out)
        self._keep.append(args)
        self._set(instr, "causal_convolution", [ctypes.addressof(args)], [])

    def _convolution(self, taps: Taps, layer: int, sizes: ScanSizes, x: int, out: int) -> scans.ConvolutionArgs:
        kernel_KC = np.ascontiguousarray(np.asarray(taps.kernel).T)
        self._keep.append(kernel_KC)
        rows = scans.input_rows(self.cache, layer, sizes, len(kernel_KC))
        bias = None if taps.bias is None else self._vector(taps.bias)
        function = native.FUNCTION[taps.act.name]
        return scans.ConvolutionArgs(rows, sizes.channels, function, 0, x, kernel_KC.ctypes.data, bias, out)

    def _selective_scan(self, instr: native.Instr, instruction: Instruction) -> None:
        *_, weights, taps, state, _, _, sizes = instruction.inputs
        out, mixed, dt, *shared = (self._at(buffer) for buffer in instruction.buffers)
        args = scans.scan_args(self._convolution(taps, state.layer, sizes, 0, mixed), sizes)
        if shared:
            args.b, args.c = shared
        rates = np.ascontiguousarray(np.asarray(weights.rates).T)
        states = paged((self._max_rows, sizes.inner * sizes.dim), np.dtype(np.float32))
        args.dt, args.out, args.states, args.rates = dt, out, states.ctypes.data, rates.ctypes.data
        args.bias, args.skip = self._vector(weights.bias), self._vector(weights.skip)
        self._keep += [args, states, rates]
        self.state_bytes += states.nbytes
        self._set(instr, "selective_scan", [ctypes.addressof(args)], [])

    def _token_shift(self, instr: native.Instr, instruction: Instruction) -> None:
        args = wkv.shift_args(self.cache, instruction.inputs, self._rows(instruction), self._vector)
        self._keep.append(args)
        self._set(instr, "token_shift", [ctypes.addressof(args)], [])

    def _wkv(self, instr: native.Instr, instruction: Instruction) -> None:
        args, states = wkv.wkv_args(
            self.cache, instruction.inputs, self._rows(instruction), self._vector, self._max_rows
        )
        self._keep += [args, states]
        self.state_bytes += states.nbytes
        self._set(instr, "wkv", [ctypes.addressof(args)], [])

    def _prepare_heads(self, instr: native.Instr, instruction: Instruction) -> None:
        weight, x = instruction.inputs
        out, rows = instruction.buffers
        heads = x.shape[0]
        n = [heads, weight.activated_bytes * self._max_tokens]
        self._set(instr, "prepare_heads", [weight.address, self._at(out), self._at(rows)], n)

    def _head_linear(self, instr: native.Instr, instruction: Instruction) -> None:
        x, weight = instruction.inputs
        out, activated = instruction.buffers
        heads, stride = x.shape[0], weight.activated_bytes * self._max_tokens
        matrices = weight.runs(heads)
        parts, width = (native.LinearPart * heads)(), matrices[0].rows
        for head, (part, matrix) in enumerate(zip(parts, matrices, strict=True)):
            part.matrix, part.activated = ctypes.addressof(matrix), self._at(activated) + head * stride
            part.out, part.out_stride = self._at(out) + 4 * head * width, heads * width
        self._keep += [parts, matrices, weight]
        self._set(instr, "linear", [ctypes.addressof(parts), None], [heads])

    def _join_heads(self, instr: native.Instr, instruction: Instruction) -> None:
        a, b = instruction.inputs
        self._set(instr, "join", [self._at(buffer) for buffer in instruction.buffers], [*a.shape, b.shape[1]])

    def _gated(self, instr: native.Instr, instruction: Instruction) -> None:
        gate, _, function = instruction.inputs
        self._set(instr, "gated", [self._at(b) for b in instruction.buffers], [gate.width, native.FUNCTION[function]])

    def _route(self, instr: native.Instr, instruction: Instruction) -> None:
        logits, routing, bias, scales = instruction.inputs
        room = self._array(np.float32, native.route_room(logits.width) * self._threads)
        args = native.RoutingStruct(
            logits.width, routing.top_k, routing.groups, routing.top_groups, routing.best_of_group,
            native.SCORES[routing.scores], routing.normalise, routing.scale, routing.epsilon,
            *(None if vector is None else self._vector(vector) for vector in (bias, scales)),
        )  # fmt: skip
        self._keep.append(args)
        p = [*(self._at(b) for b in instruction.buffers), room, ctypes.addressof(args)]
        self._set(instr, "route", p, [])

    def _experts(self, instr: native.Instr, instruction: Instruction) -> None:
        args = self._expert_marshal.args(instruction, self.adapters)
        numbers = [1 + self.adapters.places.mixture(stack) for stack in instruction.inputs[3:6]]
        self._set(instr, "experts", [ctypes.addressof(args), *self._rows(instruction)], numbers)

    def _match_magnitude(self, instr: native.Instr, instruction: Instruction) -> None:
        self._set(instr, instruction.op, self._rows(instruction), [instruction.outs[0].width], [instruction.inputs[-1]])

    _gaussian_cut = _match_magnitude

    def _scale_columns(self, instr: native.Instr, instruction: Instruction) -> None:
        p = [*self._rows(instruction), self._vector(instruction.inputs[1])]
        self._set(instr, "scale_columns", p, [instruction.outs[0].width])

    def _predict_streams(self, instr: native.Instr, instruction: Instruction) -> None:
        """Also for the other ops on streams, whose last inputs are the number of streams and perhaps the active
        one."""
        streams, *active = (value for value in instruction.inputs if isinstance(value, int))
        n = [instruction.outs[0].width // streams, streams, *active]
        self._set(instr, instruction.op, self._rows(instruction), n)

    _correct_streams = _add_to_streams = _predict_streams

    def _rows(self, instruction: Instruction) -> list[int]:
        return [self._at(buffer) for buffer in instruction.buffers]

    def _take_columns(self, instr: native.Instr, instruction: Instruction) -> None:
        x, first, last = instruction.inputs
        p = [self._at(b) for b in instruction.buffers]
        self._set(instr, "take_columns", p, [last - first, x.width, first])

    def _choose(self, instr: native.Instr, instruction: Instruction) -> None:
        self._set(instr, "choose", [self._at(b) for b in instruction.buffers], [instruction.outs[0].width])

    def _scale_heads(self, instr: native.Instr, instruction: Instruction) -> None:
        x, factors = instruction.inputs
        p = [self._at(buffer) for buffer in instruction.buffers]
        self._set(instr, "scale_rows", p, [x.width, factors.width])

    def _elementwise(self, instr: native.Instr, instruction: Instruction) -> None:
        if instruction.op not in ELEMENTWISE:
            raise CannotTrace(f"no kernel for {instruction.op}")
        p, n, f = [self._at(b) for b in instruction.buffers], [instruction.outs[0].width], []
        if instruction.op in FUNCTIONS:
            n.append(native.FUNCTION[instruction.op])
        elif instruction.op in ("scale", "softcap", "clamp"):
            f += instruction.inputs[1:]
        elif instruction.op == "add_vector":
            p.append(self._vector(instruction.inputs[1]))
        elif instruction.op == "xielu":
            p.append(self._vector(np.array(instruction.inputs[1:], np.float32)))
        self._set(instr, "activate" if instruction.op in FUNCTIONS else instruction.op, p, n, f)

    # -- angles

    def fill_angles(self, pieces: np.ndarray, end: int) -> None:
        """Computes the rope angles of the positions of these pieces (records of native.Piece), all below `end`."""
        assert end <= self._max_positions, "positions that the program does not have rows of angles for"
        for _, angles in self._angles.values():
            if end > angles.until:
                for start, count in zip(pieces["start"].tolist(), pieces["count"].tolist(), strict=True):
                    angles.fill(start, start + count)
