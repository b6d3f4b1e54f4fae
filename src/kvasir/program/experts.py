"""The C structures of mixtures of experts (csrc/experts.cpp), and the buffers that all layers' experts share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvasir.ops.linear.packed import PackedMatrix
from kvasir.program import native
from kvasir.program.adapters import Adapters
from kvasir.program.calls import Hooks, NativeCalls, for_experts
from kvasir.program.lower import Instruction
from kvasir.program.memory import ProgramMemory, aligned
from kvasir.program.shared import EXPERTS, SharedRank

AT_ONCE = 128  # rows per pass of the experts


class ExpertMarshal:
    """Makes the operands of the experts instructions of a program, in its memory. Layers compute one after another, so
    they share the buffers of a pass.

    instructions: all that are experts. names: of linears, by the id of the matrix. max_tokens: token rows of a step.
    """

    def __init__(
        self,
        memory: ProgramMemory,
        calls: NativeCalls,
        instructions: Sequence[Instruction],
        names: Mapping[int, str],
        hooks: Hooks,
        max_tokens: int,
    ):
        self._memory, self._keep, self._calls = memory, memory.kept, calls
        self._names, self._inputs, self._max_tokens = names, hooks.inputs, max_tokens
        self._room = [aligned(size) for size in _sizes(instructions)] if instructions else []
        self._keep.append(self._room)

    def args(self, instruction: Instruction, adapters: Adapters) -> native.Experts:
        """The operands of one of the instructions."""
        x, ids, _, gate, up, down, act, share, biases, weigh_inputs, _, limit = instruction.inputs
        inner, top_k, slots = gate[0].rows, ids.width, AT_ONCE * ids.width
        assert not share or share.parts == 1 or top_k <= native.MAX_APPLIED, "no room for the products of adapters"
        first, count = (share.held[0], share.experts.size) if share else (0, len(gate))
        function = native.FUNCTION[getattr(act, "name", None) or act.__name__]
        args = native.Experts(count, top_k, x.width, inner, AT_ONCE, first, len(gate), function)
        args.gate, args.down = self._matrices(gate), self._matrices(down)
        args.up = self._matrices(up) if up else None
        args.weigh_inputs, args.limit = weigh_inputs, limit
        if biases:
            args.gate_bias, args.up_bias, args.down_bias = map(self._vectors, biases)
        begins, sources = np.zeros(count + 1, np.int64), np.zeros(slots, np.int64)
        args.begins, args.sources = begins.ctypes.data, sources.ctypes.data
        args.slots = self._memory.array(np.int64, slots)
        activated, gate_out, up_out, down_out = self._room
        args.activated, args.gate_out, args.up_out = (a.ctypes.data for a in (activated, gate_out, up_out))
        args.down_out = down_out.ctypes.data
        if share and isinstance(share.mesh, SharedRank):
            meeting = share.mesh.meeting(EXPERTS, x.width, share.parts, share.experts, share.experts.parts)
            args.meeting = ctypes.addressof(meeting)
            self._keep.append(meeting)
        elif share:
            rows = down_out.view(np.float32)[: slots * x.width].reshape(slots, x.width)
            args.meet = self._calls.address(lambda slots: share.complete(rows[:slots], begins))
            if share.parts > 1:
                args.meet_inner = self._calls.address(lambda slots: share.add_up(adapters.first_inner(slots)))
        if self._inputs:
            held = begins[first : first + len(gate) + 1]
            args.inputs = self._calls.address(self._call(self._inputs, instruction, held, sources))
        self._keep += [args, begins, sources]
        return args

    def _call(
        self,
        inputs: Callable[[str, np.ndarray], None],
        instruction: Instruction,
        held: np.ndarray,
        sources: np.ndarray,
    ) -> Callable[[int], None]:
        """A function that passes the input rows of each expert's linears to the hook `inputs`, for one pass. held:
        `begins` of the experts of this rank."""
        x, ids, _, gate, up, down = instruction.inputs[:6]
        stacks = [stack for stack in (gate, up, down) if stack]
        names = [[self._names[id(matrix)] for matrix in expert] for expert in zip(*stacks, strict=True)]
        slots, inner = AT_ONCE * ids.width, gate[0].rows
        gate_out = self._room[1].view(np.float32)[: slots * inner].reshape(slots, inner)
        rows = self._memory.view(instruction.buffers[1], self._max_tokens)
        assert rows.shape[1] == x.width
        return lambda first: for_experts(names, inputs, rows[first:], gate_out, held, sources)

    def _matrices(self, stack: Sequence[PackedMatrix]) -> int:
        structs = (type(stack[0].struct) * len(stack))(*(m.struct for m in stack))
        self._keep += [structs, list(stack)]
        return ctypes.addressof(structs)

    def _vectors(self, vectors: Sequence[Any]) -> int:
        addresses = (ctypes.c_void_p * len(vectors))(*map(self._memory.vector, vectors))
        self._keep.append(addresses)
        return ctypes.addressof(addresses)


def _sizes(instructions: Sequence[Instruction]) -> list[int]:
    """Bytes of the buffers of a pass: the converted input rows, and the outputs of gate, up and down."""
    sizes = [0] * 4
    for x, ids, _, gate, _, down, *_ in (instruction.inputs for instruction in instructions):
        row_bytes = max(gate[0].activated_bytes, down[0].activated_bytes)
        room = (row_bytes, gate[0].rows * 4, gate[0].rows * 4, x.width * 4)
        sizes = [max(size, AT_ONCE * ids.width * of_row) for size, of_row in zip(sizes, room, strict=True)]
    return sizes
