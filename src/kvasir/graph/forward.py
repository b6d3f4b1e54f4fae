"""Launches the calls of a forward over buffers at fixed addresses.

A step's token rows are padded to a bucket, and so are the rows whose logits are computed. The launches of a bucket
depend on nothing but the bucket, so they can be captured as a CUDA graph: what differs between steps is read from the
step's buffers on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvasir.caches import CacheKind
from kvasir.graph.adapter_places import Places
from kvasir.graph.adapters import Adapters
from kvasir.graph.fold import ACTIVATIONS, Call
from kvasir.graph.layout import BYTES, Layout, lay_out
from kvasir.graph.matrices import adjoining, of_experts
from kvasir.graph.triton import expand, take_rows
from kvasir.layers.embedding import PANEL
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.rope import Rope
from kvasir.layers.tensors import torch_dtype
from kvasir.ops.activation.triton import elementwise
from kvasir.ops.attention.triton import ITEM_FIELDS, attend, least_items, plan_attention, tiles_of
from kvasir.ops.collective.triton import pick, side_by_side
from kvasir.ops.columns.triton import take_columns
from kvasir.ops.embedding.triton import lookup
from kvasir.ops.graph import CHOSEN, ROWS, CannotTrace, Traced
from kvasir.ops.heads.triton import join_heads
from kvasir.ops.launch import call as call_on_stream
from kvasir.ops.linear.triton import Delta, gated_product, product, whole_product
from kvasir.ops.linear.triton_in_effect import LEVELS, ROW_FIELDS, InEffect
from kvasir.ops.moe.triton import (
    TILE_FIELDS,
    combine,
    expert_down,
    expert_gated,
    most_tiles,
    route,
    sort_by_expert,
)
from kvasir.ops.norm.triton import join_norm, norm
from kvasir.ops.rope.triton import rope, rope_store, store_kv
from kvasir.parallel import ExpertShare
from kvasir.program.trace import Trace

MAX_ITEMS = 2048  # chunks of a step that programs of their own compute: enough for any device
WHOLE_FROM = 128  # token rows from which one program computes all segments of a sum


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """A step as the kernels read it, at fixed addresses. pieces: see `graph.triton.expand`. tables: block ids by cache
    group and row, int32 [rows + 1, blocks]; the last row's are 0, the scratch block. ids: int32 [rows + 1, max ids].
    chosen: int32, token rows whose logits are computed. adapters: of the rows, int32 [rows + 1, LEVELS, ROW_FIELDS]:
    see ops/linear/triton_in_effect."""

    pieces: Tensor
    ids: Tensor
    tables: tuple[Tensor, ...]
    chosen: Tensor
    rows_T: Tensor
    positions_T: Tensor
    ids_T: Tensor
    adapters: Tensor

    @classmethod
    def empty(
        cls, *, rows: int, ids: int, blocks: Sequence[int], pieces: int, tokens: int, chosen: int, device: Any
    ) -> StepBuffers:
        """Zeros. blocks: of a table, by cache group."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        tables = tuple(zeros(rows + 1, width) for width in blocks)
        return cls(
            pieces=zeros(pieces, 5), ids=zeros(rows + 1, ids), tables=tables, chosen=zeros(chosen),
            rows_T=zeros(tokens), positions_T=zeros(tokens), ids_T=zeros(tokens),
            adapters=zeros(rows + 1, LEVELS, ROW_FIELDS),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The work list of attention for the layers of a kind, and the workspace of tiles that several programs share.
    items, num_items, counters, tops, accs: as `attend` takes them. capacity: rows of the workspace."""

    group: int
    window: int
    causal: bool
    items: Tensor
    num_items: Tensor
    counters: Tensor
    tops: Tensor
    accs: Tensor

    @classmethod
    def empty(cls, *, group: int, kind: CacheKind, pieces: int, tokens: int, device: torch.device) -> AttentionWork:
        """tokens, pieces: of the largest step."""
        items = max(MAX_ITEMS, least_items(tokens, pieces, group))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            group, kind.window, kind.causal,
            zeros(items, ITEM_FIELDS), zeros(1), zeros(items, kind.heads * tiles_of(group)),
            zeros(MAX_ITEMS, kind.heads * group, 2, dtype=torch.float32),
            zeros(MAX_ITEMS, kind.heads * group, kind.value_dim, dtype=torch.float32),
        )  # fmt: skip

    def plan(self, pieces: Tensor) -> None:
        """Lists the work of a step."""
        plan_attention(
            pieces,
            self.items,
            self.num_items,
            group=self.group,
            window=self.window,
            causal=self.causal,
            capacity=len(self.accs),
        )


class Forward:
    """The launches of one model over one cache.

    max_tokens, max_chosen: rows of the largest buckets. positions: number of positions with rope angles. dtype: of the
    matrices' inputs. lender: a forward whose memory is used too if it is large enough, by steps that never overlap.
    """

    def __init__(
        self, trace: Trace, calls: Sequence[Call], cache: KVCache, step: StepBuffers,
        *, max_tokens: int, max_chosen: int, positions: int, dtype: str, lender: Forward | None = None,
    ):  # fmt: skip
        self.cache, self.step, self.dtype = cache, step, dtype
        self.places = Places.of(trace, calls)
        self.adapters: Adapters | None = None
        self._effect: InEffect | None = None  # of the launches that are made, None without adapters
        self.device = cache.device
        self.hidden, self.logits, self.exports = trace.hidden, trace.logits, dict(trace.exports)
        self.given = trace.rows  # written before a step, as `value`
        self._tokens, self._positions = trace.batch.tokens_T, trace.batch.positions_T
        given = () if trace.rows is None else (trace.rows,)
        self.layout: Layout = lay_out(calls, trace.results, {ROWS: max_tokens, CHOSEN: max_chosen}, dtype, given)
        self._borrows = lender is not None and len(lender.memory) >= self.layout.size
        self.memory = (
            lender.memory
            if lender is not None and self._borrows
            else torch.zeros(self.layout.size, dtype=torch.uint8, device=self.device)
        )
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._max_tokens, self._max_positions = max_tokens, positions
        self._works: dict[tuple[CacheKind, int], AttentionWork] = {}
        self._tiles: Tensor | None = None
        self._num_tiles = torch.zeros(1, dtype=torch.int32, device=self.device)
        found = [(call, self._bind(call)) for call in calls]
        self._rows = [run for call, run in found if call.domain == ROWS]
        self._chosen = [run for call, run in found if call.domain == CHOSEN]

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers, without the rope angles and the matrices of adapters."""
        works = [t for w in self._works.values() for t in (w.items, w.num_items, w.counters, w.tops, w.accs)]
        tensors = [*works, *([] if self._tiles is None else [self._tiles])]
        adapted = 0 if self.adapters is None else self.adapters.num_bytes
        own = 0 if self._borrows else self.layout.size
        return own + adapted + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def add_adapters(self) -> Adapters:
        """Makes room for adapters, unless it is there."""
        if self.adapters is None:
            step = self.step
            self.adapters = Adapters(self.places, tokens=len(step.rows_T), chosen=len(step.chosen), device=self.device)
        return self.adapters

    # -- a step

    def run_rows(self, bucket: int, adapted: bool = False) -> None:
        """Computes all token rows of the step, padded to `bucket`. adapted: with the adapters of the rows."""
        step = self.step
        expand(step.pieces, step.ids, *(part[:bucket] for part in (step.rows_T, step.positions_T, step.ids_T)))
        for work in self._works.values():
            work.plan(step.pieces)
        self._run(self._rows, bucket, (step.rows_T[:bucket], step.positions_T[:bucket]) if adapted else None)

    def run_chosen(self, bucket: int, adapted: bool = False) -> None:
        """Computes the logits of the chosen rows, padded to `bucket`. adapted: as above."""
        step = self.step
        self._run(self._chosen, bucket, (step.rows_T, step.positions_T, step.chosen[:bucket]) if adapted else None)

    def _run(self, runs: Sequence[Callable[[int], None]], bucket: int, adapted: tuple[Tensor, ...] | None) -> None:
        """adapted: of the tokens whose adapters are in effect, as `Adapters.find` takes them."""
        self._effect = self.add_adapters().find(self.step.adapters, *adapted) if adapted else None
        for run in runs:
            run(bucket)

    def value(self, value: Traced, count: int) -> Tensor:
        """The first rows of a value, [count, width]; a view that later calls may overwrite."""
        seat = self.layout.seats[id(value.base)]
        return self._view(seat.offset, seat.dtype, (count, value.width))

    # -- buffers

    def _view(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        size = BYTES[dtype]
        for length in shape:
            size *= length
        return self.memory[offset : offset + size].view(torch_dtype(dtype)).view(shape)

    def _parts(self, value: Traced, count: int) -> Tensor:
        """The parts of a product, [P, count, width]."""
        seat = self.layout.seats[id(value.base)]
        parts = seat.ranks if count >= WHOLE_FROM else seat.parts
        return self._view(seat.offset, seat.dtype, (parts, count, value.width))

    def _ids(self, value: Traced, count: int) -> Tensor:
        return (self.step.ids_T if value.base is self._tokens else self.step.positions_T)[:count]

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions, on the device."""
        if id(rope) not in self._angles:
            cos, sin = rope.table(0, self._max_positions)
            self._angles[id(rope)] = torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)
        return self._angles[id(rope)]

    # -- calls

    def _bind(self, call: Call) -> Callable[[int], None]:
        """The function that launches a call for a bucket."""
        if call.kind in _ELEMENTWISE:
            return partial(self._elementwise, call)
        return partial(getattr(self, f"_{call.kind}"), call, **self._prepared(call))

    def _prepared(self, call: Call) -> dict[str, Any]:
        """What a call needs that is made once."""
        if call.kind == "qkv":
            return {"weight": adjoining(call.takes["weights"])}
        if call.kind == "place_qkv":
            rope = call.takes["rope"]
            return {"bias": _joined_bias(call.takes["biases"]), "angles": self.angles(rope) if rope else (None, None)}
        if call.kind == "rope":
            return {"angles": self.angles(call.takes["rope"])}
        if call.kind == "attention":
            return {"work": self._work(call)}
        if call.kind == "experts":
            stacks = {name: of_experts(call.takes[name]) for name in ("gate", "up", "down")}
            experts = len(call.takes["gate"])
            self._tiles_for(len(self.step.rows_T) * call.takes["top"], experts)
            return {"stacks": stacks, "experts": experts}
        return {}

    # -- what ranks exchange

    def _gather(self, call: Call, count: int) -> None:
        everyones, mine = self._parts(call.writes[0], count), self._parts(call.reads[0], count)
        self._exchange(everyones, mine, call.takes["mesh"], call.takes["parts"])

    def _all_reduce(self, call: Call, count: int) -> None:
        [x], (out, scratch), parts = call.reads, call.writes, call.takes["parts"]
        everyones = self._scratch(scratch, (parts, count, x.width))
        self._exchange(everyones, self.value(x, count), call.takes["mesh"], parts)
        join_norm(everyones, None, None, None, 0.0, total=self.value(out, count))

    def _all_gather(self, call: Call, count: int) -> None:
        [x], (out, scratch), columns = call.reads, call.writes, call.takes["columns"]
        size = count * call.takes["width"]
        everyones = self._scratch(scratch, (columns.parts, size))
        self._exchange(everyones, self._scratch(x, (size,)), call.takes["mesh"], columns.parts)
        side_by_side(everyones, self.value(out, count), columns)

    def _pick_rows(self, call: Call, count: int) -> None:
        (x, ids), (out, scratch), table = call.reads, call.writes, call.takes["table"]
        everyones = self._scratch(scratch, (table.parts, count, x.width))
        self._exchange(everyones, self.value(x, count), call.takes["mesh"], table.parts)
        pick(everyones, self._ids(ids, count), self.value(out, count), table, PANEL)

    def _exchange(self, everyones: Tensor, mine: Tensor, mesh: Any, parts: int) -> None:
        call_on_stream(mesh.gather_into, everyones, mine, parts, bytes=2 * everyones.numel() * everyones.element_size())

    def _scratch(self, value: Traced, shape: tuple[int, ...]) -> Tensor:
        """The memory of a float32 value in a shape of its own."""
        return self._view(self.layout.seats[id(value.base)].offset, "float32", shape)

    # -- calls of one rank

    def _work(self, call: Call) -> AttentionWork:
        """The work list of attention, shared by the layers of a kind."""
        kind = self.cache.spec[call.takes["layer"]]
        group = call.reads[0].shape[0] // kind.heads
        key = kind, group
        if key not in self._works:
            self._works[key] = AttentionWork.empty(
                group=group, kind=kind, pieces=len(self.step.pieces), tokens=len(self.step.rows_T), device=self.device
            )
        return self._works[key]

    def _tiles_for(self, pairs: int, experts: int) -> None:
        """Makes room for the tiles of pairs of token rows and experts, shared by all layers."""
        if self._tiles is None or len(self._tiles) < most_tiles(pairs, experts):
            shape = most_tiles(pairs, experts), TILE_FIELDS
            self._tiles = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _elementwise(self, call: Call, count: int) -> None:
        x = self.value(call.reads[0], count)
        other = self.value(call.reads[1], count) if len(call.reads) > 1 else None
        constants = call.takes["constants"]
        if call.kind == "add_vector":
            other = constants[0]
        scalar = constants[0] if constants and call.kind != "add_vector" else 0.0
        elementwise(call.kind, x, other, self.value(call.writes[0], count), scalar)

    def _embedding(self, call: Call, count: int) -> None:
        out, takes = self.value(call.writes[0], count), call.takes
        ids = self._ids(call.reads[0], count)
        lookup(ids, takes["weight"], out, or_first=takes["or_first"], first=takes["first"])
        if self._effect and self.adapters:
            self.adapters.change_lookup(call, ids, out, self._effect)

    def _choose(self, call: Call, count: int) -> None:
        [x], [out] = call.reads, call.writes
        take_rows(self.value(x, self._max_tokens), self.step.chosen[:count], self.value(out, count))

    def _qkv(self, call: Call, count: int, weight: Any) -> None:
        self._multiply(call, count, weight)

    def _product(self, call: Call, count: int) -> None:
        self._multiply(call, count, call.takes["weight"])

    def _multiply(self, call: Call, count: int, weight: Any) -> None:
        out_STN = self._parts(call.writes[0], count)
        for x, rows, delta in self._inputs(call, count):
            if len(out_STN) == 1:
                whole_product(x, weight, out_STN[0, rows], delta=delta)
            else:
                product(x, weight, out_STN[:, rows], delta=delta)

    def _linear(self, call: Call, count: int) -> None:
        weight, bias = call.takes["weight"], call.takes["bias"]
        out = self.value(call.writes[0], count)
        for x, rows, delta in self._inputs(call, count):
            if weight.segments == 1:
                product(x, weight, out[None, rows], bias, delta)
            else:
                whole_product(x, weight, out[rows], bias, delta)

    def _gated(self, call: Call, count: int) -> None:
        takes, out = call.takes, self.value(call.writes[0], count)
        for x, rows, delta in self._inputs(call, count):
            gated_product(x, takes["gate"], takes["up"], out[rows], takes["act"], delta)

    def _inputs(self, call: Call, count: int) -> Iterator[tuple[Tensor, slice, Delta | None]]:
        """The inputs of a product, the rows that they are, and how adapters change them: all rows, or some at a time.
        A sum in several parts has few rows, and those all at once."""
        x = self.value(call.reads[0], count)
        if self._effect is None or self.adapters is None:
            yield x, slice(None), None
            return
        for rows, delta in self.adapters.deltas(call, x, self._effect):
            yield x[rows], rows, delta

    def _join(self, call: Call, count: int) -> None:
        parts, residual = call.reads
        total, takes = call.writes[0], call.takes
        in_place = self.layout.seats[id(total.base)] == self.layout.seats[id(residual.base)]
        join_norm(
            self._parts(parts, count), self.value(residual, count), takes.get("weight"),
            self.value(call.writes[1], count) if len(call.writes) > 1 else None, takes["eps"],
            bias=takes["bias"], post_weight=takes["post_weight"], norm_bias=takes.get("norm_bias"),
            total=None if in_place else self.value(total, count),
        )  # fmt: skip
        if self._effect and self.adapters and len(call.writes) > 1:
            x, out = (self.value(value, count) for value in call.writes)
            self.adapters.change_norm(call, x, out, self._effect)

    def _norm(self, call: Call, count: int) -> None:
        takes, width = call.takes, call.reads[0].shape[-1]
        x, out = (self.value(value, count).view(-1, width) for value in (call.reads[0], call.writes[0]))
        norm(x, takes["weight"], out, takes["eps"], bias=takes["norm_bias"])
        if self._effect and self.adapters:
            self.adapters.change_norm(call, x, out, self._effect)

    def _grouped_norm(self, call: Call, count: int) -> None:
        groups, width = call.reads[0].shape
        x, out = (self.value(value, count).view(-1, width) for value in (call.reads[0], call.writes[0]))
        norm(x, call.takes["weight"], out, call.takes["eps"], groups=groups)

    def _place_qkv(self, call: Call, count: int, bias: Tensor | None, angles: Any) -> None:
        takes, layer = call.takes, call.takes["layer"]
        [query] = call.writes
        heads, dim = query.shape
        rope_store(
            self._parts(call.reads[0], count), self.step.rows_T[:count], self.step.positions_T[:count],
            self._table(layer), angles[0], angles[1], self.cache.k(layer), self.cache.v(layer),
            self.value(query, count).view(count, heads, dim), heads=heads, kv_heads=self.cache.spec[layer].heads,
            head_dim=dim, bias=bias, q_norm=takes["q_norm"], k_norm=takes["k_norm"], eps=takes["eps"],
            scales=self.cache.scales(layer),
        )  # fmt: skip

    def _join_heads(self, call: Call, count: int) -> None:
        a, b, out = (*call.reads, *call.writes)
        join_heads(*(self.value(value, count).view(count, *value.shape) for value in (a, b, out)))

    def _take_columns(self, call: Call, count: int) -> None:
        [x], [out], (first, _) = call.reads, call.writes, call.takes["constants"]
        take_columns(self.value(x, count), first, self.value(out, count))

    def _rope(self, call: Call, count: int, angles: tuple[Tensor, Tensor]) -> None:
        [x], [out] = call.reads, call.writes
        shape, positions = (count, *x.shape), self.step.positions_T[:count]
        rope(self.value(x, count).view(shape), positions, *angles, self.value(out, count).view(shape))

    def _store_kv(self, call: Call, count: int) -> None:
        layer = call.takes["layer"]
        kind = self.cache.spec[layer]
        k = self.value(call.reads[0], count).view(count, kind.heads, kind.key_dim)
        v = self.value(call.reads[1], count).view(count, kind.heads, kind.value_dim)
        rows, positions = self.step.rows_T[:count], self.step.positions_T[:count]
        caches = self.cache.k(layer), self.cache.v(layer)
        store_kv(k, v, rows, positions, self._table(layer), *caches, scales=self.cache.scales(layer))

    def _attention(self, call: Call, count: int, work: AttentionWork) -> None:
        takes, layer = call.takes, call.takes["layer"]
        q, out = call.reads[0], call.writes[0]
        kind = self.cache.spec[layer]
        attend(
            self.value(q, count).view(count, *q.shape), self.cache.k(layer), self.cache.v(layer), self._table(layer),
            work.items, work.num_items, self.value(out, count).view(count, q.shape[0], kind.value_dim), work.counters,
            work.tops, work.accs, scale=takes["scale"], window=kind.window, softcap=takes["softcap"],
            sinks=takes["sinks"], scales=self.cache.scales(layer),
        )  # fmt: skip

    def _route(self, call: Call, count: int) -> None:
        ids, weights = (self.value(value, count) for value in call.writes)
        logits, takes = self.value(call.reads[0], count), call.takes
        route(logits, ids.view(torch.int32), weights, takes["normalise"], takes["scales"])

    def _experts(self, call: Call, count: int, stacks: dict[str, Any], experts: int) -> None:
        (x, ids, weights), (out, order, inner, parts, *shared) = call.reads, call.writes
        gate, up, down = stacks["gate"], stacks["up"], stacks["down"]
        pairs, share = count * call.takes["top"], call.takes["share"]
        ids_Tk = self.value(ids, count).view(torch.int32)
        order_p = self.value(order, count).view(torch.int32).view(-1)
        inner_pI = self._view(self.layout.seats[id(inner.base)].offset, gate.dtype, (pairs, gate.rows))
        parts_SpD = self._scratch(parts, (down.segments, pairs, down.rows))
        tiles, number = self._tiles, self._num_tiles
        assert tiles is not None
        first = share.held[0] if share else 0
        sort_by_expert(ids_Tk, order_p, tiles, number, experts=experts, first=first)
        expert_gated(self.value(x, count), gate, up, order_p, tiles, number, inner_pI, call.takes["act"])
        expert_down(inner_pI, down, order_p, tiles, number, parts_SpD)
        chosen = {}
        if share:
            parts_SpD, chosen = self._shared(share, parts_SpD, shared, ids_Tk)
        combine(parts_SpD, self.value(weights, count), self.value(out, count), **chosen)

    def _shared(
        self, share: ExpertShare, parts_SpD: Tensor, values: Sequence[Traced], ids_Tk: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """What `combine` takes where ranks share the experts."""
        segments, pairs, width = parts_SpD.shape
        if share.experts.parts == 1:
            everyones = self._scratch(values[0], (share.parts * segments, pairs, width))
            self._exchange(everyones, parts_SpD, share.mesh, share.parts)
            return everyones, {}
        joined, everyones = values
        rows_pD = self._scratch(joined, (pairs, width))
        join_norm(parts_SpD, None, None, None, 0.0, total=rows_pD)
        holders = share.experts.parts
        found = self._scratch(everyones, (holders, pairs, width))
        self._exchange(found, rows_pD, share.mesh, holders)
        return found, {"ids": ids_Tk, "experts": share.experts.size}

    def _table(self, layer: int) -> Tensor:
        return self.step.tables[self.cache.group_of(layer)]


_ELEMENTWISE = (*ACTIVATIONS, "add", "multiply", "add_vector", "scale", "softcap")


def _joined_bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of q, k and v as one vector."""
    if all(bias is None for bias in biases):
        return None
    if any(bias is None for bias in biases):
        raise CannotTrace("only some of q, k and v have a bias")
    return torch.cat([bias for bias in biases if bias is not None])
