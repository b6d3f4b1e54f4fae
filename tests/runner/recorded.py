"""Executors on top of the eager one, as later ones will be built: small enough to read, whole enough for the oracle.

Recorded     a forward recorded once per padded size and replayed over buffers that stay, as a CUDA graph is
Streamed     a wait before each layer and a signal after it: weights come when they are needed and go at once
Calibrating  the inputs of every linear, as calibration wants them
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvasir.engine.core import EngineCore
from kvasir.layers.batch import Batch
from kvasir.ops.graph import Node, Traced
from kvasir.ops.linear import linear
from kvasir.ops.registry import OPS
from kvasir.program.trace import LayerPart, Trace, trace
from kvasir.runner.eager_executor import EagerExecutor
from kvasir.runner.runner import Runner
from tests.runner.streaming import Streaming


def with_executor(core: EngineCore, kind: type[Recorded]) -> Recorded:
    """Puts an executor of this kind in the place of the core's eager one."""
    runner = core.runner
    assert isinstance(runner, Runner)
    old = runner.executor
    assert isinstance(old, EagerExecutor)
    made = kind(old.model, old.cache, runner.capacity.max_tokens_per_step, overlaps=old.overlaps)
    core.runner = Runner(made, runner.capacity, runner.info)
    old.close()
    return made


@dataclass
class Recording:
    """values: by the id of a traced base, where it lies."""

    inputs: int  # the address of the ids
    values: dict[int, Tensor] = field(default_factory=dict)
    replays: int = 0


class Recorded(EagerExecutor):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.trace: Trace = trace(self.model)
        nodes = self.trace.graph.nodes
        self.nodes = nodes[: next(i for i, node in enumerate(nodes) if node.op == "choose")]
        self.recordings: dict[int, Recording] = {}  # by padded size

    def before_layer(self, layer: int) -> None: ...

    def after_layer(self, layer: int) -> None: ...

    def forward(self, batch: Batch) -> Tensor:
        size = len(batch.tokens_T)
        recording = self.recordings.get(size) or self.record(batch, size)
        assert recording.inputs == batch.tokens_T.data_ptr(), "the inputs have moved"
        recording.replays += 1
        begins, ends = (0, *self.trace.ends), self.trace.ends
        for i, node in enumerate(self.nodes):
            if i in begins[:-1]:
                self.before_layer(begins.index(i))
            for out, value in zip(outs_of(node), self.run(node, recording, batch), strict=True):
                recording.values[id(out.base)].copy_(value.view(size, *out.base.shape))
            if i + 1 in ends:
                self.after_layer(ends.index(i + 1))
        return recording.values[id(self.trace.hidden.base)].view(size, -1).clone()

    def record(self, batch: Batch, size: int) -> Recording:
        recording = self.recordings[size] = Recording(batch.tokens_T.data_ptr())
        traced = self.trace.batch
        recording.values |= {id(traced.tokens_T.base): batch.tokens_T, id(traced.positions_T.base): batch.positions_T}
        for node in self.nodes:
            for place, out in enumerate(outs_of(node)):
                chosen = node.op == "route" and place == 0  # ids of experts
                dtype = torch.int64 if chosen else torch.float32
                recording.values[id(out.base)] = torch.empty(size, *out.base.shape, dtype=dtype)
        return recording

    def run(self, node: Node, recording: Recording, batch: Batch) -> tuple[Tensor, ...]:
        """What a node computes from what lies in the buffers."""
        given = [at(value, recording) if isinstance(value, Traced) else value for value in node.inputs]
        if node.op == "store_kv":
            batch.store(given[2], given[0], given[1])
            return ()
        if node.op == "rope":
            given[1:] = batch.angles(given[1])
        if node.op == "paged_attention":
            layer = given[3]
            assert isinstance(node.inputs[1], LayerPart)
            given[1:4] = batch.kv.k(layer), batch.kv.v(layer), batch.attention(layer, self.group(layer, given[0]))
        result = PLAIN[node.op](*given) if node.op in PLAIN else OPS[node.op](*given)
        return result if isinstance(result, tuple) else (result,)

    def group(self, layer: int, q_THd: Tensor) -> int:
        return q_THd.shape[1] // self.cache.spec[layer].heads


class Streamed(Recorded):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        layers = [self.nodes[begin:end] for begin, end in pairwise((0, *self.trace.ends))]
        self.streaming = Streaming(
            [[node.inputs[1] for node in layer if node.op == "linear"] for layer in layers], torch.nan
        )

    def before_layer(self, layer: int) -> None:
        self.streaming.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        self.streaming.after_layer(layer)


class Calibrating(Recorded):
    """The greatest absolute value of each column that a linear was given, by its name."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.seen: dict[str, Tensor] = {}

    def run(self, node: Node, recording: Recording, batch: Batch) -> tuple[Tensor, ...]:
        if node.op == "linear":
            self.look(node.inputs[1], at(node.inputs[0], recording)[: batch.num_tokens])
        elif node.op == "experts":
            self.look_into_experts(node, recording, batch.num_tokens)
        return super().run(node, recording, batch)

    def look_into_experts(self, node: Node, recording: Recording, num_tokens: int) -> None:
        x, ids, _, gates, ups, downs, act, _, biases, weigh_inputs, *_ = node.inputs
        assert biases is None and not weigh_inputs, "the inputs of such experts are others"
        x_TD, ids_Tk = (at(value, recording)[:num_tokens] for value in (x, ids))
        for i in ids_Tk.unique().tolist():
            x_nD = x_TD[(ids_Tk == i).any(1)]
            self.look(gates[i], x_nD)
            self.look(ups[i], x_nD)
            self.look(downs[i], act(linear(x_nD, gates[i])) * linear(x_nD, ups[i]))

    def look(self, weight: Tensor, x: Tensor) -> None:
        name, top = self.trace.names[id(weight)], x.abs().amax(0)
        self.seen[name] = torch.maximum(self.seen[name], top) if name in self.seen else top


PLAIN = {
    "add": torch.add,
    "multiply": torch.mul,
    "add_vector": torch.add,
    "scale": torch.mul,
}


def outs_of(node: Node) -> tuple[Traced, ...]:
    return node.out if isinstance(node.out, tuple) else () if node.out is None else (node.out,)


def at(value: Traced, recording: Recording) -> Tensor:
    buffer = recording.values[id(value.base)]
    return buffer.view(len(buffer), *value.shape)
