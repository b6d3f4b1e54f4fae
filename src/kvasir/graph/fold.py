"""Folds the ops of a trace into calls: each is one launch or a few.

A dense layer comes to eight launches:

    qkv           the products of q, k and v, by segments of the sum
    place_qkv     joins the segments, adds biases, normalises heads, rotates, stores keys and values
    attention
    product       of the output projection, by segments
    join          joins the segments, adds bias and residual; the next norm
    gated         act(gate) * up
    product       of the down projection, by segments
    join          the same as above, with the next layer's first norm

Where ranks share the sum of a product, `gather` between it and `join` collects the segments of all. What does not fit a
pattern is computed op by op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.ops.graph import CannotTrace, Node, Traced
from kvasir.ops.moe.routing import Routing
from kvasir.program.trace import Trace

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
# Ops that have a kernel of their own.
SINGLE = (
    *ACTIVATIONS,
    *("add", "multiply", "add_vector", "scale", "softcap", "embedding", "rms_norm", "layer_norm", "linear", "rope"),
    *("store_kv", "paged_attention", "choose", "route", "experts"),
    *("join_heads", "grouped_rms_norm", "take_columns", "all_reduce", "all_gather", "pick_rows"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """kind: what is computed. reads, writes: values, in the order of the kind's kernel. takes: its constants by name.
    layer: of attention."""

    kind: str
    reads: tuple[Traced, ...] = ()
    writes: tuple[Traced, ...] = ()
    takes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def domain(self) -> str:
        """The domain of its values."""
        return (self.writes or self.reads)[0].domain


def fold(trace: Trace) -> list[Call]:
    """The calls of a trace, in order. Raises CannotTrace for an op without a kernel."""
    return list(_Folder(trace).calls())


def _outs(node: Node) -> tuple[Traced, ...]:
    return node.out if isinstance(node.out, tuple) else () if node.out is None else (node.out,)


def _values(node: Node) -> Iterator[Traced]:
    return (value for value in node.inputs if isinstance(value, Traced))


@dataclass(frozen=True, slots=True)
class _Projected:
    """A chain linear [-> all_reduce] [-> add_vector] [-> norm] [-> rope] that ends in a value used only once. shared:
    the ranks that share the sum, and the number of its parts. at: its nodes."""

    x: Traced
    weight: Any
    bias: Any
    norm: Any
    eps: float
    rope: Any
    shared: tuple[Any, int] | None
    at: tuple[int, ...]


class _Folder:
    def __init__(self, trace: Trace):
        self.nodes, self.trace = trace.graph.nodes, trace
        self.made: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for out in _outs(node):
                self.made[id(out.base)] = i
            for value in _values(node):
                self.uses.setdefault(id(value.base), []).append(i)
        self.results = {id(value.base) for value in trace.results}
        self.done: set[int] = set()
        self.at: dict[int, list[Call]] = {}  # calls that replace several nodes, at the place of the last

    def calls(self) -> Iterator[Call]:
        for rule in (self._qkv, self._gated, self._residual):
            for i, node in enumerate(self.nodes):
                if i not in self.done:
                    rule(i, node)
        for i, node in enumerate(self.nodes):
            if i in self.at:
                yield from self.at[i]
            elif i not in self.done:
                yield self._single(node)

    def _replace(self, nodes: tuple[int, ...], calls: list[Call]) -> None:
        """Replaces the nodes by the calls, at the place of the last node."""
        self.done.update(nodes)
        self.at[max(nodes)] = calls

    # -- patterns

    def _qkv(self, i: int, node: Node) -> None:
        """q, k and v of one input, up to the attention that reads them."""
        if node.op != "store_kv":
            return
        k, v, layer = node.inputs
        reader = next((j for j in range(i + 1, len(self.nodes)) if self._attends(j, layer)), None)
        if reader is None:
            return
        chains = [self._projected(value) for value in (self.nodes[reader].inputs[0], k, v)]
        q, k, v = chains
        if q is None or k is None or v is None or v.rope or v.norm is not None or q.rope is not k.rope:
            return
        if q.shared or k.shared or v.shared:
            return
        if len({id(chain.x.base) for chain in (q, k, v)}) > 1 or len({chain.eps for chain in (q, k)}) > 1:
            return
        if len({part.weight.format for part in (q, k, v)}) > 1 or (q.norm is None) != (k.norm is None):
            return
        query = self.nodes[reader].inputs[0]
        if q.norm is not None and len(q.norm) != query.shape[1]:  # over all heads together
            return
        parts = q.x.graph.value(q.x.domain, (sum(chain.weight.rows for chain in (q, k, v)),))
        biases = [chain.bias for chain in (q, k, v)]
        takes = {"biases": biases, "q_norm": q.norm, "k_norm": k.norm, "eps": q.eps, "rope": q.rope, "layer": layer}
        self._replace(
            (*q.at, *k.at, *v.at, i),
            [
                Call("qkv", (q.x,), (parts,), {"weights": [chain.weight for chain in (q, k, v)]}),
                Call("place_qkv", (parts,), (query,), {**takes, "heads": query.shape[0]}),
            ],
        )

    def _attends(self, i: int, layer: int) -> bool:
        node = self.nodes[i]
        return node.op == "paged_attention" and node.inputs[3] == layer

    def _projected(self, value: Any) -> _Projected | None:
        at: list[int] = []
        found: dict[str, Any] = {"norm": None, "eps": 0.0, "rope": None, "bias": None, "shared": None}
        for op in ("rope", "rms_norm", "add_vector", "all_reduce", "linear"):
            made = self._single_use(value)
            if made is None or (node := self.nodes[made]).op != op:
                if op == "linear":
                    return None
                continue
            at.append(made)
            if op == "rope":
                found["rope"] = node.inputs[1]
            elif op == "rms_norm":
                found["norm"], found["eps"] = node.inputs[1:]
                if found["norm"] is None:
                    return None
            elif op == "add_vector":
                found["bias"] = node.inputs[1]
            elif op == "all_reduce":
                found["shared"] = node.inputs[1:3]
            else:
                if node.inputs[2] is not None:
                    return None
                return _Projected(node.inputs[0], node.inputs[1], at=tuple(at), **found)
            value = node.inputs[0]
        return None

    def _single_use(self, value: Any) -> int | None:
        """The node that makes a value that is used only once and is no result."""
        if not isinstance(value, Traced) or id(value.base) in self.results or id(value.base) not in self.made:
            return None
        made = self.made[id(value.base)]
        return made if len(self.uses.get(id(value.base), ())) == 1 and made not in self.done else None

    def _gated(self, i: int, node: Node) -> None:
        """act(x gate) * (x up)"""
        if node.op != "multiply":
            return
        act = self._single_use(node.inputs[0])
        up = self._single_use(node.inputs[1])
        if act is None or up is None or self.nodes[act].op not in ACTIVATIONS or self.nodes[up].op != "linear":
            return
        gate = self._single_use(self.nodes[act].inputs[0])
        if gate is None or self.nodes[gate].op != "linear":
            return
        x, first, gate_bias = self.nodes[gate].inputs
        other, second, up_bias = self.nodes[up].inputs
        if x.base is not other.base or gate_bias is not None or up_bias is not None or first.format != second.format:
            return
        takes = {"gate": first, "up": second, "act": self.nodes[act].op}
        self._replace((gate, up, act, i), [Call("gated", (x,), (node.out,), takes)])

    def _residual(self, i: int, node: Node) -> None:
        """x + [norm](product [+ bias]), and the norm of the sum if it is the next reader."""
        if node.op != "add":
            return
        for residual, other in (node.inputs, node.inputs[::-1]):
            chain = self._product(other)
            if chain is None:
                continue
            at, product, takes = chain
            if self.made.get(id(residual.base), -1) > min(at):
                continue
            parts = product.x.graph.value(node.out.domain, (product.weight.rows,))
            norm = self._norm_after(node.out)
            writes: tuple[Traced, ...] = (node.out,)
            follower = None if norm is None else self.nodes[norm]
            if norm is not None and follower is not None and takes["eps"] in (0.0, follower.inputs[-1]):
                takes |= {"weight": follower.inputs[1], "eps": follower.inputs[-1]}
                takes |= {"norm_bias": follower.inputs[2] if follower.op == "layer_norm" else None}
                writes = (node.out, follower.out)
                self.done.add(norm)
            calls = [Call("product", (product.x,), (parts,), {"weight": product.weight})]
            if product.shared:
                mesh, count = product.shared
                local, parts = parts, product.x.graph.value(node.out.domain, parts.shape)
                calls.append(Call("gather", (local,), (parts,), {"mesh": mesh, "parts": count}))
            self._replace((*at, i), [*calls, Call("join", (parts, residual), writes, takes)])
            return

    def _product(self, value: Any) -> tuple[tuple[int, ...], _Projected, dict[str, Any]] | None:
        """[norm](product [+ bias]) that ends in a value: its nodes, the product, and what `join` takes."""
        post, eps, at = None, 0.0, []
        made = self._single_use(value)
        if made is not None and self.nodes[made].op == "rms_norm" and self.nodes[made].inputs[1] is not None:
            post, eps = self.nodes[made].inputs[1:]
            at, value = [made], self.nodes[made].inputs[0]
        chain = self._projected(value)
        if chain is None or chain.rope or chain.norm is not None:
            return None
        return (*at, *chain.at), chain, {"bias": chain.bias, "post_weight": post, "eps": eps}

    def _norm_after(self, total: Traced) -> int | None:
        """The norm over the whole of `total`, if one reads it."""
        for use in self.uses.get(id(total.base), ()):
            node = self.nodes[use]
            if use in self.done or node.op not in ("rms_norm", "layer_norm") or node.inputs[1] is None:
                continue
            if node.inputs[0].shape == total.shape:
                return use
        return None

    # -- ops of their own

    def _single(self, node: Node) -> Call:
        if node.op not in SINGLE:
            raise CannotTrace(f"no Triton kernel for {node.op}")
        return _SINGLES.get(node.op, _plain)(node)


def _plain(node: Node) -> Call:
    constants = tuple(value for value in node.inputs if not isinstance(value, Traced))
    return Call(node.op, tuple(_values(node)), _outs(node), {"constants": constants})


def _linear(node: Node) -> Call:
    x, weight, bias = node.inputs
    return Call("linear", (x,), _outs(node), {"weight": weight, "bias": bias})


def _norm(node: Node) -> Call:
    x, weight, *bias, eps = node.inputs
    if weight is None and node.op != "rms_norm":
        raise CannotTrace("a LayerNorm without weights has no Triton kernel")
    if weight is not None and math.prod(weight.shape) > x.shape[-1]:
        raise CannotTrace("a norm with weights of each head has no Triton kernel")
    return Call("norm", (x,), _outs(node), {"weight": weight, "norm_bias": bias[0] if bias else None, "eps": eps})


def _grouped_norm(node: Node) -> Call:
    x, weight, eps = node.inputs
    return Call("grouped_norm", (x,), _outs(node), {"weight": weight, "eps": eps})


def _rope(node: Node) -> Call:
    return Call("rope", (node.inputs[0],), _outs(node), {"rope": node.inputs[1]})


def _store(node: Node) -> Call:
    k, v, layer = node.inputs
    return Call("store_kv", (k, v), (), {"layer": layer})


def _attention(node: Node) -> Call:
    q, keys, _, layer, scale, softcap, sinks, relative, _, value_dim = node.inputs
    if relative is not None:
        raise CannotTrace("attention by relative position has no Triton kernel")
    if value_dim not in (0, q.shape[1]):
        raise CannotTrace(f"no Triton kernel for keys of {q.shape[1]} and values of {value_dim}")
    takes = {"layer": layer, "keys": keys.layer, "scale": scale, "softcap": softcap, "sinks": sinks}
    return Call("attention", (q,), _outs(node), takes)


def _embedding(node: Node) -> Call:
    ids, weight, first, or_first = node.inputs
    return Call(
        "embedding", (ids,), _outs(node), {"weight": weight, "or_first": bool(or_first), "first": first or 0}
    )  # fmt: skip


def _route(node: Node) -> Call:
    logits, routing, bias, scales = node.inputs
    if bias is not None or routing != Routing(routing.top_k, normalise=routing.normalise):
        raise CannotTrace("experts chosen by anything but a softmax of the logits have no Triton kernel")
    return Call("route", (logits,), _outs(node), {"normalise": routing.normalise, "scales": scales})


def _experts(node: Node) -> Call:
    """Also writes the order of the pairs, each pair's inner row, and the segments of its output."""
    x, ids, weights, gate, up, down, act, share, biases, weigh_inputs, _, limit = node.inputs
    if biases or weigh_inputs or limit or not up or act.name not in ACTIVATIONS:
        raise CannotTrace(
            f"experts with biases, weighted inputs, limits, no gates or {act.__name__} have no Triton kernel"
        )
    top, down_ = ids.width, down[0]
    row = top * down_.rows
    sizes = [top, top * gate[0].rows, down_.segments * row]
    if share is not None:  # of this rank, and of all
        by_id = share.experts.parts > 1
        sizes += [row, share.experts.parts * row] if by_id else [share.parts * down_.segments * row]
    scratch = tuple(x.graph.value(x.domain, (size,)) for size in sizes)
    takes = {"gate": gate, "up": up, "down": down, "act": act.name, "top": top, "share": share}
    return Call("experts", (x, ids, weights), (node.out, *scratch), takes)


def _all_reduce(node: Node) -> Call:
    """Also writes the sums of all ranks."""
    x, mesh, parts, *_ = node.inputs
    scratch = x.graph.value(x.domain, (parts * x.width,))
    return Call("all_reduce", (x,), (*_outs(node), scratch), {"mesh": mesh, "parts": parts})


def _all_gather(node: Node) -> Call:
    """Also writes the columns of all ranks. width: of the widest part, which each rank sends."""
    x, mesh, columns = node.inputs
    width = max(last - first for first, last in map(columns.range, range(columns.parts)))
    scratch = x.graph.value(x.domain, (columns.parts * width,))
    return Call("all_gather", (x,), (*_outs(node), scratch), {"mesh": mesh, "columns": columns, "width": width})


def _pick_rows(node: Node) -> Call:
    """Also writes the rows of all ranks."""
    x, ids, mesh, table = node.inputs
    scratch = x.graph.value(x.domain, (table.parts * x.width,))
    return Call("pick_rows", (x, ids), (*_outs(node), scratch), {"mesh": mesh, "table": table})


_SINGLES: dict[str, Callable[[Node], Call]] = {
    "linear": _linear,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "grouped_rms_norm": _grouped_norm,
    "rope": _rope,
    "store_kv": _store,
    "paged_attention": _attention,
    "embedding": _embedding,
    "route": _route,
    "experts": _experts,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "pick_rows": _pick_rows,
}
