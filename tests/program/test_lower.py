"""The laid-out program of every family: each step reads what was meant for it, and threads keep apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvasir.program.calls import Hooks
from kvasir.program.lower import BY_ROW, Buffer, Instruction, lower
from kvasir.program.marshal import prepared

pytest.importorskip("torch")

from kvasir.layers.linear import Linear
from kvasir.layers.mlp import MLP
from kvasir.layers.moe import MoE
from tests.program.made import EACH, loaded

ROWS = 48


@pytest.fixture(scope="module", params=[*EACH, "gemma2 hooked"])
def case(request, tmp_path_factory):
    kind, _, hooked = request.param.partition(" ")
    trace = loaded(kind, tmp_path_factory.mktemp(kind)).trace
    hooks = Hooks(before_layer=print, after_layer=print, inputs=print) if hooked else Hooks()
    return trace, lower(trace, ROWS, 8, prepared, hooks)


def reads(instruction: Instruction) -> Iterator[tuple[Buffer, object]]:
    if instruction.op == "linear":
        yield instruction.buffers[0], id(instruction.products[0][0].x.base)  # for adapters
        for product, activated, _, residual in instruction.products:
            yield activated, ("prepared", id(product.x.base), prepared(product.weight)[0])
            if residual is not None:
                yield residual, id(product.residual.base)
        return
    if instruction.op == "head_linear":
        yield instruction.buffers[1], ("prepared heads", id(instruction.inputs[0].base))
        return
    values = [v for v in instruction.inputs if getattr(v, "kind", "") == "float32"]
    for buffer, value in zip(instruction.buffers[len(written(instruction)) :], values, strict=True):
        yield buffer, id(value.base)


def written(instruction: Instruction) -> list[tuple[Buffer, object]]:
    if instruction.op == "linear":
        return [(out, id(product.out.base)) for product, _, out, _ in instruction.products]
    if instruction.op == "prepare":
        weight, x = instruction.inputs
        return [(instruction.buffers[0], ("prepared", id(x.base), prepared(weight)[0]))]
    if instruction.op == "prepare_heads":
        return [(instruction.buffers[0], ("prepared heads", id(instruction.inputs[1].base)))]
    return [(b, id(o.base)) for b, o in zip(instruction.buffers, instruction.outs, strict=False)]


def span(buffer: Buffer) -> tuple[int, int]:
    return buffer.offset, buffer.offset + buffer.row_bytes * (ROWS if buffer.domain == "rows" else 8)


def overlap(a: Buffer, b: Buffer) -> bool:
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1


@pytest.mark.few(10)
def test_every_step_reads_what_was_written_for_it(case):
    trace, program = case
    holds: list[tuple[Buffer, object]] = []
    for instruction in program.instructions:
        for buffer, value in reads(instruction):
            assert (buffer, value) in holds, f"{instruction.op} reads what lies there no more"
        for buffer, value in written(instruction):
            holds = [(b, v) for b, v in holds if not overlap(b, buffer)]
            holds.append((buffer, value))
    assert (program.hidden, id(trace.hidden.base)) in holds
    assert program.logits is None or (program.logits, id(trace.logits.base)) in holds


def test_between_barriers_rows_stay_with_their_threads(case):
    """Steps that run without meeting touch overlapping memory only as the same rows of the same buffer."""
    _, program = case
    run: list[Instruction] = []
    for instruction in program.instructions:
        if instruction.barrier:
            run = []
        if run:
            assert instruction.op in BY_ROW and run[-1].op in BY_ROW and instruction.domain == run[-1].domain
        for before in run:
            for mine, _ in [*written(instruction), *reads(instruction)]:
                for theirs, _ in [*written(before), *reads(before)]:
                    same = (mine.offset, mine.row_bytes) == (theirs.offset, theirs.row_bytes)
                    assert same or not overlap(mine, theirs), f"{instruction.op} and {before.op}"
        run.append(instruction)


def test_foldable_nodes_are_folded(case):
    trace, program = case
    ops = [instruction.op for instruction in program.instructions]
    assert "add_vector" not in ops or trace.batch.graph.nodes[0].op == "embedding"
    limited = "clamp" in ops  # between the activation and its product, in some layers
    assert limited or not {"silu", "gelu_tanh"} & set(ops) or "gated" not in ops
    traced = [node.op for node in trace.graph.nodes]
    calls = ops.count("call")
    assert len(ops) - calls < len(traced) + sum(op == "linear" for op in ops) * 2


def test_memory_is_shared(case):
    trace, program = case
    values = {id(v.base): v for node in trace.graph.nodes for v in ([node.out] if node.out is not None else [])
              if hasattr(v, "width")}  # fmt: skip
    apart = sum(4 * v.width * (ROWS if v.domain == "rows" else 8) for v in values.values())
    assert program.arena < apart / 2


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", EACH)
def test_the_weights_that_one_row_reads(kind, tmp_path):
    """Every matrix but tables of which rows are looked up; of a mixture's experts, as many as a row goes to."""
    model = loaded(kind, tmp_path)
    parts = [part for _, part in model.model.walk()]
    total = sum(matrix.nbytes for part in parts if isinstance(part, Linear) for matrix in part.weights.values())
    for moe in (part for part in parts if isinstance(part, MoE)):
        first = moe.experts[0]
        parts = (first.up if isinstance(first, MLP) else first.gate_up, first.down)
        expert = sum(m.nbytes for part in parts for m in part.weights.values())
        assert moe.routing.top_k < len(moe.experts)
        total -= (len(moe.experts) - moe.routing.top_k) * expert
    assert model.trace is not None and model.trace.weight_bytes_read == total > 0
