"""Lowers traced ops to instructions over buffers: fused where it pays, placed once, with barriers between threads.

apart     the adapters of a linear whose product is scaled, or summed over ranks, follow after that; A x is all-reduced
          like the product
fold      fuses bias and residual into their product, f(gate) * up into one op, adjacent products of one input
place     each value has a place in the arena from its first to its last use; ops on rows may run in place
barrier   before an instruction that reads rows written by other threads; those that go row by row split the rows in
          the same way, so there is no barrier between them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvasir.layers.adapters import Slot
from kvasir.ops.graph import CHOSEN, ROWS, CannotTrace, Node, Traced
from kvasir.ops.linear.native import PANEL
from kvasir.program.calls import NO_HOOKS, Hooks, for_each
from kvasir.program.products import Product, split_adapters
from kvasir.program.trace import Trace

ALIGN = 64
FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
SCALES = ("scale", "scale_rows", "scale_heads")
ELEMENTWISE = (*FUNCTIONS, *SCALES, "add", "multiply", "add_vector", "softcap", "clamp", "xielu")
# Ops on rows of several streams, and others on whole rows.
STREAMS = ("predict_streams", "correct_streams", "add_to_streams")
WHOLE_ROWS = (*STREAMS, "gaussian_cut", "match_magnitude", "scale_columns")
# Ops whose threads split the rows: each thread reads and writes only its own rows.
BY_ROW = (
    *ELEMENTWISE,
    "embedding",
    "rms_norm",
    "grouped_rms_norm",
    "layer_norm",
    "rope",
    "store_kv",
    "prepare",
    "prepare_heads",
    "join_heads",
    "choose",
    "route",
    "gated",
    "take_columns",
    *WHOLE_ROWS,
)
COLLECTIVES = ("all_reduce", "all_gather", "pick_rows")  # collectives of ranks
ALL_TOGETHER = (
    "paged_attention",
    "gated_delta",
    "short_conv",
    "select_tokens",
    "selected_attention",
    "causal_convolution",
    "selective_scan",
    "token_shift",
    "wkv",
    "experts",
    "head_linear",
    "adapt_inner",
    "adapt_add",
    "call",
    "type_rows",
    *COLLECTIVES,
)
IN_PLACE = (
    *ELEMENTWISE,
    *(op for op in WHOLE_ROWS if op != "predict_streams"),
    "rms_norm",
    "grouped_rms_norm",
    "layer_norm",
    "rope",
    "gated",
    "adapt_add",
    "all_reduce",
    "pick_rows",
)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A place in the arena. offset: bytes. domain: ROWS or CHOSEN, which defines the number of rows."""

    offset: int
    row_bytes: int
    domain: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: an op with its inputs and the places of its values. buffers: of the outputs, then of the float32
    inputs, in order; a linear instruction has the buffer of its input there and the others in `products`."""

    op: str
    inputs: tuple[Any, ...] = ()
    outs: tuple[Traced, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    products: tuple[tuple[Product, Buffer, Buffer, Buffer | None], ...] = ()  # (.., prepared, out, residual)
    barrier: bool = False
    domain: str = "rows"


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of `lower`. instructions[:chosen_from] run over all token rows, the others over the chosen rows.
    exports: buffers of hidden states, by name. arena: bytes. rows, received: the buffers of the trace's."""

    instructions: tuple[Instruction, ...]
    chosen_from: int
    hidden: Buffer
    logits: Buffer | None
    exports: Mapping[str, Buffer]
    arena: int
    rows: Buffer | None = None
    received: tuple[Buffer, ...] = ()


def lower(
    trace: Trace,
    max_rows: int,
    max_chosen: int,
    prepared: Callable[[Any], tuple[Any, int]],
    hooks: Hooks = NO_HOOKS,
) -> Lowered:
    """Lowers a trace. prepared: for a packed weight, the format that its input rows must be converted to (a key;
    weights with equal keys share the converted rows), and the bytes of such a row. max_rows, max_chosen: rows of the
    two domains. Raises CannotTrace for an op without a kernel."""
    nodes = _group(_fold(split_adapters(_product_of(n, trace.slots) for n in hooks.nodes(trace)), trace))
    return _Placer(nodes, trace, {ROWS: max_rows, CHOSEN: max_chosen}, prepared, hooks).run()


# --- fold -------------------------------------------------------------------------------------------


def _values(inputs: tuple[Any, ...]) -> Iterator[Traced]:
    for value in inputs:
        if isinstance(value, Product):
            yield value.x
            if value.residual is not None:
                yield value.residual
        elif isinstance(value, Traced):
            yield value


def _outs(node: Node) -> tuple[Traced, ...]:
    return node.out if isinstance(node.out, tuple) else () if node.out is None else (node.out,)


@dataclass(slots=True)
class _Uses:
    """For each value, by the id of its base: the index of the node that makes it, and the number of its uses."""

    made: dict[int, int] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: list[Node], trace: Trace) -> _Uses:
        """The uses of all values in a list of nodes."""
        uses = cls()
        for i, node in enumerate(nodes):
            for out in _outs(node):
                uses.made[id(out.base)] = i
            for value in _values(node.inputs):
                uses.count[id(value.base)] = uses.count.get(id(value.base), 0) + 1
        for result in trace.results:
            uses.count[id(result.base)] = uses.count.get(id(result.base), 0) + 1
        return uses


def _fold(nodes: list[Node], trace: Trace) -> list[Node]:
    """The nodes, with each pattern that a rule finds merged into the earlier of its nodes."""
    nodes = _delta(nodes)
    for rule in (_bias, _gated, _residual):
        uses, kept = _Uses.of(nodes, trace), list[Node | None](nodes)
        for at in range(len(nodes)):
            if found := rule(nodes, at, uses):
                into, merged = found
                nodes[into] = merged
                kept[into], kept[at] = merged, None
                uses.made |= {id(out.base): into for out in _outs(merged)}
        nodes = [node for node in kept if node is not None]
    return nodes


def _delta(nodes: list[Node]) -> list[Node]:
    """The nodes, with each gated delta rule and the ops that only prepare its inputs merged into one: (q, k, v, b, a,
    first head of b and a, log_rate, bias, strength, kernel, layer, heads, act)."""
    made = {id(out.base): node for node in nodes for out in _outs(node)}
    gates = {id(x.base) for node in nodes if node.op == "delta_gates" for x in _values(node.inputs)}
    merged: list[Node] = []
    for node in nodes:
        if node.op in ("delta_gates", "delta_inputs") or (node.op == "take_columns" and id(node.out.base) in gates):
            continue
        if node.op == "gated_delta":
            inputs, kernel, state, _, _, heads, act = node.inputs
            q, k, v, beta, _ = made[id(inputs.base)].inputs
            b, a, log_rate, bias, strength = made[id(beta.base)].inputs
            b_from, a_from = (made[id(gate.base)] for gate in (b, a))
            first = 0
            if b_from.op == "take_columns":
                b, first, _ = b_from.inputs
                a = a_from.inputs[0]
            parts = (b, a, first, log_rate, bias, strength)
            node = Node(node.op, (q, k, v, *parts, kernel, state.layer, heads, act), node.out)
        merged.append(node)
    return merged


def _product_of(node: Node, slots: Mapping[int, Slot]) -> Node:
    if node.op != "linear":
        return node
    x, weight, bias = node.inputs
    return Node("linear", (Product(weight, x, node.out, slots.get(id(weight)), bias),), node.out)


def _single(nodes: list[Node], value: Any, uses: _Uses, ops: tuple[str, ...]) -> int | None:
    """The index of the node that makes `value`, if its op is one of `ops` and the value is used only once."""
    if not isinstance(value, Traced) or uses.count.get(id(value.base)) != 1:
        return None
    made = uses.made.get(id(value.base))
    return made if made is not None and nodes[made].op in ops else None


def _bias(nodes: list[Node], at: int, uses: _Uses) -> tuple[int, Node] | None:
    node = nodes[at]
    if node.op != "add_vector":
        return None
    made = _single(nodes, node.inputs[0], uses, ("linear",))
    if made is None or nodes[made].inputs[0].bias is not None:
        return None
    product = replace(nodes[made].inputs[0], bias=node.inputs[1], out=node.out)
    return made, Node("linear", (product,), node.out)


def _gated(nodes: list[Node], at: int, uses: _Uses) -> tuple[int, Node] | None:
    node = nodes[at]
    if node.op != "multiply":
        return None
    made = _single(nodes, node.inputs[0], uses, FUNCTIONS)
    if made is None:
        return None
    act = nodes[made]
    inputs = (act.inputs[0], node.inputs[1], act.op)
    if uses.made.get(id(node.inputs[1].base), -1) > made:
        return None
    return made, Node("gated", inputs, node.out)


def _residual(nodes: list[Node], at: int, uses: _Uses) -> tuple[int, Node] | None:
    node = nodes[at]
    if node.op != "add":
        return None
    for mine, other in (node.inputs, node.inputs[::-1]):
        made = _single(nodes, mine, uses, ("linear",))
        if made is None or uses.made.get(id(other.base), -1) > made or nodes[made].inputs[0].residual is not None:
            continue
        product = replace(nodes[made].inputs[0], residual=other, out=node.out)
        return made, Node("linear", (product,), node.out)
    return None


def _group(nodes: list[Node]) -> list[Node]:
    """Merges adjacent products of the same input into one instruction."""
    grouped: list[Node] = []
    for node in nodes:
        last = grouped[-1] if grouped else None
        if (
            last is not None
            and node.op == last.op == "linear"
            and node.inputs[0].x.base is last.inputs[0].x.base
            and node.inputs[0].residual is None
            and node.inputs[0].replaces == last.inputs[0].replaces
        ):
            grouped[-1] = Node("linear", last.inputs + node.inputs, _outs(last) + _outs(node))
        else:
            grouped.append(node)
    return grouped


def _check_experts(gate: Sequence[Any], up: Sequence[Any], down: Sequence[Any]) -> None:
    """Raises CannotTrace unless all gates and ups of a layer share a weight format, and all downs: each of the two sets
    is computed by one call."""
    if len({m.key for m in (*gate, *up)}) > 1 or len({m.key for m in down}) > 1:
        raise CannotTrace("the experts of a layer have different weight formats")


# --- place ------------------------------------------------------------------------------------------


class Arena:
    """First-fit allocation of byte ranges. A released range is free only after the next barrier: until then, threads
    may still read it."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []  # (offset, end), ascending
        self.waiting: list[int] = []
        self.size = 0

    def take(self, size: int) -> int:
        """Reserves `size` bytes, rounded up to ALIGN; returns their offset."""
        size = -(-size // ALIGN) * ALIGN
        offset = 0
        for begin, end in self.taken:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        self.taken = sorted([*self.taken, (offset, offset + size)])
        self.size = max(self.size, offset + size)
        return offset

    def give_back(self, offset: int) -> None:
        """Releases the range at an offset, from the next barrier on."""
        self.waiting.append(offset)

    def barrier(self) -> None:
        """Frees the released ranges: no thread reads them after this point."""
        self.taken = [t for t in self.taken if t[0] not in self.waiting]
        self.waiting = []


class _Placer:
    def __init__(self, nodes: list[Node], trace: Trace, rows: dict[str, int], prepared: Callable, hooks: Hooks):
        self.nodes, self.trace, self.rows, self.prepared, self.hooks = nodes, trace, rows, prepared, hooks
        self.arena = Arena()
        self.place: dict[int, Buffer] = {}
        self.instructions: list[Instruction] = []
        self.last: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for value in _values(node.inputs):
                self.last[id(value.base)] = i
        self.last |= {id(v.base): len(nodes) for v in trace.results}

    def run(self) -> Lowered:
        """Places all nodes in order."""
        chosen_from = None
        rows = None if self.trace.rows is None else self._new(self.trace.rows)
        received = tuple(map(self._new, self.trace.received))
        for at, node in enumerate(self.nodes):
            if node.op == "choose":
                chosen_from = len(self.instructions)
            special = {"linear": self._linear, "head_linear": self._head_linear}
            special.get(node.op, self._plain)(at, node)
        logits = self.trace.logits
        return Lowered(
            tuple(self.instructions),
            len(self.instructions) if chosen_from is None else chosen_from,
            self.place[id(self.trace.hidden.base)],
            None if logits is None else self.place[id(logits.base)],
            {name: self.place[id(value.base)] for name, value in self.trace.exports.items()},
            self.arena.size,
            rows,
            received,
        )

    # -- instructions

    def _plain(self, at: int, node: Node) -> None:
        if node.op not in (*BY_ROW, *ALL_TOGETHER):
            raise CannotTrace(f"no kernel for {node.op}")
        if node.op == "experts":
            _check_experts(*node.inputs[3:6])
        outs, values = _outs(node), tuple(v for v in _values(node.inputs) if v.kind == "float32")
        domain = (outs or values)[0].domain if outs or values else ROWS
        barrier = self._needs_barrier(node.op, domain)
        places = tuple(self._out(at, node, out, values) for out in outs)
        buffers = places + tuple(self.place[id(v.base)] for v in values)
        self.instructions.append(Instruction(node.op, node.inputs, outs, buffers, (), barrier, domain))
        self._forget(at, values, places)

    def _linear(self, at: int, node: Node) -> None:
        products: tuple[Product, ...] = node.inputs
        x, domain = products[0].x, products[0].x.domain
        rows = self.place[id(x.base)]
        self._call_for_inputs(products, rows)
        prepared: dict[Any, Buffer] = {}
        for product in products:
            key, row_bytes = self.prepared(product.weight)
            if key in prepared:
                continue
            barrier = self._needs_barrier("prepare", domain)
            prepared[key] = Buffer(self.arena.take(row_bytes * self.rows[domain]), row_bytes, domain)
            self.instructions.append(
                Instruction("prepare", (product.weight, x), (), (prepared[key], rows), (), barrier, domain)
            )
        self._needs_barrier("linear", domain)
        done = []
        for product in products:
            residual = None if product.residual is None else self.place[id(product.residual.base)]
            place = self._residual_place(at, product, residual)
            done.append((product, prepared[self.prepared(product.weight)[0]], place, residual))
        self.instructions.append(Instruction("linear", (), _outs(node), (rows,), tuple(done), True, domain))
        for buffer in prepared.values():
            self.arena.give_back(buffer.offset)
        self._forget(at, tuple(_values(node.inputs)), tuple(place for _, _, place, _ in done))

    def _head_linear(self, at: int, node: Node) -> None:
        x, weight = node.inputs
        if weight.rows // x.shape[0] % PANEL:
            raise CannotTrace(f"no kernel for matrices of {weight.rows // x.shape[0]} rows for each head")
        row_bytes = x.shape[0] * self.prepared(weight)[1]
        barrier = self._needs_barrier("prepare_heads", x.domain)
        prepared = Buffer(self.arena.take(row_bytes * self.rows[x.domain]), row_bytes, x.domain)
        rows = self.place[id(x.base)]
        inputs = weight, x
        self.instructions.append(Instruction("prepare_heads", inputs, (), (prepared, rows), (), barrier, x.domain))
        self._needs_barrier("head_linear", x.domain)
        out = self._new(node.out)
        self.instructions.append(
            Instruction("head_linear", node.inputs, (node.out,), (out, prepared), (), True, x.domain)
        )  # fmt: skip
        self.arena.give_back(prepared.offset)
        self._forget(at, (x,), (out,))

    def _call_for_inputs(self, products: tuple[Product, ...], rows: Buffer) -> None:
        found, x = (self.trace.names.get(id(product.weight)) for product in products), products[0].x
        names = [name for name in found if name]
        if self.hooks.inputs and names:
            call = partial(for_each, names, self.hooks.inputs)
            barrier = self._needs_barrier("call", x.domain)
            self.instructions.append(Instruction("call", (call, x), (), (rows,), (), barrier, x.domain))

    # -- buffers

    def _residual_place(self, at: int, product: Product, residual: Buffer | None) -> Buffer:
        """The buffer of a product: that of its residual if this is the residual's last use, else a new one."""
        if residual is not None and product.residual is not None and self.last[id(product.residual.base)] == at:
            self.place[id(product.out.base)] = residual
            return residual
        return self._new(product.out)

    def _out(self, at: int, node: Node, out: Traced, values: tuple[Traced, ...]) -> Buffer:
        if node.op in IN_PLACE:
            for value in values:
                place = self.place[id(value.base)]
                if self.last[id(value.base)] == at and place.row_bytes == 4 * out.width and place.domain == out.domain:
                    self.place[id(out.base)] = place
                    return place
        return self._new(out)

    def _new(self, value: Traced) -> Buffer:
        row_bytes = 4 * value.width
        buffer = Buffer(self.arena.take(row_bytes * self.rows[value.domain]), row_bytes, value.domain)
        self.place[id(value.base)] = buffer
        return buffer

    def _forget(self, at: int, values: tuple[Traced, ...], places: tuple[Buffer, ...]) -> None:
        """Releases the buffers of values used for the last time, unless an output reuses the buffer."""
        kept = {p.offset for p in places}
        for base in {id(v.base): v for v in values}:
            if self.last[base] == at and self.place[base].offset not in kept:
                self.arena.give_back(self.place[base].offset)

    def _needs_barrier(self, op: str, domain: str) -> bool:
        last = self.instructions[-1] if self.instructions else None
        if last is None or (op in BY_ROW and last.op in BY_ROW and last.domain == domain):
            return False
        self.arena.barrier()
        return True
