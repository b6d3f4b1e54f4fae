"""Tracing: runs a model's forward once on symbolic values and records its ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvasir.layers.adapters import Slot, head_slot, linears, slots
from kvasir.layers.embedding import Embedding
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope
from kvasir.ops.graph import CHOSEN, ROWS, CannotTrace, Graph, Traced


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """A symbolic reference of a forward to what the cache holds of a layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class _TracedCache:
    def k(self, layer: int) -> LayerPart:
        """A reference to the keys of a layer."""
        return LayerPart(layer)

    def v(self, layer: int) -> LayerPart:
        """A reference to the values of a layer."""
        return LayerPart(layer)

    def state(self, layer: int) -> LayerPart:
        """A reference to the recurrent states of a layer."""
        return LayerPart(layer)

    inputs = index_keys = state


class TracedBatch:
    """The interface of `Batch` that a forward uses, for symbolic rows. Raises CannotTrace for any other attribute."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.tokens_T = graph.value(ROWS, (), "ids")
        self.positions_T = graph.value(ROWS, (), "ids")
        self.types_T = graph.value(ROWS, (), "ids")
        self.kv = _TracedCache()
        self.layers: dict[str, Traced] = {}
        self._selected: Any = None  # by the last indexer
        self.ends: list[int] = []  # for each layer, the number of ops recorded up to its end

    def after_layer(self, layer: int, x_TD: Traced) -> None:
        """Records the end of a layer and its output."""
        self.layers[f"layers.{layer}"] = x_TD
        self.ends.append(len(self.graph.nodes))

    def keep(self, name: str, x_TD: Traced) -> None:
        """Names rows that a task is pooled from."""
        self.layers[name] = x_TD

    def note_weights(self, model_layer: int, layer: int, q_THd: Traced, *inputs: Any) -> None:
        """Does nothing: programs do not export attention weights (see `trace`)."""

    note_selected_weights = note_weights

    def angles(self, rope: Rope) -> tuple[Rope, Rope]:
        """The rope itself stands for its cosines and sines."""
        return rope, rope

    def attention(self, layer: int, group: int) -> int:
        """The layer number stands for its AttentionPlan."""
        return layer

    def states(self, layer: int) -> int:
        """The layer number stands for its StatePlan."""
        return layer

    def select(self, selected_TS: Traced) -> None:
        """As `Batch.select`."""
        self._selected = selected_TS

    def selected(self) -> Any:
        """As `Batch.selected`."""
        return self._selected

    def walked(self, layer: int) -> int:
        """The layer number stands for its Walked rows."""
        return layer

    def store(self, layer: int, k_TKd: Traced, v_TKd: Traced) -> None:
        """Records the op that stores keys and values in the cache."""
        self.graph.record("store_kv", (k_TKd, v_TKd, layer), (), ROWS)

    def __getattr__(self, name: str) -> Any:
        raise CannotTrace(f"the forward uses .{name} of its batch")


@dataclass(frozen=True, slots=True)
class Trace:
    """A model's ops in order. hidden: the forward's result, float32 [rows, width]. logits: of chosen rows, None for a
    model without logits.

    rows: what the forward reads besides ids, float32 [rows, width], None for nothing; written before a run. exports:
    hidden states, by name, that can also be read after a run. slots: adapter slots, by the `id()` of the
    weight. names: of the linears, by the `id()` of the weight. experts: slots of experts, in the same way; elsewhere:
    the names of those that other ranks have. modules: norms and tables that adapters may change, with their paths, by
    the `id()` of the weight. received: values that another stage computes; written before a run, as `rows`. first: the
    number of ops of the whole forward before those of this trace.
    """

    graph: Graph
    batch: TracedBatch
    hidden: Traced
    logits: Traced | None
    exports: Mapping[str, Traced]
    slots: Mapping[int, Slot]
    names: Mapping[int, str]
    rows: Traced | None = None
    experts: Mapping[int, Slot] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    modules: Mapping[int, tuple[str, Module]] = field(default_factory=dict)
    received: tuple[Traced, ...] = ()
    first: int = 0

    @property
    def ends(self) -> tuple[int, ...]:
        """For each layer of the model, the number of ops of the whole forward up to its end."""
        return tuple(self.batch.ends)

    @property
    def layers(self) -> Iterator[tuple[int, int, int]]:
        """(number, begin, end) of each layer that this trace has: its ops are [begin, end)."""
        for layer, (begin, end) in enumerate(pairwise((0, *self.ends))):
            if begin >= self.first and end - self.first <= len(self.graph.nodes):
                yield layer, begin - self.first, end - self.first

    @property
    def results(self) -> tuple[Traced, ...]:
        """The values that are read after a run."""
        return (self.hidden, *self.exports.values(), *(() if self.logits is None else (self.logits,)))

    @property
    def weight_bytes_read(self) -> int:
        """Bytes of the matrices that a step of one row reads; of a mixture's experts, only those of the row. A matrix
        that is used twice counts once."""
        total, seen = 0, set()
        for node in self.graph.nodes:
            if node.op in ("linear", "head_linear"):
                total += 0 if id(node.inputs[1]) in seen else node.inputs[1].nbytes
                seen.add(id(node.inputs[1]))
            elif node.op == "experts":
                ids, stacks = node.inputs[1], node.inputs[3:6]
                total += sum(ids.width * stack[0].nbytes for stack in stacks if stack)
        return total


def trace(model: Any, exports: Sequence[str] = ()) -> Trace:
    """Runs `model.forward` and, unless the model's `head` is None, `model.logits` on symbolic rows.

    exports: "layers.<i>" for the rows after a layer, "last" for the forward's result. Raises CannotTrace if the forward
    uses anything but the ops and the interface of TracedBatch, or does not name an export."""
    graph = Graph()
    batch = TracedBatch(graph)
    with _tracing():
        hidden = model.forward(batch.tokens_T, batch)
        has_logits = hasattr(model, "logits") and getattr(model, "head", model) is not None
        logits = _logits(model, hidden) if has_logits else None
    _check(hidden)
    named = {**batch.layers, "last": hidden}
    if missing := [name for name in exports if name not in named]:
        if missing[0].startswith("attention."):
            raise CannotTrace(f"a program cannot return attention weights ({missing[0]})")
        raise CannotTrace(f"the forward does not name {missing[0]}")
    every = linears(model)
    experts = {name: linear for name, linear in every.items() if name not in slots(model)}
    return Trace(
        graph,
        batch,
        hidden,
        logits,
        {name: named[name] for name in exports},
        _slots(model),
        {id(linear.weights[part]): name for name, (linear, part) in every.items() if part in linear.weights},
        None,
        {id(at.weights[part]): Slot.of(name, at, part) for name, (at, part) in experts.items() if part in at.weights},
        frozenset(name for name, (linear, part) in experts.items() if part not in linear.weights),
        _modules(model),
    )


def _slots(model: Any) -> dict[int, Slot]:
    found = {id(linear.weights[part]): Slot.of(name, linear, part) for name, (linear, part) in slots(model).items()}
    return found | {id(head.weight): Slot.of(name, head, part) for name, (head, part) in head_slot(model).items()}


def _modules(model: Any) -> dict[int, tuple[str, Module]]:
    leaves = ((path, leaf) for path, leaf in model.walk() if isinstance(leaf, Embedding | RMSNorm) and leaf.adaptable)
    return {id(leaf.weight): (path, leaf) for path, leaf in leaves if hasattr(leaf, "weight")}


def trace_draft(draft: Any, layer: int = 0) -> Trace:
    """As `trace`, of a layer of a model that drafts (models.drafting.DraftModel): `rows` are those that its forward
    reads, the export "carried" those that it returns. Its linears have no adapters."""
    graph = Graph()
    batch = TracedBatch(graph)
    rows = graph.value(ROWS, (draft.width,)) if draft.width else None
    with _tracing():
        hidden, carried = draft.forward(batch.tokens_T, rows, batch, layer)
        logits = _logits(draft, hidden, layer)
    _check(hidden)
    exports = {} if carried is None else {"carried": carried}
    return Trace(graph, batch, hidden, logits, exports, {}, {}, rows)


def trace_join(draft: Any, width: int) -> Trace | None:
    """As `trace`, of `draft.join` for `rows` of this width, or of `draft.keep` if it drafts blocks; None if it returns
    them unchanged."""
    graph = Graph()
    batch = TracedBatch(graph)
    rows = graph.value(ROWS, (width,))
    with _tracing():
        joined = draft.keep(rows, batch) if hasattr(draft, "keep") else draft.join(rows)
    _check(joined)
    return None if joined.base is rows else Trace(graph, batch, joined, None, {}, {}, {}, rows)


def trace_correct(draft: Any) -> Trace | None:
    """As `trace`, of `draft.correct` of a model that drafts blocks, whose `rows` it reads, and of `draft.corrections`;
    the export "carried" is what is left. None without a Markov head."""
    if draft.markov is None:
        return None
    graph = Graph()
    batch = TracedBatch(graph)
    rows = graph.value(ROWS, (draft.markov.width + draft.markov.state_width,))
    with _tracing():
        hidden, left = draft.correct(batch.tokens_T, rows, batch)
        logits = draft.corrections(hidden.graph.record("choose", (hidden,), (hidden.shape,), CHOSEN))
    _check(logits)
    return Trace(graph, batch, hidden, logits, {} if left is None else {"carried": left}, {}, {}, rows)


@contextmanager
def _tracing() -> Iterator[None]:
    try:
        yield
    except (TypeError, AttributeError) as error:  # torch itself was given a symbolic value
        raise CannotTrace(f"the forward uses an unsupported operation: {error}") from error


def _logits(model: Any, hidden: Any, *layer: int) -> Traced:
    logits = model.logits(hidden.graph.record("choose", (hidden,), (hidden.shape,), CHOSEN), *layer)
    _check(logits)
    return logits


def _check(rows: Any) -> None:
    if not isinstance(rows, Traced):
        raise CannotTrace("the forward does not return its rows")
